"""Landscapes of models of runs: metrics equal the run's, client models those of the round; shapes and data must fit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedflat
from fedflat.data import from_arrays
from fedflat.errors import UserError
from fedflat.experiment.analysis.landscapes import landscapes, load_landscapes, path, plane, save_landscapes
from fedflat.experiment.analysis.loss_and_error import LossAndError
from fedflat.experiment.analysis.run_model import RunModel, local_models, open_model, open_model_or_client, replay_after
from fedflat.experiment.config import parse_config
from fedflat.experiment.setup.problem import build_problem
from fedflat.flatness.landscapes.grid import Model

SMALL = {"rounds": 3, "local_steps": 3, "workers": 1, "device": "cpu", "clients_per_round": 4}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    texts = {"fedavg": "fedavg", "fedsam": "fedsam", "scaffold": "scaffold"}
    for name, text in texts.items():
        fedflat.run(text, out=folder / name, save_every=1, **SMALL)
    fedflat.run("fedavg", out=folder / "wide", model="mlp(hidden=16)", **SMALL)
    return {path.name: path for path in folder.iterdir()}


@pytest.fixture(scope="module")
def two(runs: dict[str, Path]) -> list[RunModel]:
    return [open_model(runs[name], device="cpu") for name in ("fedavg", "fedsam")]


def test_the_models_metrics_are_those_of_its_run(two: list[RunModel]) -> None:
    found = landscapes(two, points=3, radius=0.5, names=["a", "b"])
    for model, landscape in zip(two, found.values(), strict=True):
        last = model.record.history[-1]["test"]["server"]
        at_model = landscape.marks[0].values
        assert at_model["test_loss"] == pytest.approx(last["loss"], rel=1e-5)
        assert at_model["test_error"] == pytest.approx(1 - last["accuracy"])
        assert landscape.at("test_loss", 0, 0) == pytest.approx(at_model["test_loss"])


def test_training_metrics_cover_the_clients_data(two: list[RunModel]) -> None:
    model = two[0]
    measure = LossAndError(model.problem, model.partition, model.state.integer_buffers)
    held = model.on_examples(model.problem.data.train, np.unique(model.training_positions))
    figures = measure(Model(model.state.weights, model.state.buffers))
    assert measure.counts["train"] == held.examples
    assert float(figures["train_loss"]) == pytest.approx(float(held.loss()), rel=1e-5)


def test_a_sample_is_the_same_for_every_model_and_every_call(two: list[RunModel]) -> None:
    one, other = (LossAndError(m.problem, m.partition, m.state.integer_buffers, examples=50, seed=3) for m in two)
    assert one.counts == {"train": 50, "test": 50}
    assert torch.equal(one.sets["train"].inputs, other.sets["train"].inputs)
    another = LossAndError(two[0].problem, two[0].partition, {}, examples=50, seed=4)
    assert not torch.equal(one.sets["train"].inputs, another.sets["train"].inputs)


def test_progress_covers_all_models(two: list[RunModel]) -> None:
    told: list[tuple[int, int]] = []
    landscapes(two, points=4, examples=20, names=["a", "b"], progress=lambda *where: told.append(where))
    assert told == [(16, 32), (32, 32)]


def test_planes_and_paths_pass_through_their_models(runs: dict[str, Path]) -> None:
    three = [open_model_or_client(f"{runs['fedavg']}:server@{rounds}", device="cpu") for rounds in (1, 2, 3)]
    found = plane(three, points=3, examples=50)
    assert found.marks[0].position == (0.0, 0.0)
    way = path(three[:2], points=3, examples=50)
    for mark, on_the_way in zip(found.marks, way.marks, strict=False):
        assert mark.values == pytest.approx(on_the_way.values)
    assert way.values["train_loss"][0] == pytest.approx(way.marks[0].values["train_loss"])
    assert found.metadata["distances"][f"{three[0].label} to {three[1].label}"] == pytest.approx(
        way.metadata["distance"]
    )
    assert found.metadata["examples"] == {"train": 50, "test": 50}


def test_files_are_read_back_unchanged(two: list[RunModel], tmp_path: Path) -> None:
    found = landscapes(two[:1], dimensions=1, points=3, examples=20)
    save_landscapes(tmp_path / "new" / "landscape.json", found)
    again = load_landscapes(tmp_path / "new" / "landscape.json")
    assert list(again) == list(found)
    assert next(iter(again.values())).document() == next(iter(found.values())).document()
    assert [entry.name for entry in (tmp_path / "new").iterdir()] == ["landscape.json"]
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(UserError, match="landscape file"):
        load_landscapes(tmp_path / "broken.json")
    with pytest.raises(UserError, match="does not exist"):
        load_landscapes(tmp_path / "none.json")


def test_models_of_different_shapes_are_refused(runs: dict[str, Path], two: list[RunModel]) -> None:
    with pytest.raises(
        UserError, match=r"have different shapes and cannot lie on one path: .* is .* in the first and .* in the second"
    ):
        path([two[0], open_model(runs["wide"], device="cpu")], names=["a", "wide"])


def test_repeated_models_and_zero_examples_are_refused(two: list[RunModel]) -> None:
    with pytest.raises(UserError, match="listed twice"):
        landscapes([two[0], two[0]], points=3)
    with pytest.raises(UserError, match="examples=0"):
        landscapes(two[:1], points=3, examples=0)


def test_clients_models_average_to_the_next_model(runs: dict[str, Path]) -> None:
    """FedAvg's next model is the mean of the cohort's models, weighted by samples."""
    server = open_model(f"{runs['fedavg']}:server@1", device="cpu")
    replay = replay_after(server, 1)
    members = replay.clients()
    found = local_models(server, 1)
    samples = torch.tensor([float(len(member.indices)) for member in members])
    mean = (samples / samples.sum()) @ torch.stack([model.weights for model in found])
    torch.testing.assert_close(
        mean, open_model(f"{runs['fedavg']}:server@2", device="cpu").state.weights, rtol=0, atol=1e-6
    )


def test_a_client_is_named_by_its_number_and_the_round(runs: dict[str, Path]) -> None:
    client = open_model_or_client(f"{runs['fedavg']}:client7@1", device="cpu")
    (alone,) = local_models(open_model(runs["fedavg"], device="cpu"), 1, [7])
    assert torch.equal(client.state.weights, alone.weights)
    assert client.label.endswith(":client7@1")
    assert not torch.equal(
        client.state.weights, open_model_or_client(f"{runs['fedavg']}:client7@2", device="cpu").state.weights
    )


def test_an_unknown_client_is_reported_before_missing_state(runs: dict[str, Path]) -> None:
    with pytest.raises(UserError, match="unknown client 99"):
        open_model_or_client(f"{runs['scaffold']}:client99@1", device="cpu")


def test_clients_with_state_are_replayed_only_from_the_checkpoint(runs: dict[str, Path]) -> None:
    last = open_model_or_client(f"{runs['scaffold']}:client0", device="cpu")
    assert torch.equal(
        last.state.weights, open_model_or_client(f"{runs['scaffold']}:client0@3", device="cpu").state.weights
    )
    with pytest.raises(UserError, match="scaffold needs its client state"):
        open_model_or_client(f"{runs['scaffold']}:client0@1", device="cpu")
    with pytest.raises(UserError, match="client 99"):
        open_model_or_client(f"{runs['fedavg']}:client99", device="cpu")


class Normalised(nn.Module):
    """A linear model after BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.flatten, self.norm, self.linear = nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.linear(self.norm(self.flatten(inputs)))
        return out


