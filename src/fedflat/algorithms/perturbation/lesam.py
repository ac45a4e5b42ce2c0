"""FedLESAM: locally estimated global perturbation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from fedflat.algorithms.drift import Gloss
from fedflat.algorithms.perturbation.released import scalar_shift
from fedflat.algorithms.slot import CohortMeans, Gradient, LocalContext, Perturbation, Slot, unit
from fedflat.algorithms.state import Fields, State, scalar, vector
from fedflat.text import param


@dataclass(frozen=True)
class Lesam(Perturbation):
    """SAM's perturbation is estimated from received models (FedLESAM; Fan et al. 2024).

        e = rho (w_old - z) / ||w_old - z||
        g = g(y_k + e)

    - e: perturbation, i.e. the offset from y_k to the point at which the gradient is evaluated
    - z: broadcast model
    - w_old: model that the client received when it last participated
    - y_k: the client's model after k local steps
    - g(y): gradient of the loss on the step's batch at the model y
    - g: gradient that the local step uses

    The perturbation needs no extra backward pass and stays constant within a round. A client that participates for the
    first time trains without it. With ``direction=global``, as in the published code, w_old is the server model of the
    previous round for all clients; the server then sends its last step in addition to z.

    >>> from fedflat.testing import local_context
    >>> ctx = local_context(y=[1.0, 1.0], z=[1.0, 1.0], client={"last": [4.0, 5.0], "seen": 1.0})
    >>> Lesam(rho=0.1).begin(ctx)["offset"]  # w_old - z = [3, 4]
    tensor([0.0600, 0.0800])
    """

    rho: float = param(0.1, "length of the perturbation", low=0, positional=True)
    direction: Literal["client", "global"] = param(
        "client",
        "direction of the perturbation: towards the model that the client received before (client), or against the "
        "server's last step (global)",
    )
    indexing: Literal["vector", "tensor"] = param(
        "vector", "one offset per parameter (vector), or per parameter tensor as in the published code (tensor) (D3)"
    )

    def on_server(self) -> Fields:
        return (vector("step"),) if self.direction == "global" else ()

    def on_client(self) -> Fields:
        return (vector("last"), scalar("seen")) if self.direction == "client" else ()

    def begin(self, ctx: LocalContext) -> State:
        if self.direction == "client":  # in a client's first round, ``seen`` is 0, and so is the offset
            towards_old = ctx.client["seen"] * (ctx.client["last"] - ctx.broadcast)
        else:
            towards_old = -ctx.server["step"]
        direction = unit(towards_old) if self.indexing == "vector" else scalar_shift(towards_old, ctx.layout)
        return {"offset": self.rho * direction}

    def offset(self, ctx: LocalContext, gradient: Gradient) -> tuple[Tensor | None, State]:
        return (ctx.local["offset"] if self.rho else None), {}

    def finish(self, ctx: LocalContext) -> tuple[State, State]:
        if self.direction == "global":
            return {}, {}
        return {"last": ctx.broadcast, "seen": ctx.lr_sum.new_ones(())}, {}  # the next time, this z is w_old

    def conflict(self, slots: Mapping[str, Slot]) -> str | None:
        if not isinstance(slots["drift"], Gloss):
            return None
        return "FedGloSS and LESAM both perturb along the last global update; use sam or asam instead of lesam"

    def aggregate(self, means: CohortMeans, server: State, x: Tensor) -> State:
        return {"step": x - means.x} if self.direction == "global" else {}
