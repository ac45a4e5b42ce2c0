"""Flatness of arbitrary torch modules, in one call each."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import fedflat
from fedflat import flatness
from fedflat.errors import UserError

from .networks import case, true_hessian


def regression() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Linear regression, whose Hessian is 2/n X'X for all weights."""
    torch.manual_seed(1)
    inputs = torch.randn(40, 6).double()
    return nn.Linear(6, 1, bias=False).double(), (inputs, torch.randn(40, 1).double()), 2 / 40 * inputs.T @ inputs


@pytest.mark.parametrize("kind", ["pair", "loader", "list"])
def test_the_spectrum_of_a_regression(kind: str) -> None:
    model, pair, hessian = regression()
    data = {
        "pair": pair,
        "loader": DataLoader(TensorDataset(*pair), batch_size=7, shuffle=True),
        "list": [(pair[0][:15], pair[1][:15]), (pair[0][15:], pair[1][15:])],
    }[kind]
    found = fedflat.flatness.spectrum(model, F.mse_loss, data)
    truth = torch.linalg.eigvalsh(hessian).flip(0)
    assert found.eigenvalues == pytest.approx(truth.tolist(), rel=1e-9)
    assert found.lambda_max == pytest.approx(float(truth[0])) and found.ratio == pytest.approx(
        float(truth[0] / truth[4])
    )
    assert found.lambda_min == pytest.approx(float(truth[-1])) and found.negative == 0
    assert found.trace is not None and found.trace.value == pytest.approx(float(hessian.trace()))
    assert (found.parameters, found.examples, found.precision, found.converged) == (6, 40, "float64", True)


def test_estimators_of_the_trace() -> None:
    model, data, hessian = regression()
    by_hutch = flatness.trace(model, F.mse_loss, data, estimator="hutch++", draws=18)  # its subspace is the whole space
    assert by_hutch.value == pytest.approx(float(hessian.trace())) and by_hutch.half_width < 1e-9
    spectrum = flatness.spectrum(model, F.mse_loss, data, 1, trace_estimator="hutch++", trace_draws=18)
    assert spectrum.trace is not None and spectrum.trace.value == pytest.approx(float(hessian.trace()))
    assert spectrum.trace.half_width < 1e-9
    with pytest.raises(UserError, match=r"hutch\+\+"):
        flatness.trace(model, F.mse_loss, data, estimator="hutch")
    with pytest.raises(UserError, match="at least 4"):
        flatness.spectrum(model, F.mse_loss, data, 1, trace_estimator="hutch++", trace_draws=3)


def test_the_spectrum_of_a_network_with_negative_curvature() -> None:
    one, truth = case("group norm"), torch.linalg.eigvalsh(true_hessian("group norm")).flip(0)
    data = (one.inputs, one.targets)
    found = flatness.spectrum(one.network, one.loss, data, 5, tolerance=1e-6, density_draws=3, density_steps=15)
    assert found.eigenvalues == pytest.approx(truth[:5].tolist(), rel=1e-6)
    assert found.lambda_min == pytest.approx(float(truth[-1]), rel=1e-5) and truth[-1] < 0 and found.negative == 1
    assert found.trace is not None and found.trace.low <= float(truth.sum()) <= found.trace.high
    assert found.density is not None and found.density.products == 45
    magnitude = flatness.spectrum(one.network, one.loss, data, 5, by="magnitude", trace_draws=0, tolerance=1e-6)
    expected = truth[truth.abs().argsort(descending=True)][:5]
    assert magnitude.eigenvalues == pytest.approx(expected.tolist(), rel=1e-6)
    assert magnitude.lambda_min is None and magnitude.trace is None
    assert json.loads(json.dumps(found.document()))["lambda_max"] == found.lambda_max


def test_power_iteration_is_sorted_and_reports_convergence() -> None:
    model, pair, hessian = regression()
    found = flatness.spectrum(model, F.mse_loss, pair, 3, method="power", iterations=200)
    assert list(found.eigenvalues) == sorted(found.eigenvalues, reverse=True) and found.lambda_min is None
    assert found.eigenvalues[0] == pytest.approx(float(torch.linalg.eigvalsh(hessian)[-1]), rel=1e-2)
    assert found.method == "power" and found.ratio is None


