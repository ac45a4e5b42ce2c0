"""Segmentation runs: engines agree, networks learn, and BatchNorm statistics follow the clients."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedflat
from fedflat.data import IGNORED, Dataset, Examples, from_arrays
from fedflat.engines.cpu.engine import LoopEngine
from fedflat.engines.gpu.engine import LaneEngine
from fedflat.engines.gpu.step import compiled_step
from fedflat.engines.problem.segmentation import Segmentation
from fedflat.engines.problem.task import Totals
from fedflat.engines.round.contract import ModelState
from fedflat.experiment.analysis.scoring import Scorer
from fedflat.experiment.config import parse_config
from fedflat.experiment.run import Run
from fedflat.experiment.setup import problem as federating
from fedflat.experiment.store.run_folder import client_statistics
from fedflat.models.layout import Layout
from fedflat.models.norms import BatchNorm

SIDE, NAMES = 32, ("dark", "middle", "bright")


def scenes(count: int, seed: int, groups: list[int], shift: int = 0) -> Examples:
    """Blocks whose brightness is their class, with 20 ignored pixels; each group is brighter than the previous one."""
    rng = np.random.default_rng(seed)
    masks = np.kron(rng.integers(0, 3, (count, 4, 4)), np.ones((8, 8), np.int64))
    of = np.resize(groups, count)
    pixels = np.clip(40 + 70 * masks + 25 * of[:, None, None] + rng.integers(-15, 15, masks.shape), 0, 255)
    masks[:, 0, :20] = IGNORED
    images = np.repeat(pixels[:, None], 3, 1)
    return Examples(
        torch.from_numpy(images.astype(np.uint8)), torch.from_numpy(masks.astype(np.uint8)), torch.from_numpy(of)
    )


def made(train: int = 16) -> Dataset:
    """Two domains to train on; a third one is only in the test set."""
    return Dataset(
        "scenes",
        scenes(train, 0, [0, 1]),
        scenes(9, 1, [0, 1, 2]),
        NAMES,
        (0.5,) * 3,
        (0.3,) * 3,
        "segmentation",
        ("day", "dusk", "fog"),
    )


class Dense(nn.Module):
    """A small convolutional network for each pixel; in training it has an auxiliary head before its normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.auxiliary = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 3, 1)
        self.norm = BatchNorm(6)
        self.head = nn.Conv2d(6, 3, 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        features = self.first(images)
        logits: torch.Tensor = self.head(torch.relu(self.norm(features)))
        return (logits, self.auxiliary(features)) if self.training else logits


def settings(**more: Any) -> dict[str, Any]:
    quick = {
        "clients_per_round": 2,
        "partition": "natural",
        "batch_size": 4,
        "workers": 1,
        "device": "cpu",
        "lr": 0.1,
        "augmentation": "scale-crop+flip",
    }
    return quick | more


def run_of(algorithm: str, engine: Any, model: str | nn.Module = "bisenetv2(width=0.1)", **training: Any) -> Run:
    values = {
        "algorithm": algorithm,
        "model": model if isinstance(model, str) else "custom:Dense",
        "data": {"dataset": "custom:scenes", "partition": "natural", "augmentation": "scale-crop+flip"},
        "federation": {"clients_per_round": 2},
        "training": {"rounds": 2, "local_steps": 2, "batch_size": 3, "lr": 0.05, "momentum": 0.9} | training,
        "evaluation": {"batch_size": 4},
        "engine": {"precision": "float64", "device": "cpu", "workers": 1},
    }
    run = Run(
        parse_config(values),
        data=made(8 if training.get("batch_size") == 4 else 7),
        model=None if isinstance(model, str) else model,
    )
    run.engine = engine(run.problem)
    run.execute()
    return run


LOOP = partial(LoopEngine, workers=1)
OTHERS = {
    "lanes": partial(LaneEngine, lanes=2),
    "compiled": partial(LaneEngine, step=partial(compiled_step, backend="eager", strict=True)),
}


@pytest.mark.parametrize("other", OTHERS)
def test_engines_agree(other: str) -> None:
    """With auxiliary heads, mining, augmented masks, short batches, BatchNorm statistics and the metric."""
    torch.manual_seed(0)
    model = "bisenetv2(width=0.1)" if other == "lanes" else Dense()  # tracing a deep network takes a minute
    full = {"batch_size": 4} if other == "compiled" else {}  # every batch size is traced again
    loop, lanes = (run_of("fedasam+poly", engine, model, **full) for engine in (LOOP, OTHERS[other]))
    assert (loop.server.model.weights - lanes.server.model.weights).abs().max() < 1e-10
    assert (loop.server.model.buffers - lanes.server.model.buffers).abs().max() < 1e-10
    for one, two in zip(loop.history, lanes.history, strict=True):
        assert one["test"]["server"] == pytest.approx(two["test"]["server"], abs=1e-9) and set(
            one["test"]["server"]
        ) > {"loss", "miou"}


def test_sam_updates_statistics_once_per_step() -> None:
    """With frozen weights, FedAvg and SAM give equal statistics: the perturbed pass must not change them."""
    torch.manual_seed(0)
    model = Dense()
    frozen = {"lr": 1e-12, "rounds": 1, "batch_size": 4}
    plain, sam = (
        run_of(text, LOOP, model, **frozen, local_steps=3).server.model for text in ("fedavg", "fedsam(rho=5.0)")
    )
    fresh = run_of("fedavg", LOOP, model, **frozen, local_steps=1).server.model
    assert torch.allclose(plain.buffers, sam.buffers, atol=1e-7)
    assert not torch.allclose(plain.buffers, fresh.buffers, atol=1e-3), "three steps are not one"
    assert all(torch.equal(plain.integer_buffers[name], sam.integer_buffers[name]) for name in plain.integer_buffers)


def test_batch_norm_statistics_stay_in_float32_with_bfloat16_passes() -> None:
    """As on a GPU: weights, passes and outputs of several heads are rounded; statistics, losses and updates are not."""
    torch.manual_seed(0)
    model = Dense()
    full, rough = (Run(parse_config(rough_settings()), data=made(7), model=model) for _ in range(2))
    rough.problem.arithmetic = torch.bfloat16
    rough.problem.__post_init__()
    for run in (full, rough):
        run.engine = LaneEngine(run.problem, lanes=2)
        run.execute()
    one, other = full.server.model, rough.server.model
    assert other.weights.dtype == other.buffers.dtype == torch.float32
    assert 0 < (one.weights - other.weights).abs().mean() < 0.005
    assert full.history[-1]["test"]["server"]["loss"] == pytest.approx(
        rough.history[-1]["test"]["server"]["loss"], abs=0.05
    )


def rough_settings() -> dict[str, Any]:
    return {
        "algorithm": "fedavg",
        "model": "custom:Dense",
        "data": {"dataset": "custom:scenes", "partition": "natural", "augmentation": "scale-crop+flip"},
        "federation": {"clients_per_round": 2},
        "training": {"rounds": 2, "local_steps": 2, "batch_size": 3, "lr": 0.01},
        "engine": {"device": "cpu", "workers": 1},
    }


def test_a_network_learns_to_segment() -> None:
    torch.manual_seed(0)
    result = fedflat.run(
        "fedavg", dataset=made(24), model=Dense(), rounds=6, local_epochs=3, evaluation__every=6, **settings()
    )
    first, last = (record["test"]["server"] for record in (result.history[0], result.history[-1]))
    assert first["miou"] < 0.5 < 0.7 < last["miou"] <= 1 and last["loss"] < first["loss"]
    assert result.metric == "miou"


def test_models_for_other_tasks_are_rejected() -> None:
    with pytest.raises(
        fedflat.UserError,
        match=r"lenet5 .* \(3,\) .* 32x32 pixels.*bisenetv2",
    ):
        fedflat.run("fedavg", dataset=made(), model="lenet5", rounds=1, **settings())
    pixels = np.zeros((12, 3, SIDE, SIDE), np.uint8)
    images = from_arrays(pixels, [0, 1, 2] * 4, pixels, [0, 1, 2] * 4)
    with pytest.raises(fedflat.UserError, match=r"custom:Dense .*\(3, 32, 32\)"):
        fedflat.run(
            "fedavg",
            dataset=images,
            model=Dense(),
            rounds=1,
            **settings(partition="iid", clients=3, augmentation="none"),
        )


def by_hand(model: nn.Module, examples: Examples, rows: torch.Tensor, statistics: torch.Tensor | None) -> float:
    """mIoU on some examples, normalised by the given statistics, or by those of the batch if they are None."""
    if statistics is not None:
        model.norm.running_mean, model.norm.running_var = statistics[:6].clone(), statistics[6:].clone()
    model.train(statistics is None)
    with torch.no_grad():
        images = (examples.inputs[rows].float() / 255 - 0.5) / 0.3
        totals = Totals(Segmentation())
        totals.add(Segmentation().sums(model(images), examples.targets[rows]), len(rows))
    return totals.metrics()["miou"]


@pytest.mark.parametrize("from_disk", [False, True])
def test_silobn_uses_client_statistics_for_seen_domains_and_batch_statistics_otherwise(
    tmp_path: Path, from_disk: bool
) -> None:
    torch.manual_seed(0)
    network, data = Dense(), made()
    result = fedflat.run(
        "fedavg",
        dataset=data,
        model=network,
        rounds=3,
        local_epochs=1,
        training__statistics="own",
        out=tmp_path / "run",
        **settings(evaluation__batch_size=50),
    )
    kept = result.record.statistics
    assert set(kept) == {0, 1} and not torch.allclose(kept[0], kept[1], atol=1e-2), "each client has its own"
    server = result.record.models["server"]
    assert torch.equal(server.buffers, torch.cat([torch.zeros(6), torch.ones(6)])), (
        "and none of them reaches the server"
    )
    if from_disk:
        result = fedflat.load(tmp_path / "run")
        assert all(torch.equal(kept[number], value) for number, value in client_statistics(result.record).items())
    found = result.evaluate(on=("test", "domains", "clients"), dataset=data, network=network)
    fresh = Dense()
    fresh.load_state_dict(dict(Layout.of_parameters(network).views(server.weights)), strict=False)
    groups = data.test.groups
    assert groups is not None and data.train.groups is not None
    for number, domain in enumerate(("day", "dusk")):
        rows = torch.nonzero(groups == number)[:, 0]
        assert found["domains"]["each"][domain]["miou"] == pytest.approx(
            by_hand(fresh, data.test, rows, kept[number]), abs=2e-3
        )
        own = torch.nonzero(data.train.groups == number)[:, 0]
        assert found["clients"]["each"][domain]["miou"] == pytest.approx(
            by_hand(fresh, data.train, own, kept[number]), abs=2e-3
        )
    unseen = torch.nonzero(groups == 2)[:, 0]
    assert found["domains"]["each"]["fog"]["miou"] == pytest.approx(by_hand(fresh, data.test, unseen, None), abs=2e-3)
    assert found["test"]["miou"] == pytest.approx(by_hand(fresh, data.test, torch.arange(9), None), abs=2e-3)
    assert (
        found["domains"]["seen"]["examples"] == 6
        and found["domains"]["unseen"]["miou"] == found["domains"]["each"]["fog"]["miou"]
    )


def test_silobn_trains_the_weights_of_fedavg() -> None:
    """In training, BatchNorm uses only its batch; statistics matter only in evaluation."""
    torch.manual_seed(0)
    model = Dense()
    plain, silo = (
        fedflat.run(
            "fedasam", dataset=made(), model=model, rounds=2, local_epochs=1, training__statistics=kept, **settings()
        )
        for kept in ("averaged", "own")
    )
    assert torch.equal(plain.record.models["server"].weights, silo.record.models["server"].weights)
    assert plain.history[-1]["test"] != silo.history[-1]["test"]


def test_large_masks_are_evaluated_in_small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(federating, "MAX_PIXELS", 3 * SIDE**2 + 1)
    run = Run(parse_config(rough_settings()), data=made(7), model=Dense())
    assert run.problem.evaluation_batch == 3


def test_batches_with_batch_statistics_are_spread_over_the_set() -> None:
    problem = Run(parse_config(rough_settings()), data=made(7), model=Dense()).problem
    problem = replace(problem, evaluation_batch=4)
    assert [part.tolist() for part in problem.evaluation_batches(9)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8]]
    spread = [part.tolist() for part in replace(problem, batch_statistics=True).evaluation_batches(9)]
    assert spread == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]
    assert [part.tolist() for part in problem.evaluation_batches(9, batch_statistics=True)] == spread
    weights, buffers, integer_buffers = problem.initial_state()
    test = problem.data.test
    for own in (True, False):
        scorer = Scorer(problem, ModelState(weights, buffers, integer_buffers), batch_statistics=own)
        expected = [test.inputs[part] for part in problem.evaluation_batches(len(test), batch_statistics=own)]
        found = [batch.inputs for batch, _ in scorer._outputs(test)]
        assert len(expected) > 1 and all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_evaluation_by_class_and_domain() -> None:
    torch.manual_seed(0)
    result = fedflat.run("fedavg", dataset=made(), model=Dense(), rounds=2, local_epochs=1, **settings())
    found = result.evaluate(on=("test", "classes", "domains", "clients"))
    assert set(found["classes"]["each"]) == set(NAMES)
    assert found["classes"]["mean"] == pytest.approx(found["test"]["miou"]) and math.isfinite(found["classes"]["loss"])
    assert {name: one["examples"] for name, one in found["domains"]["each"].items()} == {"day": 3, "dusk": 3, "fog": 3}
    assert found["domains"]["seen"]["domains"] == 2 and found["domains"]["unseen"]["examples"] == 3
    frame = found.to_pandas()
    assert len(frame[(frame.on == "classes") & (frame.figure == "miou") & (frame.name != "")]) == 3


def test_flatness_does_not_depend_on_the_batch_size() -> None:
    """Images with ignored pixels have less weight in the mean over batches."""
    data = made(8)
    data.train.targets[::2, 1:] = IGNORED
    result = fedflat.run("fedavg", dataset=data, model=Dense(), rounds=1, local_epochs=1, **settings())
    model = result.flatness(precision="float64")
    whole, parts = model.objective(batch_size=8), model.objective(batch_size=1)
    assert float(whole.loss()) == pytest.approx(float(parts.loss()), rel=1e-12)
    vector = torch.randn(whole.size, dtype=torch.float64)
    torch.testing.assert_close(whole.hessian_product(None, vector), parts.hessian_product(None, vector))
