"""FedLESAM's locally estimated global perturbation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from fedflat.algorithms.perturbation.base import Perturbation
from fedflat.algorithms.perturbation.released import scalar_shift
from fedflat.algorithms.slot import At, Fields, Gradient, Returned, State, scalar, unit, vector
from fedflat.text import param


@dataclass(frozen=True)
class Lesam(Perturbation):
    """One offset for a whole round and no extra pass: e = rho (w_old - z) / ||w_old - z|| (FedLESAM; Fan et al. 2024).

    w_old is the model that the client received when it last took part; there is no offset the first time. With direction=global
    it is the server's previous model for everyone, which must be sent, as in the released code.
    """

    rho: float = param(0.1, "length of the offset", low=0)
    direction: Literal["client", "global"] = param(
        "client", "back to the client's last received model, or against the last global step"
    )
    indexing: Literal["vector", "tensor"] = param(
        "vector", "the whole vector, or one scalar per tensor as in the released code"
    )

    def on_server(self) -> Fields:
        return (vector("step"),) if self.direction == "global" else ()

    def on_client(self) -> Fields:
        return (vector("last"), scalar("seen")) if self.direction == "client" else ()

    def begin(self, at: At) -> State:
        back = at.client["seen"] * (at.client["last"] - at.z) if self.direction == "client" else -at.server["step"]
        return {"offset": self.rho * (unit(back) if self.indexing == "vector" else scalar_shift(back, at.layout))}

    def offset(self, at: At, gradient: Gradient) -> tuple[Tensor | None, State]:
        return (None if self.rho == 0 else at.local["offset"]), {}

    def finish(self, at: At) -> tuple[State, State]:
        kept = {"last": at.z, "seen": at.rates.new_ones(())} if self.direction == "client" else {}
        return kept, {}

    def aggregate(self, back: Returned, server: State, x: Tensor) -> State:
        return {"step": x - back.x} if self.direction == "global" else {}
