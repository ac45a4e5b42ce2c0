"""Overlap of eigenspaces on matrices with known eigenvectors."""

from __future__ import annotations

import math

import pytest
import torch

from fedflat.errors import UserError
from fedflat.flatness import subspace_overlap, top_eigenvectors

from .networks import Quadratic


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


def test_bases_of_different_sizes_are_rejected() -> None:
    with pytest.raises(UserError, match="equal shapes"):
        subspace_overlap(torch.eye(3)[:1], torch.eye(3)[:2])
    with pytest.raises(UserError, match="4 eigenvectors of a model with 3 parameters"):
        top_eigenvectors(Quadratic(torch.eye(3), torch.zeros(3), torch.zeros(3)).objective(), 4)
