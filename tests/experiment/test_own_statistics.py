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
    _, model = own
    problem, state = model.problem, model.state
    train = problem.data.train.take(torch.from_numpy(model.training_positions))
    initial_statistics = problem.initial_state()[1]
    assert torch.equal(state.buffers, initial_statistics), "clients keep their own statistics"
    objective = model.objective(batch_size=len(train))
    with torch.no_grad():
        problem.model.eval()
        batch = problem.normalised(train.inputs)
        with_estimates = with_statistics(problem, state, model.training_positions)
        buffers = {**problem.buffer_layout.views(with_estimates.buffers), **state.integer_buffers}
        expected = problem.task.loss(
            problem.predict_normalised(state.weights, buffers, batch, batch_statistics=False), train.targets
        )
        initial = {**problem.buffer_layout.views(initial_statistics), **state.integer_buffers}
        wrong = problem.task.loss(
            problem.predict_normalised(state.weights, initial, batch, batch_statistics=False), train.targets
        )
    assert float(objective.loss()) == pytest.approx(float(expected), rel=1e-5)
    assert abs(float(wrong) - float(expected)) > 0.05, "the initial statistics would give another loss"


def test_estimated_statistics_are_mean_and_variance_of_the_layer_inputs(own: tuple[Record, RunModel]) -> None:
    _, model = own
    problem = model.problem
    statistics = problem.buffer_layout.views(with_statistics(problem, model.state, np.arange(300)).buffers)
    mean, variance = (
        next(value for name, value in statistics.items() if name.endswith(end))
        for end in ("running_mean", "running_var")
    )
    tensors = problem.layout.views(model.state.weights)
    inputs = F.conv2d(
        problem.normalised(problem.data.train.inputs[:300]), tensors["0.weight"], tensors["0.bias"], padding=1
    )
    assert torch.allclose(mean, inputs.mean((0, 2, 3)), atol=1e-5)
    assert torch.allclose(variance, inputs.var((0, 2, 3)), rtol=1e-4)


def test_an_exported_model_has_statistics_of_the_training_set(own: tuple[Record, RunModel], tmp_path: Path) -> None:
    record, model = own
    result = Result(record)
    problem = model.problem
    expected = problem.buffer_layout.views(with_statistics(problem, model.state, model.training_positions).buffers)
    written = torch.load(result.export(tmp_path / "model.pt"), weights_only=True)
    for tensors in (result.model().state_dict(), written):
        assert all(torch.allclose(tensors[name], statistics, atol=1e-6) for name, statistics in expected.items())
    assert float(result.state_dict()["1.running_mean"].abs().max()) == 0, (
        "the server's own statistics are the initial ones"
    )


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
    record, model = own
    by_client = client_statistics(record)
    (participant, *_), others = sorted(by_client), sorted(set(range(4)) - by_client.keys())
    state = model.state._replace(buffers=by_client[participant])
    assert float(model.objective(client=participant).loss()) == float(
        model.objective(client=participant, state=state).loss()
    )
    assert float(model.objective(client=participant).loss()) != float(
        model.objective(client=participant, state=model.state).loss()
    )
    for client in others[:1]:
        with_estimates = with_statistics(model.problem, model.state, model.training_positions)
        assert float(model.objective(client=client).loss()) == float(
            model.objective(client=client, state=with_estimates).loss()
        )


def test_in_run_and_post_hoc_measurements_agree() -> None:
    record, model = run(
        **OWN, rounds=1, flatness__every=1, flatness__what="lambda_max,sharpness", flatness__examples=60
    )
    sample = FixedSample(model.problem, model.partition, FlatnessSettings(examples=60))
    measured = record.history[-1]["flatness"]["models"]["server"]
    assert measured["lambda_max"] == pytest.approx(sample.lambda_max(model.state), rel=1e-4)
    assert measured["sharpness"] == pytest.approx(sample.sharpness(model.state), rel=1e-4)
    with_estimates = model.state._replace(buffers=with_statistics(model.problem, model.state, sample.positions).buffers)
    loss, gradient = sample.objective(with_estimates, sample.positions).loss_and_gradient()
    perturbed_loss = sample.objective(with_estimates, sample.positions).loss(
        with_estimates.weights + 0.05 * gradient / gradient.norm()
    )
    assert measured["sharpness"] == pytest.approx(float(perturbed_loss - loss), rel=1e-3)


def test_models_with_averaged_statistics_are_unchanged() -> None:
    _, model = run()
    assert with_statistics(model.problem, model.state, model.training_positions) is model.state
