"""Flatness of runs whose clients keep their BatchNorm statistics: the server model is measured with estimated ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fedflat
from fedflat.experiment.analysis.observer import FixedSample
from fedflat.experiment.analysis.run_model import RunModel, open_model, with_statistics
from fedflat.experiment.config import FlatnessSettings
from fedflat.experiment.store.run_folder import Record, client_statistics
from fedflat.reporting.result import Result

OWN = {"training__statistics": "own"}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(256, 10))


def run(**more: Any) -> tuple[Record, RunModel]:
    """A short run, and its model to be measured."""
    settings = {
        "clients": 4,
        "clients_per_round": 2,
        "rounds": 2,
        "local_steps": 2,
        "batch_size": 10,
        "device": "cpu",
        "algorithm": "fedavg",
        **more,
    }
    record = fedflat.run(**settings, model=network(), workers=1).record
    return record, open_model(record, network=network())


@pytest.fixture(scope="module")
def own() -> tuple[Record, RunModel]:
    return run(**OWN)


def test_the_server_is_measured_with_statistics_of_the_training_set(own: tuple[Record, RunModel]) -> None:
    _, found = own
    problem, state = found.problem, found.state
    train = problem.data.train.take(torch.from_numpy(found.training_positions))
    fresh = problem.initial_state()[1]
    assert torch.equal(state.buffers, fresh), "clients have kept theirs"
    objective = found.objective(batch=len(train))
    with torch.no_grad():
        problem.model.eval()
        batch = problem.normalised(train.inputs)
        still = with_statistics(problem, state, found.training_positions)
        buffers = {**problem.buffer_layout.views(still.buffers), **state.integer_buffers}
        expected = problem.task.loss(
            problem.predict_normalised(state.weights, buffers, batch, batch_statistics=False), train.targets
        )
        unknowing = {**problem.buffer_layout.views(fresh), **state.integer_buffers}
        wrong = problem.task.loss(
            problem.predict_normalised(state.weights, unknowing, batch, batch_statistics=False), train.targets
        )
    assert float(objective.loss()) == pytest.approx(float(expected), rel=1e-5)
    assert abs(float(wrong) - float(expected)) > 0.05, "zeros and ones would be another model"


def test_estimated_statistics_are_mean_and_variance_of_the_layer_inputs(own: tuple[Record, RunModel]) -> None:
    _, found = own
    problem = found.problem
    statistics = problem.buffer_layout.views(with_statistics(problem, found.state, np.arange(300)).buffers)
    mean, variance = (
        next(value for name, value in statistics.items() if name.endswith(end))
        for end in ("running_mean", "running_var")
    )
    tensors = problem.layout.views(found.state.weights)
    seen = F.conv2d(
        problem.normalised(problem.data.train.inputs[:300]), tensors["0.weight"], tensors["0.bias"], padding=1
    )
    assert torch.allclose(mean, seen.mean((0, 2, 3)), atol=1e-5)
    assert torch.allclose(variance, seen.var((0, 2, 3)), rtol=1e-4)


def test_an_exported_model_has_statistics_of_the_training_set(own: tuple[Record, RunModel], tmp_path: Path) -> None:
    record, found = own
    result = Result(record)
    problem = found.problem
    expected = problem.buffer_layout.views(with_statistics(problem, found.state, found.training_positions).buffers)
    written = torch.load(result.export(tmp_path / "model.pt"), weights_only=True)
    for tensors in (result.model().state_dict(), written):
        assert all(torch.allclose(tensors[name], statistics, atol=1e-6) for name, statistics in expected.items())
    assert float(result.state_dict()["1.running_mean"].abs().max()) == 0, "what the server has itself"


def test_a_module_of_a_round_has_statistics_of_the_training_set() -> None:
    settings = {
        "clients": 4,
        "clients_per_round": 2,
        "rounds": 1,
        "local_steps": 2,
        "batch_size": 10,
        "device": "cpu",
        "workers": 1,
        **OWN,
    }
    (only,) = fedflat.rounds("fedavg", network(), **settings)
    expected = only.run.problem.buffer_layout.views(
        with_statistics(only.run.problem, only.server.model, only.run.partition.trained_on).buffers
    )
    assert all(torch.equal(only.model.state_dict()[name], statistics) for name, statistics in expected.items())


def test_a_client_is_measured_with_its_own_statistics(own: tuple[Record, RunModel]) -> None:
    record, found = own
    kept = client_statistics(record)
    (taken_part, *_), away = sorted(kept), sorted(set(range(4)) - kept.keys())
    state = found.state._replace(buffers=kept[taken_part])
    assert float(found.objective(client=taken_part).loss()) == float(
        found.objective(client=taken_part, state=state).loss()
    )
    assert float(found.objective(client=taken_part).loss()) != float(
        found.objective(client=taken_part, state=found.state).loss()
    )
    for client in away[:1]:
        still = with_statistics(found.problem, found.state, found.training_positions)
        assert float(found.objective(client=client).loss()) == float(found.objective(client=client, state=still).loss())


def test_in_run_and_post_hoc_measurements_agree() -> None:
    record, found = run(
        **OWN, rounds=1, flatness__every=1, flatness__what="lambda_max,sharpness", flatness__examples=60
    )
    look = FixedSample(found.problem, found.partition, FlatnessSettings(examples=60))
    seen = record.history[-1]["flatness"]["models"]["server"]
    assert seen["lambda_max"] == pytest.approx(look.lambda_max(found.state), rel=1e-4)
    assert seen["sharpness"] == pytest.approx(look.sharpness(found.state), rel=1e-4)
    still = found.state._replace(buffers=with_statistics(found.problem, found.state, look.positions).buffers)
    loss, gradient = look.objective(still, look.positions).loss_and_gradient()
    risen = look.objective(still, look.positions).loss(still.weights + 0.05 * gradient / gradient.norm())
    assert seen["sharpness"] == pytest.approx(float(risen - loss), rel=1e-3)


def test_models_with_averaged_statistics_are_unchanged() -> None:
    _, found = run()
    assert with_statistics(found.problem, found.state, found.training_positions) is found.state
