"""Sharpness in closed form on quadratics, its invariances, and invalid requests."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from fedflat.algorithms.perturbation.asam import Asam
from fedflat.errors import UserError
from fedflat.flatness import Objective, sharpness_of
from fedflat.flatness.sharpness import Sharpness, adaptive_scale
from fedflat.reporting.figures.sharpness import sharpness_picture
from fedflat.testing import local_context

from .networks import Quadratic, case, symmetric

VALUES = torch.tensor([4.0, 2.0, 1.0, 0.5, 0.1])


def quadratic(seed: int = 0) -> Quadratic:
    generator = torch.Generator().manual_seed(seed)
    centre, at = (torch.randn(5, generator=generator).double() for _ in range(2))
    return Quadratic(symmetric(VALUES, seed), centre, at)


def true_rise(matrix: torch.Tensor, slope: torch.Tensor, rho: float) -> float:
    """max over |e| <= rho of g.e + e'Ae/2 for a convex quadratic: e = (mu - A)^-1 g on the sphere, mu > lambda_max."""
    values, vectors = (part.numpy() for part in torch.linalg.eigh(matrix))
    along = vectors.T @ slope.numpy()
    low, high = values[-1] + 1e-12, values[-1] + np.linalg.norm(along) / rho + 1
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if np.linalg.norm(along / (middle - values)) > rho else (low, middle)
    e = along / (high - values)
    return float(along @ e + (values * e * e).sum() / 2)


@settings(max_examples=20)
@given(seed=st.integers(0, 50), rho=st.floats(0.01, 2))
def test_first_order_sharpness(seed: int, rho: float) -> None:
    model = quadratic(seed)
    objective = model.objective()
    g = model.matrix @ (model.weight.detach() - model.centre)
    e = rho * g / g.norm()
    found = sharpness_of(objective, "sam", rho=rho)
    assert found.value == pytest.approx(float(g @ e + e @ model.matrix @ e / 2), rel=1e-9)
    assert found.loss == pytest.approx(float(objective.loss())) and found.examples == 4 and found.steps == 1


@settings(max_examples=5)
@given(seed=st.integers(0, 50), rho=st.floats(0.05, 2))
def test_ascent_reaches_the_worst_point(seed: int, rho: float) -> None:
    model = quadratic(seed)
    g = model.matrix @ (model.weight.detach() - model.centre)
    truth = true_rise(model.matrix, g, rho)
    first, some, many = (sharpness_of(model.objective(), "sam", rho=rho, steps=steps).value for steps in (1, 5, 60))
    assert max(first, some, many) <= truth * (1 + 1e-9)
    assert many == pytest.approx(truth, rel=5e-3) and many >= first * (1 - 1e-3)


def test_at_a_minimum_ascent_finds_the_largest_eigenvalue() -> None:
    model = quadratic()
    with torch.no_grad():
        model.weight.copy_(model.centre)
    found = sharpness_of(model.objective(), "sam", rho=0.3, steps=60)
    assert found.value == pytest.approx(0.3**2 * 4 / 2, rel=1e-3)
    assert 0 < sharpness_of(model.objective(), "sam", rho=0.3).value <= 0.3**2 * 4 / 2


def test_average_sharpness_is_half_the_mean_curvature() -> None:
    found = sharpness_of(quadratic().objective(), "average", rho=0.2, directions=300)
    truth = 0.2**2 * float(VALUES.mean()) / 2
    assert found.interval is not None and found.interval.low <= truth <= found.interval.high
    assert found.value == pytest.approx(truth, rel=0.15)


def test_pairs_of_directions_cancel_the_slope() -> None:
    model = quadratic()
    far = copy.deepcopy(model)
    with torch.no_grad():
        far.weight += 100
    near, steep = (sharpness_of(one.objective(), "average", rho=0.1, directions=5).value for one in (model, far))
    assert near == pytest.approx(steep, rel=1e-5)


