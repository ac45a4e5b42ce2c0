"""FedACG's accelerated client gradients."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedflat.algorithms.drift.base import Drift
from fedflat.algorithms.slot import At, Fields, Gradient, Returned, State, vector
from fedflat.text import param


@dataclass(frozen=True)
class Acg(Drift):
    """Look-ahead: broadcast z = x + lam m; d_k = g + beta (y_k - z); m <- lam m + mean D_i; x <- x + m (FedACG; Kim et al. 2024)."""

    lam: float = param(0.85, "momentum of the server, and how far it looks ahead", low=0, high=1)
    beta: float = param(0.002, "pull back to the broadcast model (the released 1e-3 is on an un-halved square)", low=0)

    def on_server(self) -> Fields:
        return (vector("m", sent=False),)

    def start(self, x: Tensor, server: State) -> Tensor:
        return x + self.lam * server["m"]

    def direction(self, g: Tensor, at: At, gradient: Gradient) -> Tensor:
        return g + self.beta * at.moved

    def aggregate(self, back: Returned, server: State) -> tuple[Tensor, State]:
        return back.z + back.displacement, {"m": self.lam * server["m"] + back.displacement}
