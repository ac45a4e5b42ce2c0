"""Overlap of eigenspaces on matrices with known eigenvectors, and CKA from its definition with kernels."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from torch import nn

from fedflat.errors import UserError
from fedflat.flatness import Objective, features_of, linear_cka, subspace_overlap, top_eigenvectors

from .networks import Quadratic, case


def test_the_overlap_is_the_mean_squared_cosine_of_principal_angles() -> None:
    size, angle = 6, 0.3
    rotation = torch.eye(size, dtype=torch.float64)
    rotation[1, 1] = rotation[4, 4] = math.cos(angle)
    rotation[1, 4], rotation[4, 1] = math.sin(angle), -math.sin(angle)
    matrix = torch.diag(torch.tensor([9.0, 8, 2, 1, 0.5, -20], dtype=torch.float64))
    zero = torch.zeros(size, dtype=torch.float64)
    spaces = [
        top_eigenvectors(Quadratic(turned, zero, zero).objective(), 2)
        for turned in (matrix, rotation @ matrix @ rotation.T)
    ]
    assert subspace_overlap(*spaces) == pytest.approx((1 + math.cos(angle) ** 2) / 2)
    assert subspace_overlap(spaces[0], spaces[0]) == pytest.approx(1)


def test_arbitrary_eigenvectors_of_eigenvalue_zero_raise_a_warning() -> None:
    diagonal, zero = torch.tensor([5.0, 2, *98 * [0.0]]).double(), torch.zeros(100).double()
    objectives = [Quadratic(torch.diag(values), zero, zero).objective() for values in (diagonal, diagonal.flip(0))]
    with pytest.warns(UserWarning, match="only 2 of the 12 largest eigenvalues"):
        spaces = [top_eigenvectors(objective, 12, seed=seed) for seed, objective in enumerate(objectives)]
    assert subspace_overlap(*spaces) < 0.3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        top_eigenvectors(objectives[0], 2)
    small = Quadratic(torch.diag(torch.tensor([1e5, 1.0, *8 * [0.0]])), torch.zeros(10), torch.zeros(10))
    with pytest.warns(UserWarning, match="not all converged"):
        top_eigenvectors(small.objective(), 2)


def test_bases_of_different_sizes_are_rejected() -> None:
    with pytest.raises(UserError, match="equal shapes"):
        subspace_overlap(torch.eye(3)[:1], torch.eye(3)[:2])
    with pytest.raises(UserError, match="4 eigenvectors of a model with 3 parameters"):
        top_eigenvectors(Quadratic(torch.eye(3), torch.zeros(3), torch.zeros(3)).objective(), 4)


@pytest.mark.parametrize("features", [3, 30])
def test_cka_by_its_definition_and_its_invariances(features: int) -> None:
    x, y = torch.randn(20, features, generator=torch.Generator().manual_seed(0)).double(), torch.eye(20).double()
    y = y[:, :6] + 0.3 * x[:, :1]
    centring = torch.eye(20).double() - 1 / 20
    hsic = [(a @ a.T @ centring @ b @ b.T @ centring).trace() for a, b in ((x, y), (x, x), (y, y))]
    assert linear_cka(x, y) == pytest.approx(float(hsic[0] / (hsic[1] * hsic[2]).sqrt()))
    orthogonal = torch.linalg.qr(torch.randn(features, features).double()).Q
    assert linear_cka(5 * x @ orthogonal + 2, y) == pytest.approx(linear_cka(x, y))
    assert math.isnan(linear_cka(torch.ones(20, 2), y))
    with pytest.raises(UserError, match="20 and 4 rows"):
        linear_cka(x, y[:4])


class Keywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(input=x)


def test_features_of_a_layer_that_is_called_by_keyword() -> None:
    inputs = torch.randn(5, 3)
    objective = Objective(Keywords(), nn.functional.cross_entropy, (inputs, torch.zeros(5, dtype=torch.long)))
    assert torch.equal(features_of(objective), inputs)


def test_features_are_the_inputs_of_the_classifier_in_evaluation_mode() -> None:
    network = case("batch norm")
    objective = network.objective(7)
    features = features_of(objective)
    network.network.eval()
    expected = network.network[:-1](network.inputs).detach()
    network.network.train()
    torch.testing.assert_close(features, expected)
    torch.testing.assert_close(features_of(objective, "0"), network.inputs.flatten(1))
    with pytest.raises(UserError, match="unknown layer '2'"):
        features_of(objective, "2")
    with pytest.raises(UserError, match="not called once per example"):
        features_of(case("attention").objective(), "mix.out_proj")
