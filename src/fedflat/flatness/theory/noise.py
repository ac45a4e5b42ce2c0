"""The constants that generalisation theorems speak of, seen at a point: gradient norms, gradient noise, heterogeneity.

All of them are suprema over every model and every example; what can be seen is the largest value over the models and examples that were
looked at, hence a lower bound of each.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Constants:
    """L, beta, sigma and sigma_g of Liu et al. 2025, Assumptions 2 to 5; mu of Assumption 1 where the loss is strongly convex."""

    lipschitz: float
    """L: the largest ||grad l(theta; z)|| of a single example."""
    smoothness: float
    """beta: the largest eigenvalue of a Hessian."""
    noise: float
    """sigma: the largest (E_z ||grad l(theta; z) - grad F_i(theta)||^2)^(1/2) of a client."""
    heterogeneity: float
    """sigma_g: 1/m sum_i ||grad F_i(theta) - grad F(theta)||."""
    convexity: float | None = None
    """mu, where it is known to be above 0."""

    def plain(self) -> dict[str, float]:
        """The constants that are there, by name."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def largest(seen: Iterable[Constants]) -> Constants:
    """The constants of a whole run from those of its models: the largest of each, and the smallest mu."""
    together: Constants | None = None
    for one in seen:
        if together is None:
            together = one
            continue
        names = ("lipschitz", "smoothness", "noise", "heterogeneity")
        together = replace(together, **{name: max(getattr(together, name), getattr(one, name)) for name in names})
        if one.convexity is not None and together.convexity is not None:
            together = replace(together, convexity=min(one.convexity, together.convexity))
    if together is None:
        raise ValueError("no constants to take the largest of")
    return together


class Spread:
    """Gradients of single examples, taken in one by one: their largest norm, and their mean squared distance from a centre."""

    def __init__(self, centre: Tensor) -> None:
        self.centre = centre
        self.count = 0
        self._squares = torch.zeros((), dtype=torch.float64, device=centre.device)
        self._longest = torch.zeros((), dtype=torch.float64, device=centre.device)

    def add(self, gradient: Tensor) -> None:
        """Take in the gradient of one example."""
        self.count += 1
        self._squares += torch.dist(gradient, self.centre).double() ** 2
        self._longest = torch.maximum(self._longest, gradient.norm().double())

    @property
    def noise(self) -> float:
        """(mean ||g_z - centre||^2)^(1/2): the client's sigma, where the centre is the gradient of its whole data."""
        return float((self._squares / max(self.count, 1)).sqrt())

    @property
    def longest(self) -> float:
        """The largest ||g_z||."""
        return float(self._longest)


def heterogeneity(rows: Tensor) -> float:
    """sigma_g = 1/m sum_i ||grad F_i - grad F||, with F the mean over clients, each counting the same (Assumption 5).

    >>> heterogeneity(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]))
    1.0
    """
    mean = rows.mean(0)
    return float(torch.stack([torch.dist(row, mean) for row in rows]).mean())
