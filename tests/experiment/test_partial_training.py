"""Training of a part of a model: the frozen part stays bit-identical and is in no vector, state or message."""

from __future__ import annotations

import copy
import importlib.util
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import fedflat
from fedflat.engines.cpu.engine import LoopEngine
from fedflat.engines.gpu.engine import LaneEngine
from fedflat.engines.gpu.step import compiled_step
from fedflat.engines.problem.problem import Problem
from fedflat.engines.round.contract import ModelState
from fedflat.experiment.analysis.replay import Replay
from fedflat.experiment.callback import Callback
from fedflat.experiment.make_config import make_config
from fedflat.experiment.run import Run
from fedflat.models import build, merge_adapters
from fedflat.models.low_rank import adapter_parameters

VIT = "vit-tiny(depth=2,width=12)"
LORA = "lora(rank=2)"
EXACT = "lora(rank=2,exact=true)"
SETTINGS: dict[str, Any] = {
    "model": VIT,
    "rounds": 3,
    "local_steps": 2,
    "clients": 6,
    "clients_per_round": 3,
    "partition": "iid",
    "workers": 1,
    "device": "cpu",
}
ADAPTERS_AND_HEAD = 2 * (4 * 12 + 2 * 12 * 2) + 13 * 10


def run_of(
    algorithm: str = "fedavg", folder: Path | None = None, *, own: nn.Module | None = None, **settings: Any
) -> Run:
    model = {"model": f"custom:{type(own).__name__}"} if own is not None else {}
    return Run(make_config(None, SETTINGS | {"algorithm": algorithm} | settings | model), folder, model=own)


def state(run: Run) -> dict[str, Tensor]:
    """A copy of the complete server model."""
    return {name: tensor.clone() for name, tensor in run.problem.state_dict(*run.server.model).items()}


def changed(before: dict[str, Tensor], after: dict[str, Tensor]) -> set[str]:
    assert before.keys() == after.keys()
    return {name for name in before if not torch.equal(before[name], after[name])}