def test_trace_density_and_sharpness() -> None:
    model, pair, hessian = regression()
    trace = flatness.trace(model, F.mse_loss, pair, draws=20)
    assert trace.low <= float(hessian.trace()) <= trace.high
    density = flatness.density(model, F.mse_loss, pair, draws=2, steps=6)
    assert density.nodes[0] == pytest.approx(torch.linalg.eigvalsh(hessian).numpy(), rel=1e-8)
    worst = flatness.sharpness(model, F.mse_loss, pair, rho=0.1, steps=30)
    mean = flatness.sharpness(model, F.mse_loss, pair, "average", rho=0.1)
    assert worst.value > mean.value > 0


def test_the_landscape_of_a_regression_is_drawn() -> None:
    model, pair, _ = regression()
    landscape = flatness.landscape(model, F.mse_loss, pair, points=3, radius=0.5)
    assert landscape.at("loss", 0.0, 0.0) == pytest.approx(F.mse_loss(model(pair[0]), pair[1]).item())
    assert landscape.plot().axes[0].get_title() == "model"
    line = flatness.landscape(model, F.mse_loss, pair, points=3, dimensions=1)
    assert line.plot("loss").axes[0].get_ylabel() == "loss"
    objective = flatness.Objective(model, F.mse_loss, pair)
    ends = {"a": model, "b": torch.ones(6).double(), "c": torch.arange(6).double()}
    assert "barrier" in flatness.path_of(objective, dict(list(ends.items())[:2]), points=3).plot().axes[0].get_title(
        "right"
    )
    plane = flatness.plane_of(objective, ends, points=3)
    assert plane.plot().axes[0].get_title("left") == "loss"
    with pytest.raises(UserError, match="'test_error'"):
        landscape.plot("test_error")


def test_an_objective_can_be_measured_several_times() -> None:
    model, pair, _ = regression()
    objective = flatness.Objective(model, F.mse_loss, pair)
    assert (
        flatness.spectrum(objective, count=2).eigenvalues == flatness.spectrum(model, F.mse_loss, pair, 2).eigenvalues
    )
    subsets = [flatness.spectrum(objective.subset(20, seed), count=1).lambda_max for seed in range(3)]
    assert len(set(subsets)) == 3


def test_progress_is_reported() -> None:
    model, pair, _ = regression()
    said: list[str] = []
    flatness.spectrum(model, F.mse_loss, pair, 2, density_draws=1, progress=said.append)
    assert said[0].startswith("checking") and said[-1].startswith("density: 6 of 6")
    assert any(line.startswith("2 of 2 eigenvalues") for line in said) and "trace: 30 of 30 draws" in said


@pytest.mark.parametrize(
    ("arguments", "options", "sentence"),
    [
        (("a model",), {}, "str.*torch module"),
        ((nn.Linear(1, 1),), {}, "loss and data"),
        ((nn.Linear(1, 1), nn.MSELoss, (torch.ones(2, 1), torch.ones(2, 1))), {}, r"such as MSELoss\(\)"),
        (
            (nn.Linear(1, 1), F.mse_loss, (torch.ones(2, 1), torch.ones(2, 1)), 3),
            {},
            "3 eigenvalues .* 2 parameters",
        ),
        (
            (nn.Linear(1, 1), F.mse_loss, (torch.ones(2, 1), torch.ones(2, 1)), 1),
            {"method": "qr"},
            "'qr'",
        ),
        (
            (nn.Linear(1, 1), F.mse_loss, (torch.ones(2, 1), torch.ones(2, 1)), 1),
            {"by": "size"},
            "'size'",
        ),
        (
            (nn.Linear(1, 1), F.mse_loss, (torch.ones(3, 1), torch.ones(2, 1)), 1),
            {},
            "3 inputs but 2 targets",
        ),
        (
            (nn.Linear(1, 1), F.mse_loss, (torch.full((2, 1), float("inf")), torch.ones(2, 1)), 1),
            {},
            "the loss is (inf|nan)",
        ),
    ],
)
def test_invalid_arguments_are_rejected(arguments: tuple, options: dict, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        flatness.spectrum(*arguments, **options)
