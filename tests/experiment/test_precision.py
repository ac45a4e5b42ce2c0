"""``engine.precision=auto``: what it chooses, where it is recorded, and what a device without TF32 or bf16 says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from fedflat.bench.request import Request
from fedflat.bench.setting import BenchmarkSetting, RandomImages
from fedflat.cli.shared.screen import print_precision
from fedflat.data.batches import Batch
from fedflat.deploy.site.site import Site
from fedflat.errors import UserError
from fedflat.experiment.analysis.reopen import on_device
from fedflat.experiment.campaign.compare import existing_run
from fedflat.experiment.config import Config, parse_config
from fedflat.experiment.run import Run
from fedflat.experiment.setup.engine import check_precision
from fedflat.experiment.setup.problem import build_problem, decide_precision, load_data
from fedflat.flatness.precision import has_bf16
from fedflat.papers.library import papers
from fedflat.testing import check_model


def with_precision(precision: str, **engine: object) -> Config:
    return parse_config(
        {
            "model": "mlp(hidden=4)",
            "data": {"clients": 4, "partition": "iid"},
            "federation": {"clients_per_round": 2},
            "training": {"rounds": 1, "local_steps": 1},
            "engine": {"precision": precision, "workers": 1, **engine},
        }
    )


def put_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    """Let torch report a GPU of this compute capability."""
    for name, answer in {"is_available": True, "get_device_capability": capability, "get_device_name": "V100"}.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: capability >= (8, 0))


@pytest.mark.parametrize(
    ("capability", "engine", "expected"),
    [
        ((8, 0), {}, "tf32"),
        ((9, 0), {"device": "cuda", "name": "loop"}, "tf32"),
        ((7, 5), {}, "float32"),
        ((9, 0), {"device": "cpu"}, "float32"),
        (None, {}, "float32"),
    ],
)
def test_the_choice_depends_on_device_and_capability(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] | None, engine: dict[str, str], expected: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    if capability:
        put_gpu(monkeypatch, capability)
    assert parse_config({}).engine.precision == "auto"
    assert decide_precision(with_precision("auto", **engine)).engine.precision == expected
    for requested in ("float32", "bf16", "float64"):
        assert decide_precision(with_precision(requested, **engine)).engine.precision == requested
    for recorded in ("float32", "tf32"):
        kept = decide_precision(with_precision("auto", **engine), with_precision(recorded))
        assert kept.engine.precision == recorded
    assert decide_precision(with_precision("auto", **engine), with_precision("bf16")).engine.precision == expected


def test_gpus_of_another_vendor_have_no_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    put_gpu(monkeypatch, (9, 4))
    monkeypatch.setattr(torch.version, "hip", "6.2")
    assert decide_precision(with_precision("auto")).engine.precision == "float32"


@pytest.mark.parametrize(
    ("gpus", "device", "expected"), [(2, "auto", "tf32"), (2, "cpu", "float32"), (0, "auto", "float32")]
)
def test_a_ray_cluster_uses_tf32_on_its_gpus(
    monkeypatch: pytest.MonkeyPatch, gpus: int, device: str, expected: str
) -> None:
    ray = SimpleNamespace(cluster_resources=lambda: {"CPU": 4, "GPU": gpus})
    monkeypatch.setattr("fedflat.engines.ray.cluster.connect", lambda address, workers: ray)
    assert decide_precision(with_precision("auto", name="ray", device=device)).engine.precision == expected


def test_a_run_records_the_choice_and_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    auto, folder = with_precision("auto", device="cpu"), tmp_path / "run"
    Run(auto, folder).execute()
    assert "precision: float32" in (folder / "config.yaml").read_text()
    assert existing_run(auto, folder) is not None
    with pytest.raises(UserError, match=r"engine\.precision=float32 instead of bf16"):
        existing_run(with_precision("bf16", device="cpu"), folder)
    (folder / "config.yaml").write_text((folder / "config.yaml").read_text().replace("float32", "tf32"))
    with pytest.warns(UserWarning, match="tf32 has no effect on this CPU"):
        assert Run(auto, folder, resume=True).config.engine.precision == "tf32", "kept on another device"


def test_the_choice_is_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    put_gpu(monkeypatch, (8, 0))
    print_precision(with_precision("auto"), silent=False)
    assert capsys.readouterr().err == "precision: tf32 (engine.precision=auto; use float32 for full precision)\n"
    print_precision(with_precision("auto"), silent=True)
    for precision, device in (("tf32", "auto"), ("auto", "cpu")):
        print_precision(with_precision(precision, device=device), silent=False)
    assert capsys.readouterr().err == "", "neither a requested precision nor float32"


def test_devices_without_tf32_or_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    put_gpu(monkeypatch, (7, 0))
    with pytest.raises(UserError, match=r"V100 does not compute in bf16, .*; use engine\.precision=float32"):
        check_precision("bf16", on_gpu=True)
    with pytest.warns(UserWarning, match="tf32 has no effect on V100; this run uses float32"):
        check_precision("tf32", on_gpu=True)
    put_gpu(monkeypatch, (8, 0))
    for precision in ("tf32", "bf16", "float32"):
        check_precision(precision, on_gpu=True)


@pytest.mark.parametrize("has_amx", [True, False])
def test_a_cpu_uses_bf16_if_it_has_instructions_for_it(
    has_amx: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has_amx, raising=False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False, raising=False)
    for recorded, available in (("bf16", "bf16" if has_amx else "float32"), ("tf32", "float32")):
        assert on_device(with_precision(recorded), "cpu").engine.precision == available
    if has_amx:
        check_precision("bf16", on_gpu=False)
    else:
        with pytest.raises(UserError, match="this CPU does not compute in bf16"):
            check_precision("bf16", on_gpu=False)
        with pytest.raises(UserError, match="this CPU does not compute in bf16"):
            Site(with_precision("bf16", device="cpu"), 0, tmp_path)
        with pytest.raises(UserError, match="use --precision float32"):
            Request(BenchmarkSetting(device="cpu"), precisions=("bf16",)).check()


@pytest.mark.skipif(not has_bf16("cpu"), reason="needs a CPU that computes in bf16")
@pytest.mark.parametrize("text", ["fedsam", "scaffold"])
def test_bf16_on_a_cpu_differs_from_float32_by_rounding_for_any_number_of_workers(text: str) -> None:
    def moved(precision: str, workers: int = 1) -> Tensor:
        config = with_precision(precision, device="cpu", workers=workers)
        config = config.changed(algorithm=text, model="lenet5", training={"rounds": 2, "local_steps": 4})
        run = Run(config, data=RandomImages(size=200).dataset())
        start = run.server.model.weights.clone()
        weights: Tensor = run.execute().models["server"].weights
        assert weights.dtype == torch.float32
        return weights - start

    full, one, two = moved("float32"), moved("bf16"), moved("bf16", workers=2)
    assert torch.equal(one, two) and not torch.equal(one, full)
    assert (one - full).norm() < 0.3 * full.norm(), "0.14 for FedSAM"


@pytest.mark.parametrize("frozen", ["nothing", "norm"])
def test_a_networks_own_batch_norm_trains_in_bf16(frozen: str) -> None:
    """torch requires BatchNorm's parameters in the type of its statistics, which stay in float32."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 900, 10))
    network[1].weight.requires_grad_(frozen == "nothing")
    network[1].bias.requires_grad_(frozen == "nothing")
    problem, _ = build_problem(with_precision("float32", device="cpu"), RandomImages(size=20).dataset(), network)
    weights, statistics, integer_buffers = problem.initial_state()
    examples, results = problem.data.train.take(torch.arange(20)), {}
    for arithmetic in (None, torch.bfloat16):
        chosen = replace(problem, arithmetic=arithmetic)
        chosen.set_training_mode()
        batch = Batch(chosen.normalised(examples.inputs), examples.targets)
        buffers = {**chosen.buffer_layout.views(statistics.clone()), **integer_buffers}
        gradient = chosen.loss_and_gradient(weights, buffers, batch)[1]
        whole = chosen.functional_pass(weights, statistics, integer_buffers, batch)
        assert gradient.dtype == whole.gradient.dtype == torch.float32
        assert torch.allclose(gradient, whole.gradient, rtol=1e-2, atol=1e-3)
        assert frozen == "norm" or torch.allclose(chosen.buffer_layout.flatten(buffers), whole.statistics)
        output = chosen.predict(weights, buffers, examples.inputs)
        results[arithmetic] = gradient, output
    for full, rough in zip(*results.values(), strict=True):
        assert 0 < (full - rough).norm() < 0.05 * full.norm()


