"""Relative flatness, Fisher-Rao norm and PAC-Bayes sharpness against closed forms, and their invariances."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedflat import flatness
from fedflat.errors import UserError

from .networks import Quadratic, case, true_hessian


def relu_network() -> tuple[nn.Sequential, tuple[torch.Tensor, torch.Tensor]]:
    """A ReLU network without biases: its output is homogeneous of degree 2 in the weights."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(5, 8, bias=False), nn.ReLU(), nn.Linear(8, 3, bias=False)).double()
        return network, (torch.randn(30, 5).double(), torch.arange(30) % 3)


def test_relative_flatness_is_its_defining_sum() -> None:
    network = case("group norm")  # the layer is a convolution in the middle of the vector
    objective = network.objective(24)
    name, shape = "3.weight", (2, 4, 3, 3)
    hessian, start = true_hessian("group norm"), 0
    for other, size in zip(objective.layout.names, objective.layout.sizes, strict=True):
        if other == name:
            break
        start += size
    block = hessian[start : start + size, start : start + size].view(2, size // 2, 2, size // 2)  # one row per filter
    rows = objective.layout.views(objective.weights)[name].flatten(1)
    assert tuple(objective.layout.views(objective.weights)[name].shape) == shape
    truth = float((rows @ rows.T * torch.einsum("sitj,ij->st", block, torch.eye(size // 2).double())).sum())
    estimate = flatness.relative_flatness(objective, name, draws=80)
    assert abs(estimate.value - truth) < 1.5 * estimate.half_width < abs(truth)


def test_norms_of_a_relu_network_and_its_rescaled_copy() -> None:
    network, data = relu_network()
    options = {"draws": 4, "directions": 2}
    norms = flatness.norms(network, F.cross_entropy, data, **options)
    output = network(data[0]).detach()
    slope = output.softmax(1) - F.one_hot(data[1])
    assert norms.fisher_rao == pytest.approx(2 * float((slope * output).sum(1).square().mean().sqrt()))  # degree 2
    rescaled = copy.deepcopy(network)
    with torch.no_grad():
        rescaled[0].weight *= 4
        rescaled[2].weight /= 4
    again = flatness.norms(rescaled, F.cross_entropy, data, **options)
    assert norms.layer == "2.weight"
    assert again.relative_flatness.value == pytest.approx(norms.relative_flatness.value)
    assert again.fisher_rao == pytest.approx(norms.fisher_rao)
    assert again.magnitude_sigma == pytest.approx(norms.magnitude_sigma, rel=0.01)
    assert again.sigma < 0.7 * norms.sigma  # equal noise on all weights is not invariant
    assert norms.document()["relative_flatness"]["draws"] == 4


def test_sigma_of_a_quadratic() -> None:
    size = 500
    quadratic = Quadratic(4 * torch.eye(size), torch.zeros(size), torch.full((size,), 0.5))
    objective = quadratic.objective()
    with pytest.raises(UserError, match="two dimensions"):
        flatness.norms(objective)
    from fedflat.flatness.norms import _pac_bayes_sigma

    expected = math.sqrt(2 * 0.1 / (4 * size))  # the expected rise is sigma^2 tr H / 2
    assert _pac_bayes_sigma(objective, torch.zeros(size), 0.1, 10, 0) == pytest.approx(expected, rel=0.02)
    relative = _pac_bayes_sigma(objective, objective.weights, 0.1, 10, 0)
    assert 0.25 * relative**2 + 1e-6 == pytest.approx(expected**2, rel=0.04)


def test_invalid_arguments() -> None:
    network, data = relu_network()
    for options, message in (
        ({"layer": "4.weight"}, "2.weight"),
        ({"rise": 0.0}, "rise=0"),
        ({"directions": 0}, "directions=0"),
        ({"draws": 1}, "draws=1"),
    ):
        with pytest.raises(UserError, match=message):
            flatness.norms(network, F.cross_entropy, data, **options)
    linear = flatness.Objective(
        nn.Linear(1, 1), lambda output, target: output.mean(), (torch.ones(3, 1), torch.ones(3))
    )
    with pytest.warns(UserWarning, match="choose another rise"):
        norms = flatness.norms(linear)  # a linear loss does not rise on average
    assert math.isnan(norms.sigma) and norms.document()["sigma"] is None and norms.fisher_rao > 0
