"""LocalGHBM: heavy-ball momentum from the models that a client received."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedflat.algorithms.drift.heavy_ball import Anchored
from fedflat.algorithms.slot import Gradient, LocalContext
from fedflat.algorithms.state import State


@dataclass(frozen=True)
class LocalGhbm(Anchored):
    """Each client estimates GHBM's momentum from the models it received (LocalGHBM; Zaccone et al. 2025).

        m_i = C (z_last - z)
        d_k = g + beta m_i / (eta K)

    - m_i: momentum of client i, which points uphill like a gradient; 0 when the client participates for the first time
    - z: broadcast model
    - z_last: model that the client received when it last participated
    - C: share of the clients that participate in a round (``participation``)
    - d_k: direction of local step k
    - g: gradient of the loss on the step's batch
    - eta: learning rate of the round's first step
    - K: number of local steps in a round

    >>> from torch import tensor
    >>> from fedflat.testing import local_context
    >>> ghbm, client = LocalGhbm(beta=0.5, participation=0.5), {"last": [1.4, 0.6], "seen": 1.0}
    >>> ctx = local_context(y=[1.0, 3.0], z=[1.0, 1.0], client=client, steps=2, lr=0.1)
    >>> ghbm.direction(tensor([0.1, 0.1]), ctx._replace(local=ghbm.begin(ctx)), None)  # m_i = [0.2, -0.2]
    tensor([ 0.6000, -0.4000])
    """

    def begin(self, ctx: LocalContext) -> State:
        return {"momentum": self._momentum(ctx.broadcast, ctx)}

    def direction(self, g: Tensor, ctx: LocalContext, gradient: Gradient) -> Tensor:
        return g + ctx.local["momentum"]

    def finish(self, ctx: LocalContext) -> tuple[State, State]:
        return {"last": ctx.broadcast, "seen": ctx.lr_sum.new_ones(())}, {}
