"""FedHBM: heavy-ball momentum from a client's own last model."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedflat.algorithms.drift.heavy_ball import Anchored
from fedflat.algorithms.slot import Gradient, LocalContext
from fedflat.algorithms.state import State


@dataclass(frozen=True)
class Hbm(Anchored):
    """A client's momentum is the distance to its model at the end of its last round (FedHBM; Zaccone et al. 2025).

        m_k = C (y_last - y_k)
        d_k = g + beta m_k / (eta K)

    - m_k: momentum of the client in local step k, which points uphill like a gradient; 0 when the client participates
      for the first time
    - y_k: the client's model after k local steps
    - y_last: the client's model at the end of its previous participation
    - C: share of the clients that participate in a round (``participation``)
    - d_k: direction of local step k
    - g: gradient of the loss on the step's batch
    - eta: learning rate of the round's first step
    - K: number of local steps in a round

    The momentum pushes the client's model away from y_last. It has the form of FedProx's proximal term, with the
    opposite sign.

    >>> from torch import tensor
    >>> from fedflat.testing import local_context
    >>> ctx = local_context(
    ...     y=[1.0, 3.0], z=[1.0, 1.0], client={"last": [1.4, 2.6], "seen": 1.0}, steps=2, lr=0.1
    ... )
    >>> Hbm(beta=0.5, participation=0.5).direction(tensor([0.1, 0.1]), ctx, None)  # m_k = [0.2, -0.2]
    tensor([ 0.6000, -0.4000])
    """

    def direction(self, g: Tensor, ctx: LocalContext, gradient: Gradient) -> Tensor:
        return g + self._momentum(ctx.y, ctx)

    def finish(self, ctx: LocalContext) -> tuple[State, State]:
        return {"last": ctx.y, "seen": ctx.lr_sum.new_ones(())}, {}
