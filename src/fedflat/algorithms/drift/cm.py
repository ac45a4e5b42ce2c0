"""FedCM's client-level momentum."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedflat.algorithms.drift.base import Drift
from fedflat.algorithms.slot import At, Fields, Gradient, Returned, State, vector
from fedflat.text import param


@dataclass(frozen=True)
class Cm(Drift):
    """Client-level momentum: d_k = alpha g + (1 - alpha) Delta, Delta <- mean_S (z - y_K) / H (FedCM; Xu et al. 2021)."""

    alpha: float = param(0.1, "weight of the gradient against the momentum", low=0, high=1)

    def on_server(self) -> Fields:
        return (vector("momentum"),)

    def begin(self, at: At) -> State:
        return {"momentum": (1 - self.alpha) * at.server["momentum"]}

    def direction(self, g: Tensor, at: At, gradient: Gradient) -> Tensor:
        return self.alpha * g + at.local["momentum"]

    def aggregate(self, back: Returned, server: State) -> tuple[Tensor, State]:
        return back.z + back.displacement, {"momentum": back.direction}