class OneFrozen(nn.Module):
    """A user-defined module whose first layer is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 16), nn.Linear(16, 10)
        self.first.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.last(torch.relu(self.first(x.flatten(1))))
        return logits


@pytest.mark.parametrize(
    ("algorithm", "down", "up", "state_vectors"), [("fedavg", 1, 1, 0), ("fedmoswa", 2, 2, 1), ("fedsam", 1, 1, 0)]
)
def test_only_adapters_and_head_are_trained_sent_and_stored(
    tmp_path: Path, algorithm: str, down: int, up: int, state_vectors: int
) -> None:
    run = run_of(algorithm, tmp_path / "run", train=LORA)
    before = state(run)
    run.execute()
    moved = changed(before, state(run))
    trained = adapter_parameters(run.problem.model) | {"head.weight", "head.bias"}
    assert moved == trained, "exactly the trained parameters change"
    size = ADAPTERS_AND_HEAD
    assert len(run.server.model.weights) == size and sum(before[name].numel() for name in trained) == size

    bytes_per_round = 3 * 4 * size
    assert [(r["bytes_down"], r["bytes_up"]) for r in run.history] == [
        (n * down * bytes_per_round, n * up * bytes_per_round) for n in range(4)
    ]
    buffers = run.engine.cohort_buffers  # type: ignore[attr-defined]
    sent = buffers.displacement.nbytes + sum(rows.nbytes for rows in buffers.sent.values())
    received = buffers.z.nbytes + sum(vector.nbytes for vector in buffers.server.values())
    assert (3 * received, sent) == (down * bytes_per_round, up * bytes_per_round), "the bytes in the cohort's buffers"

    rows = tmp_path / "run" / "state" / "clients" / "rows.bin"
    assert rows.exists() == bool(state_vectors)
    if state_vectors:
        clients = rows.with_name("index.bin").stat().st_size // 40
        assert rows.stat().st_size in (state_vectors * 4 * size * places for places in (2 * clients - 1, 2 * clients))


@pytest.mark.parametrize(
    ("model", "train", "moving"),
    [
        ("resnet20", "head", ("classifier.",)),
        ("resnet20", "norms+head", None),
        (VIT, "layers(names=blocks.1|norm)", ("blocks.1.", "norm.")),
        ("mlp(layers=2)", "lora(layers=all,only_b=true)", None),
    ],
)
def test_any_part_of_any_model_can_be_trained(model: str, train: str, moving: tuple[str, ...] | None) -> None:
    run = run_of("fedmoswa+asam", model=model, train=train, rounds=2, training__weight_decay=0.01)
    before = state(run)
    run.execute()
    moved = changed(before, state(run))
    assert moved == set(run.problem.layout.names)
    if moving is not None:
        assert moved == {name for name in before if name.startswith(moving)}
    elif train.startswith("lora"):
        assert {name for name in moved if "lora" in name} == {name for name in before if name.endswith("lora_b_weight")}
    else:
        assert all(before[name].ndim == 1 or name.startswith("classifier") for name in moved)


def test_frozen_batch_norm_keeps_its_statistics_and_uses_them() -> None:
    run = run_of(model="resnet20(norm=batch)", train="head+layers(names=blocks.8)", rounds=2)
    before = state(run)
    run.execute()
    moved = changed(before, state(run))
    statistics = {name for name in moved if "running" in name}
    assert statistics == {name for name in before if name.startswith("blocks.8.") and "running" in name}
    assert run.problem.buffer_layout.size == 4 * 64
    run.problem.set_training_mode()
    modes = {name: m.training for name, m in run.problem.model.named_modules() if isinstance(m, nn.BatchNorm2d)}
    assert {name for name, on in modes.items() if on} == {name for name in modes if name.startswith("blocks.8.")}
    estimated = run.problem.estimate_buffers(run.server.model.weights, run.server.model.integer_buffers)
    assert estimated.shape == (4 * 64,) and bool(estimated.abs().min() > 0), (
        "only statistics of trained layers are estimated"
    )


@pytest.mark.parametrize("frozen", [True, False])
def test_frozen_group_norms_before_the_trained_part(frozen: bool) -> None:
    """torch crashes in the backward pass of such a GroupNorm if images are in channels-last format."""
    own = nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 10))
    own[0].requires_grad_(not frozen)
    first = nn.Sequential(nn.GroupNorm(1, 1), own)
    for model, plain in ((own, frozen), (first, True)):
        run = run_of(own=model, rounds=1)
        assert run.execute().status == "finished" and run.problem.channels_last is not plain


def test_a_module_that_freezes_its_own_parameters(tmp_path: Path) -> None:
    torch.manual_seed(0)
    own = OneFrozen()
    result = fedflat.run(
        "scaffold", model=own, out=tmp_path / "run", **{k: v for k, v in SETTINGS.items() if k != "model"}
    )
    saved = load_file(tmp_path / "run" / "model.safetensors")
    assert saved.keys() == own.state_dict().keys(), "the saved model includes frozen parameters"
    assert changed(dict(own.state_dict()), saved) == {"last.weight", "last.bias"}
    assert result.history[-1]["bytes_up"] == 3 * 3 * 4 * 2 * 17 * 10
    again = fedflat.load(tmp_path / "run").evaluate(on="test", network=OneFrozen())
    assert again["test"]["accuracy"] == pytest.approx(result.history[-1]["test"]["server"]["accuracy"]), (
        "frozen parameters come from the saved model"
    )


def test_a_fully_frozen_model_is_rejected() -> None:
    own = nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).requires_grad_(False)
    with pytest.raises(fedflat.UserError, match="all parameters of custom:Sequential are frozen"):
        run_of(own=own)


def weights_by(engine: Any, algorithm: str, arithmetic: torch.dtype | None = None, **settings: Any) -> Tensor:
    run = run_of(algorithm, rounds=2, **settings)
    if arithmetic is not None:
        p = run.problem
        run.problem = Problem(
            p.model, p.task, p.data, p.augmentation, arithmetic=arithmetic, evaluation_sets=p.evaluation_sets
        )
    run.engine = engine(run.problem)
    before = state(run)
    run.execute()
    assert changed(before, state(run)) <= {*run.problem.layout.names, *run.problem.buffer_layout.names}
    return run.server.model.weights


@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [
        ("fedmoswa", {"train": LORA}),
        ("fedsam", {"train": "head", "model": "resnet20(norm=batch)"}),
        ("fedavg", {"train": "layers(names=blocks.8)", "model": "resnet20(norm=batch)"}),
    ],
)
def test_lanes_agree_with_the_loop(algorithm: str, settings: dict[str, Any]) -> None:
    loop = weights_by(partial(LoopEngine, workers=1), algorithm, **settings)
    torch.testing.assert_close(
        weights_by(partial(LaneEngine, lanes=2), algorithm, **settings), loop, rtol=1e-4, atol=1e-6
    )


@pytest.mark.parametrize("arithmetic", [None, torch.bfloat16])
def test_the_step_compiles_whole_with_a_frozen_part(arithmetic: torch.dtype | None) -> None:
    traced = partial(LaneEngine, step=partial(compiled_step, backend="eager", strict=True))
    settings = {"model": VIT.replace("depth=2", "depth=1"), "train": LORA}
    loop = weights_by(partial(LoopEngine, workers=1), "fedmoswa", arithmetic, **settings)
    torch.testing.assert_close(weights_by(traced, "fedmoswa", arithmetic, **settings), loop, rtol=1e-4, atol=1e-6)
    full = weights_by(partial(LoopEngine, workers=1), "fedmoswa", **settings)
    assert torch.allclose(loop, full, atol=5e-3) and (arithmetic is None or not torch.equal(loop, full))


def effective_weights(problem: Problem, model: ModelState) -> dict[str, Tensor]:
    """The weights of a model without adapters that computes the same."""
    network = copy.deepcopy(problem.model)
    network.load_state_dict(problem.state_dict(*model))
    return dict(merge_adapters(network).state_dict())


@pytest.mark.parametrize(
    ("train", "engine", "is_exact"),
    [
        (LORA, LoopEngine, False),
        ("lora(rank=2,only_b=true)", LoopEngine, True),
        ("lora(rank=2,only_b=true)", LaneEngine, True),
        (EXACT, LoopEngine, True),
        (EXACT, LaneEngine, True),
    ],
)
def test_which_adapters_are_averaged_exactly(train: str, engine: type[LoopEngine | LaneEngine], is_exact: bool) -> None:
    """Effective weights W + R + s B A of the server after a round are the weighted mean of the clients' (or not)."""
    changes = {"engine__precision": "float64", "partition": "dirichlet(alpha=0.5)", "local_steps": 5, "lr": 0.5}
    run = run_of("fedavg", train=train, **changes | {"rounds": 2})
    replay = Replay(run.config, run.problem, run.partition, workers=1)
    replay.engine = engine(run.problem)
    replay.advance()
    before, clients = replay.moment.model, replay.clients()
    local = replay.local_models(clients, replay.train(clients))
    assert all(torch.allclose(model.buffers, before.buffers, atol=1e-12) for model in local)
    total = sum(len(client.indices) for client in clients)
    expected: dict[str, Any] = {}
    for client, model in zip(clients, local, strict=True):
        for name, tensor in effective_weights(run.problem, model).items():
            expected[name] = expected.get(name, 0) + len(client.indices) / total * tensor
    replay.advance()
    after = effective_weights(run.problem, replay.moment.model)
    error = max(float((after[name] - expected[name]).abs().max()) for name in after)
    assert error < 1e-12 if is_exact else error > 1e-4
    run.execute()
    assert torch.allclose(run.server.model.buffers, replay.moment.model.buffers, rtol=0, atol=1e-12)
    if train == EXACT:  # the residual is sent, too
        adapted = 2 * 36 * 12
        assert run.history[-1]["bytes_up"] == 2 * 3 * 8 * (ADAPTERS_AND_HEAD + adapted) == run.history[-1]["bytes_down"]


