"""FedDC: FedDyn's drift variable with SCAFFOLD's control variates."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedflat.algorithms.drift.dyn import Dyn
from fedflat.algorithms.slot import CohortMeans, Gradient, LocalContext
from fedflat.algorithms.state import Fields, State, vector


@dataclass(frozen=True)
class Dc(Dyn):
    """FedDyn's dual variable and SCAFFOLD's control variates correct each local step (FedDC; Gao et al. 2022).

        d_k = g + alpha (y_k - z + a_i) - s_i + s
        a_i <- a_i + D_i
        s_i+ = s_i - s + (z - y_K) / H
        s <- s + (|S| / N) mean_S (s_i+ - s_i)
        target = mean_S y_K + mean_all a_i

    - d_k: direction of local step k
    - g: gradient of the loss on the step's batch
    - a_i: drift variable of client i, i.e. the sum of its displacements over all rounds so far
    - D_i: displacement y_K - y_0 of client i in the round, where K is its number of local steps
    - s_i: control variate of client i; s_i+ is its value after the round
    - s: control variate of the server
    - z: broadcast model, from which clients start
    - y_k: the client's model after k local steps
    - H: sum of the learning rates of the client's K local steps
    - mean_S: mean over the round's cohort S
    - mean_all: mean over all clients
    - |S|, N: number of clients in the cohort S, and of all clients
    - target: model towards which the server moves

    >>> from torch import tensor
    >>> from fedflat.testing import local_context
    >>> server, client = {"s": [1.0, 1.0]}, {"a": [0.5, -0.5], "s": [0.5, 2.0]}
    >>> ctx = local_context(y=[0.75, 1.25], z=[1.0, 1.0], server=server, client=client, lr_sum=0.25)
    >>> dc = Dc(alpha=0.2)
    >>> dc.direction(tensor([0.1, 0.1]), ctx._replace(local=dc.begin(ctx)), None)
    tensor([ 0.6500, -0.9500])
    >>> dc.finish(ctx)  # s_i+ = s_i - s + [1, -1]
    ({'a': tensor([ 0.2500, -0.2500]), 's': tensor([0.5000, 0.0000])}, {'ds': tensor([ 0., -2.])})
    """

    def on_server(self) -> Fields:
        return (*super().on_server(), vector("s"))

    def on_client(self) -> Fields:
        return (*super().on_client(), vector("s"))

    def sends(self) -> Fields:
        return (*super().sends(), vector("ds"))

    def begin(self, ctx: LocalContext) -> State:
        """Return the part of every direction that stays constant during the round, alpha a_i - s_i + s."""
        return {"correction": self.alpha * ctx.client["a"] - ctx.client["s"] + ctx.server["s"]}

    def direction(self, g: Tensor, ctx: LocalContext, gradient: Gradient) -> Tensor:
        return g + self.alpha * (ctx.y - ctx.z) + ctx.local["correction"]

    def finish(self, ctx: LocalContext) -> tuple[State, State]:
        state, sent = super().finish(ctx)
        new_s = ctx.client["s"] - ctx.server["s"] + ctx.mean_direction
        return state | {"s": new_s}, sent | {"ds": new_s - ctx.client["s"]}

    def aggregate(self, means: CohortMeans, server: State) -> tuple[Tensor, State]:
        target, state = super().aggregate(means, server)
        return target, state | {"s": server["s"] + means.share * means.mean["ds"]}

    def sgd_conflict(self, optimiser: str) -> str | None:
        return f"{self.NEEDS_SGD}; use a drift correction without control variates, e.g. feddyn+{optimiser}"

    def robust_aggregation_conflict(self) -> str | None:
        return "the server's dual and control variate must equal the means of the clients' duals and control variates"