def test_adaptive_sharpness_in_closed_form() -> None:
    model = quadratic(3)
    w, rho = model.weight.detach(), 0.4
    g = model.matrix @ (w - model.centre)
    scale = w.abs() + 0.2
    e = rho * scale**2 * g / (scale * g).norm()
    found = sharpness_of(model.objective(), "asam", rho=rho, eta=0.2)
    assert found.value == pytest.approx(float(g @ e + e @ model.matrix @ e / 2), rel=1e-9)


def test_adaptive_ascent_is_plain_ascent_in_other_coordinates() -> None:
    model = quadratic(4)
    scale = adaptive_scale(model.objective())
    inside = Quadratic(model.matrix * scale[:, None] * scale, model.centre / scale, model.weight.detach() / scale)
    plain = sharpness_of(inside.objective(), "sam", rho=0.3, steps=12)
    assert sharpness_of(model.objective(), "asam", rho=0.3, steps=12).value == pytest.approx(plain.value, rel=1e-9)


def rescaled(network: nn.Sequential, factor: float) -> nn.Sequential:
    """A ReLU network stays the same function if one layer is multiplied and the next one divided by a factor."""
    other = copy.deepcopy(network)
    with torch.no_grad():
        for parameter in other[0].parameters():
            parameter *= factor
        other[2].weight /= factor
    return other


@pytest.mark.parametrize("steps", [1, 6])
@pytest.mark.parametrize(
    ("kind", "options", "has_biases", "is_invariant"),
    [
        ("asam", {"scope": "all"}, True, True),
        ("asam", {"scope": "weight"}, True, False),  # T = 1 for the rescaled biases
        ("asam", {"scope": "weight"}, False, True),
        ("asam", {"scope": "all", "eta": 0.2}, True, False),
        ("sam", {}, False, False),
    ],
)
def test_invariance_to_rescaling(kind: str, options: dict, has_biases: bool, is_invariant: bool, steps: int) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 8, has_biases), nn.ReLU(), nn.Linear(8, 3, has_biases)).double()
    data = (torch.randn(20, 4).double(), torch.arange(20) % 3)
    objectives = [Objective(n, F.cross_entropy, data) for n in (network, rescaled(network, 7.0))]
    assert float(objectives[0].loss()) == pytest.approx(float(objectives[1].loss()), rel=1e-12)
    before, after = (sharpness_of(f, kind, rho=0.3, steps=steps, **options).value for f in objectives)
    assert (after == pytest.approx(before, rel=1e-6)) == is_invariant
    assert is_invariant or abs(after - before) > 0.01 * before


def test_which_tensors_are_scaled() -> None:
    objective = case("mlp").objective()
    biases = objective.layout.indicator(lambda name: "bias" in name, objective.weights)
    by_default, everywhere = adaptive_scale(objective, 0.5), adaptive_scale(objective, 0.5, "all")
    assert by_default[biases].unique().tolist() == [1.0]
    assert everywhere.equal(objective.weights.abs() + 0.5) and by_default[~biases].equal(everywhere[~biases])


def test_sharpness_grows_with_the_radius() -> None:
    objective = case("batch norm").objective()
    results = [sharpness_of(objective, "sam", rho=rho) for rho in (2, np.int64(2), torch.tensor(2.0))]
    assert len({result.value for result in results}) == 1 and all(type(result.rho) is float for result in results)
    rises = [sharpness_of(objective, "sam", rho=rho, steps=10).value for rho in (0.01, 0.05, 0.2, 0.5)]
    assert rises == sorted(rises) and rises[0] > 0


