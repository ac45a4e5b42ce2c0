"""Empirical constants of generalisation theorems: gradient norms, gradient noise, heterogeneity.

The theorems use suprema over all models and examples. The values here are maxima over those measured, hence lower
bounds.
"""

from __future__ import annotations

from collections.abc import Sequence
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

    def known(self) -> dict[str, float]:
        """Return the known constants, by name."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def largest_constants(of_models: Sequence[Constants]) -> Constants:
    """Return the constants of a run from those of its models: the largest of each, and the smallest convexity mu.

    These are the worst cases. mu is known for all models or for none.
    """
    if not of_models:
        raise ValueError("no constants given")
    known_mu = [constants.convexity for constants in of_models if constants.convexity is not None]
    return Constants(
        lipschitz=max(constants.lipschitz for constants in of_models),
        smoothness=max(constants.smoothness for constants in of_models),
        noise=max(constants.noise for constants in of_models),
        heterogeneity=max(constants.heterogeneity for constants in of_models),
        convexity=None if of_models[0].convexity is None else min(known_mu),
    )


class GradientSpread:
    """Running statistics of per-example gradients: largest norm, and mean squared distance from a centre."""

    def __init__(self, centre: Tensor) -> None:
        """Start without gradients; distances are measured from ``centre`` [P]."""
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
    def largest_norm(self) -> float:
        """The largest ||g_z||."""
        return float(self._largest_norm)


def heterogeneity(rows: Tensor) -> float:
    """Return sigma_g = 1/m sum_i ||grad F_i - grad F||, with F the unweighted mean over clients (Assumption 5).

    ``rows`` [clients, P] holds the gradients of the clients' losses F_i.

    >>> heterogeneity(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]))
    1.0
    """
    mean = rows.mean(0)
    return float(torch.stack([torch.dist(row, mean) for row in rows]).mean())