def test_a_network_that_lacks_bf16_is_named() -> None:
    class Shifted(nn.Module):
        """Its constant is in float32."""

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("shift", torch.ones(64))
            self.linear = nn.Linear(64, 10)

        def forward(self, inputs: Tensor) -> Tensor:
            """Logits."""
            return self.linear(inputs.flatten(1) + self.shift)

    config = with_precision("bf16", device="cpu").changed(model="custom")
    with pytest.raises(UserError, match=r"custom cannot be used in bf16: .* dtype.*; use engine\.precision=float32"):
        build_problem(config, model=Shifted())
    with pytest.raises(UserError, match=r"custom cannot be used on digits, which has uint8 inputs of shape"):
        build_problem(config, model=nn.Linear(3, 10))


def test_torchs_default_dtype_does_not_matter() -> None:
    config = with_precision("float32")
    expected = Run(config).server.model.weights
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(Run(config).server.model.weights, expected)
        assert load_data(config.changed(data={"dataset": "digit_masks"})).train.inputs.dtype == torch.uint8
        assert check_model(nn.Linear(6, 3, dtype=torch.float32), (6,), 3)
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_experiments_of_papers_use_float32_everywhere() -> None:
    table = papers()["fedswa"].tables["table2"]
    assert {made.engine.precision for cell in table.cells.values() for made in cell.configs} == {"float32"}