class Killed(Callback):
    """Interrupts a run."""

    def round_done(self, run: Run) -> None:
        if run.server.rounds == 2:
            raise KeyboardInterrupt


def start_of(folder: Path, seed: int = 5) -> Path:
    """Weights of a fresh transformer in a file."""
    torch.manual_seed(seed)
    save_file(dict(build(VIT, (1, 8, 8), 10).state_dict()), folder / "start.safetensors")
    return folder / "start.safetensors"


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    settings = SETTINGS | {"train": EXACT, "init": start_of(tmp_path), "engine__checkpoint_every": 1}
    fedflat.run("fedmoswa+wima", out=tmp_path / "whole", **settings)
    with pytest.raises(KeyboardInterrupt):
        fedflat.run("fedmoswa+wima", out=tmp_path / "cut", callbacks=[Killed()], **settings)
    fedflat.resume(tmp_path / "cut")
    for name in ("model.safetensors", "model.wima.safetensors", "metrics.jsonl", "state/clients/rows.bin"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
    whole = load_file(tmp_path / "whole" / "model.safetensors")
    start = load_file(tmp_path / "start.safetensors")
    assert changed(start, {name: whole[name] for name in start}) == {"head.weight", "head.bias"}
    with safe_open(tmp_path / "whole" / "model.safetensors", "pt") as file:
        header = file.metadata()["fedflat"]
    assert '"trained": ["blocks.0.attn.qkv.lora_a_weight"' in header


def test_resuming_with_another_frozen_part_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        settings = SETTINGS | {"train": "head", "init": start_of(tmp_path), "engine__checkpoint_every": 1}
        fedflat.run("fedavg", out=tmp_path / "run", callbacks=[Killed()], **settings)
    start_of(tmp_path, seed=6)
    with pytest.raises(fedflat.UserError, match=r"frozen part of the model differs"):
        fedflat.resume(tmp_path / "run")
    start_of(tmp_path)
    assert fedflat.resume(tmp_path / "run").status == "finished"


def test_a_saved_model_loads_from_its_folder_alone(tmp_path: Path) -> None:
    start = start_of(tmp_path)
    result = fedflat.run("fedavg", out=tmp_path / "run", train=LORA, init=start, **SETTINGS)
    in_memory = result.evaluate(on="test")["test"]
    start.unlink()
    loaded = fedflat.load(tmp_path / "run")
    assert loaded.evaluate(on="test")["test"] == in_memory
    assert in_memory["accuracy"] == pytest.approx(result.history[-1]["test"]["server"]["accuracy"])
    model, merged, x = loaded.model(), loaded.model(merge=True), torch.randn(3, 1, 8, 8)
    assert adapter_parameters(model) and not adapter_parameters(merged)
    torch.testing.assert_close(merged(x), model(x), rtol=1e-4, atol=1e-5)
    plain = build(VIT, (1, 8, 8), 10)
    plain.load_state_dict(merged.state_dict())
    assert torch.equal(plain.eval()(x), merged(x))


def test_adapters_of_another_run_are_loaded_or_refused(tmp_path: Path) -> None:
    first = fedflat.run("fedavg", out=tmp_path / "first", train=LORA, **SETTINGS)
    saved = tmp_path / "first" / "model.safetensors"
    second = run_of(train=LORA, init=saved, seed=3)
    assert torch.equal(second.server.model.weights, first.record.models["server"].weights)
    with pytest.raises(fedflat.UserError) as raised:
        run_of(init=saved)
    extra = "tensors blocks.0.attn.qkv.lora_a_weight, blocks.0.attn.qkv.lora_b_weight"
    assert extra in str(raised.value) and str(raised.value).count("lora") == 4
    with pytest.raises(fedflat.UserError, match=r"lora_a_weight .*4x12.*8x12"):
        run_of(train="lora(rank=4)", init=saved)


def test_frozen_weights_must_be_in_the_file(tmp_path: Path) -> None:
    tensors = load_file(start_of(tmp_path))
    save_file(
        {name: t for name, t in tensors.items() if not name.startswith("blocks.1.")}, tmp_path / "less.safetensors"
    )
    with pytest.raises(
        fedflat.UserError,
        match=r"lacks tensors blocks\.1\.norm1\.weight, .* and 8 more; .*vit-tiny",
    ):
        run_of(train="head", init=tmp_path / "less.safetensors")


def test_a_head_for_other_classes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    other = dict(build(VIT, (1, 16, 16), 7).state_dict())
    save_file(other, tmp_path / "seven.safetensors")
    with pytest.raises(fedflat.UserError, match=r"head\.weight .*7x12.*10x12.*init_head=fresh"):
        run_of(init=tmp_path / "seven.safetensors")
    run = run_of(init=tmp_path / "seven.safetensors", init_head="fresh", train="head")
    found, fresh = state(run), state(run_of())
    assert torch.equal(found["head.weight"], fresh["head.weight"]) and torch.equal(
        found["blocks.1.mlp.fc1.weight"], other["blocks.1.mlp.fc1.weight"]
    )
    assert found["pos_embed"].shape == (1, 5, 12) and other["pos_embed"].shape == (1, 17, 12)
    headless = {name: tensor for name, tensor in other.items() if not name.startswith("head")} | {
        "pre_logits.fc.bias": torch.zeros(1)
    }
    save_file(headless, tmp_path / "headless.safetensors")
    again = run_of(init=tmp_path / "headless.safetensors", init_head="fresh", train="head")
    assert torch.equal(again.server.model.weights, run.server.model.weights)
    with pytest.raises(
        fedflat.UserError,
        match=r"lacks tensors head\.weight and head\.bias and has an unexpected tensor pre_logits\.fc\.bias",
    ):
        run_of(init=tmp_path / "headless.safetensors")


def test_contradictory_settings_are_refused() -> None:
    with pytest.raises(fedflat.UserError, match="init_head=fresh needs initial weights"):
        make_config(None, {"init_head": "fresh"})
    with pytest.raises(fedflat.UserError, match="'tail'"):
        make_config(None, {"train": "tail"})
    with pytest.raises(fedflat.UserError, match="averages with only_b are exact; use either"):
        run_of(train="lora(only_b=true,exact=true)")
    with pytest.raises(fedflat.UserError, match=r"lora\(exact=true\) does not work with federation.policy=fedbuff"):
        run_of(train=EXACT, policy="fedbuff")


def test_the_study_script_measures_a_round(tmp_path: Path) -> None:
    """studies/vit_round.py at small scale: only the trained part is sent and stored, and the rest does not change."""
    spec = importlib.util.spec_from_file_location("vit_round", Path(__file__).parents[2] / "studies" / "vit_round.py")
    assert spec is not None and spec.loader is not None
    study = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(study)
    small = f"--model {VIT} --size 8 --classes 10 --clients 2 --batch-size 2 --local-steps 1 --algorithms fedmoswa"
    whole, adapters, head = study.main([str(tmp_path), *small.split()])
    assert adapters["trained"] == 2 * (2 * 8 * 12 + 2 * 12 * 8) + 13 * 10 and head["trained"] == 13 * 10
    for outcome in (whole, adapters, head):
        assert outcome["bytes_up_per_client"] == outcome["bytes_down_per_client"] == 2 * 4 * outcome["trained"]
        assert (
            outcome["bytes_kept_per_client"] == 4 * outcome["trained"]
            and outcome["frozen_part_is_the_same"]
            and outcome["status"] == "finished"
        )
    assert len((tmp_path / "vit_round.md").read_text().splitlines()) == 2 + 3
