"""FedProx."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedflat.algorithms.drift.base import Drift
from fedflat.algorithms.slot import At, Gradient
from fedflat.text import param


@dataclass(frozen=True)
class Prox(Drift):
    """A pull back to the received model: d_k = g + mu (y_k - z) (FedProx; Li et al. 2020, eq. 2)."""

    mu: float = param(0.1, "strength of the pull back to the received model", low=0)

    def direction(self, g: Tensor, at: At, gradient: Gradient) -> Tensor:
        return g + self.mu * at.moved