def test_statistics_are_the_models_or_estimated() -> None:
    problem, partition = build_problem(
        parse_config({"model": "custom:Normalised", "engine": {"device": "cpu"}}), model=Normalised()
    )
    weights, buffers, integer_buffers = problem.initial_state()
    own, estimated = (
        LossAndError(problem, partition, integer_buffers, statistics=how) for how in ("interpolated", "estimated")
    )
    fresh = problem.estimate_buffers(weights, integer_buffers)
    inputs = problem.normalised(problem.data.train.inputs).flatten(1)
    torch.testing.assert_close(
        problem.buffer_layout.views(fresh)["norm.running_mean"], inputs.mean(0), rtol=0, atol=0.02
    )
    expected = float(own(Model(weights, fresh))["train_loss"])
    assert float(own(Model(weights, buffers))["train_loss"]) != pytest.approx(expected, rel=1e-3)
    assert float(estimated(Model(weights, buffers))["train_loss"]) == pytest.approx(expected, rel=1e-3)
    assert torch.equal(buffers, problem.initial_state()[1])


def test_every_example_counts_equally_in_estimated_statistics() -> None:
    """The last example, in a batch of its own, would count as much as the first 500, and BatchNorm rejects it."""
    inputs = torch.cat([torch.randn(500, 64, generator=torch.Generator().manual_seed(0)), torch.full((1, 64), 250.0)])
    data = from_arrays(inputs, torch.arange(501) % 10, inputs[:10], torch.arange(10), name="outlier")
    config = parse_config({"model": "custom:Normalised", "engine": {"device": "cpu"}})
    problem, partition = build_problem(config, data=data, model=Normalised())
    weights, buffers, integer_buffers = problem.initial_state()
    estimated = LossAndError(problem, partition, integer_buffers, statistics="estimated")._buffers(
        Model(weights, buffers)
    )
    mean = problem.normalised(inputs).mean(0)
    torch.testing.assert_close(
        problem.buffer_layout.views(estimated)["norm.running_mean"], mean, rtol=0.01, atol=0.001 * float(mean.max())
    )


def test_statistics_of_the_librarys_own_normalisation_are_estimated_too() -> None:
    """This layer does not count batches, so that its estimated statistics once stayed at zero."""
    small = {"model": "resnet20(norm=batch)", "data": {"dataset": "digits"}, "engine": {"device": "cpu"}}
    problem, _ = build_problem(parse_config(small))
    weights, _, integer_buffers = problem.initial_state()
    inputs = problem.normalised(problem.data.train.inputs[:40])
    found = problem.buffer_layout.views(problem.estimate_buffers(weights, integer_buffers, [inputs[:20], inputs[20:]]))
    stem = torch.nn.functional.conv2d(inputs, problem.layout.views(weights)["stem.0.weight"], padding=1)
    torch.testing.assert_close(found["stem.1.running_mean"], stem.mean((0, 2, 3)), rtol=1e-4, atol=1e-5)
    halves = torch.stack([part.var((0, 2, 3), correction=1) for part in (stem[:20], stem[20:])]).mean(0)
    torch.testing.assert_close(found["stem.1.running_var"], halves, rtol=1e-4, atol=1e-5)


def test_negative_extrapolated_variances_are_set_to_zero() -> None:
    problem, partition = build_problem(
        parse_config({"model": "custom:Normalised", "engine": {"device": "cpu"}}), model=Normalised()
    )
    weights, buffers, integer_buffers = problem.initial_state()
    measure = LossAndError(problem, partition, integer_buffers, examples=20)
    figures = measure(Model(weights, torch.full_like(buffers, -0.5)))
    assert torch.isfinite(figures["train_loss"])
    views = problem.buffer_layout.views(zero := torch.full_like(buffers, -0.5))
    views["norm.running_var"].zero_()
    assert float(measure(Model(weights, zero))["train_loss"]) == float(figures["train_loss"])
