"""Empirical constants of generalisation theorems: gradient norms, gradient noise, heterogeneity.

The theorems use suprema over all models and examples. The values here are maxima over those measured, hence lower
bounds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Constants:
    """L, beta, sigma and sigma_g of Liu et al. 2025, Assumptions 2 to 5, and mu of Assumption 1 (strong convexity)."""

    lipschitz: float
    """L: the largest ||grad l(theta; z)|| of a single example."""
    smoothness: float
    """beta: the largest eigenvalue of a Hessian."""
    noise: float
    """sigma: the largest (E_z ||grad l(theta; z) - grad F_i(theta)||^2)^(1/2) of a client."""
    heterogeneity: float
    """sigma_g: 1/m sum_i ||grad F_i(theta) - grad F(theta)||."""
    convexity: float | None = None
    """mu, if known to be positive."""

    def plain(self) -> dict[str, float]:
        """The known constants, by name."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def largest(seen: Iterable[Constants]) -> Constants:
    """Constants of a run from those of its models: the largest of each, and the smallest mu."""
    models = list(seen)
    if not models:
        raise ValueError("no constants given")
    names = ("lipschitz", "smoothness", "noise", "heterogeneity")
    known = [model.convexity for model in models if model.convexity is not None]
    return Constants(
        **{name: max(getattr(model, name) for model in models) for name in names},
        convexity=None if models[0].convexity is None else min(known),
    )


class GradientSpread:
    """Running statistics of per-example gradients: largest norm, and mean squared distance from a centre."""

    def __init__(self, centre: Tensor) -> None:
        self.centre = centre
        self.count = 0
        self._squared_distances = torch.zeros((), dtype=torch.float64, device=centre.device)
        self._largest_norm = torch.zeros((), dtype=torch.float64, device=centre.device)

    def add(self, gradient: Tensor) -> None:
        """Add the gradient of one example, [P]."""
        self.count += 1
        self._squared_distances += torch.dist(gradient, self.centre).double() ** 2
        self._largest_norm = torch.maximum(self._largest_norm, gradient.norm().double())

    @property
    def noise(self) -> float:
        """(mean ||g_z - centre||^2)^(1/2); the client's sigma if the centre is its full gradient."""
        return float((self._squared_distances / max(self.count, 1)).sqrt())

    @property
    def longest(self) -> float:
        """The largest ||g_z||."""
        return float(self._largest_norm)


def heterogeneity(rows: Tensor) -> float:
    """sigma_g = 1/m sum_i ||grad F_i - grad F||, with F the unweighted mean over clients (Assumption 5).

    >>> heterogeneity(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]))
    1.0
    """
    mean = rows.mean(0)
    return float(torch.stack([torch.dist(row, mean) for row in rows]).mean())