@pytest.mark.parametrize(
    ("kind", "options", "sentence"),
    [
        ("smm", {}, "'smm'; did you mean"),
        ("sam", {"rho": 0.0}, "rho=0"),
        ("sam", {"rho": [0.1, 0.2]}, r"rho=\[0.1, 0.2\] is invalid; expected one number"),
        ("sam", {"steps": 0}, "steps=0"),
        ("asam", {"eta": -1.0}, "eta=-1"),
        ("asam", {"scope": "biases"}, "'biases'"),
        ("average", {"directions": 1}, "directions=1"),
    ],
)
def test_impossible_requests(kind: str, options: dict, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        sharpness_of(case("mlp").objective(), kind, **options)


def test_a_rise_that_is_not_finite() -> None:
    network = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        network.weight.fill_(1.0)
    objective = Objective(network, lambda output, target: output.pow(30).mean(), (torch.ones(2, 1), torch.zeros(2)))
    with pytest.raises(UserError, match=r"is inf.*smaller radius"):
        sharpness_of(objective, "sam", rho=1e6)


def test_asam_recognises_weights_by_dimension_if_no_name_contains_weight() -> None:
    """A network with parameters W1, b1, ... has the scale of the same network with torch's names."""
    network = case("mlp").network
    renamed = nn.Module()
    for number, parameter in enumerate(network.parameters()):
        renamed.register_parameter(f"{'W' if parameter.ndim > 1 else 'b'}{number}", parameter)
    objectives = [Objective(module, F.mse_loss, (torch.ones(1, 1), torch.ones(1, 1))) for module in (network, renamed)]
    scales = [adaptive_scale(objective, eta=0.1) for objective in objectives]
    assert torch.equal(*scales) and not bool((scales[1] == 1).all())
    weights = objectives[1].weights
    context = local_context(y=weights.tolist(), z=weights.tolist())._replace(layout=objectives[1].layout)
    assert torch.equal(Asam().begin(context)["scaled"], scales[1] != 1)  # training scales the same weights
    renamed.W0, renamed.W2 = (nn.Parameter(torch.ones(2)) for _ in range(2))
    vectors_only = Objective(renamed, F.mse_loss, (torch.ones(1, 1), torch.ones(1, 1)))
    with pytest.raises(UserError, match=r"W0.*scope=all"):
        adaptive_scale(vectors_only)
    assert len(adaptive_scale(vectors_only, scope="all")) == vectors_only.size


def test_m_sharpness_of_a_linear_loss() -> None:
    """The loss of a group is w . mean(x), so its rise is rho |mean(x)|; the groups' means differ."""
    inputs = torch.randn(12, 3, generator=torch.Generator().manual_seed(0)).double()
    model = nn.Linear(3, 1, bias=False).double()
    objective = Objective(model, lambda output, target: output.mean(), (inputs, torch.zeros(12)), batch_size=5)
    each, pairs, whole = (sharpness_of(objective, rho=0.1, m=m) for m in (1, 2, 12))
    assert each.value == pytest.approx(0.1 * float(inputs.norm(dim=1).mean()))
    assert whole.value == pytest.approx(0.1 * float(inputs.mean(0).norm())) and whole.interval is None
    assert whole.value == pytest.approx(sharpness_of(objective, rho=0.1).value)
    assert each.value > pairs.value > whole.value and pairs.interval is not None and pairs.interval.draws == 6
    assert pairs.m == 2 and pairs.loss == pytest.approx(float(objective.loss()))
    assert sharpness_of(objective, rho=0.1, m=5).interval.draws == 3  # groups of 4
    with pytest.raises(UserError, match="m=2 with kind average"):
        sharpness_of(objective, "average", m=2)
    with pytest.raises(UserError, match="m=0"):
        sharpness_of(objective, m=0)


def test_the_figure_is_log_log_and_counts_values_that_are_not_positive() -> None:
    rises = {("sam", 0.1): 0.1, ("sam", 0.11): 0.2, ("sam", 1.0): 10.0, ("average", 0.1): -0.1, ("average", 1.0): 1.0}
    results = {key: [Sharpness(*key, loss=1.0, value=value)] for key, value in rises.items()}
    sam, average = sharpness_picture({"fedavg": results}).axes
    assert {scale for axes in (sam, average) for scale in (axes.get_xscale(), axes.get_yscale())} == {"log"}
    assert [label.get_text() for label in sam.get_xticklabels()] == ["0.1", "1"]  # 0.11 has no room
    assert sam.get_title(loc="right") == "" and average.get_title(loc="right") == "1 of 2 values ≤ 0 omitted"
    falling = {key: [Sharpness(*key, loss=1.0, value=-1.0)] for key in rises}
    assert sharpness_picture({"fedavg": falling}).axes[0].get_yscale() == "linear"
