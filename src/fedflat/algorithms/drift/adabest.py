"""AdaBest."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedflat.algorithms.slot import CohortMeans, Drift, Gradient, LocalContext
from fedflat.algorithms.state import Fields, State, scalar, vector
from fedflat.text import param


@dataclass(frozen=True)
class AdaBest(Drift):
    """An adaptive estimate of each client's bias is subtracted from its gradients (AdaBest; Varno et al. 2022).

        d_k = g - h_i
        h_i <- h_i / (t - last_i) + mu (z - y_K)
        a = mean_S y_K
        target = a + beta (a - a_previous)

    - d_k: direction of local step k
    - g: gradient of the loss on the step's batch
    - h_i: estimate of the bias of client i, initially 0
    - t: round, counted from 0
    - last_i: last round before t in which client i participated; -1 if there was none
    - z: broadcast model, from which clients start
    - y_K: the client's model after its K local steps
    - a: mean of y_K over the cohort S
    - a_previous: value of a in the previous round; in round 0, the initial model
    - target: model towards which the server moves

    >>> from fedflat.testing import cohort_means, local_context
    >>> ctx = local_context(y=[1.0, 3.0], z=[1.0, 1.0], client={"h": [0.4, 0.4], "last": 0.0}, round=1)
    >>> AdaBest(mu=0.1).finish(ctx)[0]["h"]  # 0.4 / 2 - 0.1 (y - z)
    tensor([0.2000, 0.0000])
    >>> means = cohort_means(z=[1.0, 1.0], displacement=[0.1, 0.2])
    >>> AdaBest(beta=0.5).aggregate(means, {"aggregate": means.z})[0]
    tensor([1.1500, 1.3000])
    """

    mu: float = param(0.02, "weight of the displacement in the bias estimate", low=0)
    beta: float = param(0.9, "factor by which the server extrapolates from the previous to the new mean", low=0, high=1)

    def on_server(self) -> Fields:
        return (vector("aggregate", start="model", sent=False),)

    def on_client(self) -> Fields:
        return (vector("h"), scalar("last"))

    def direction(self, g: Tensor, ctx: LocalContext, gradient: Gradient) -> Tensor:
        return g - ctx.client["h"]

    def finish(self, ctx: LocalContext) -> tuple[State, State]:
        t = ctx.round + 1  # state holds rounds counted from 1, because its initial value 0 means "never"
        h = ctx.client["h"] / (t - ctx.client["last"]) - self.mu * ctx.displacement
        return {"h": h, "last": t.to(h.dtype)}, {}

    def aggregate(self, means: CohortMeans, server: State) -> tuple[Tensor, State]:
        a = means.z + means.displacement
        return a + self.beta * (a - server["aggregate"]), {"aggregate": a}

    def asynchronous_conflict(self) -> str | None:
        return "AdaBest extrapolates between the means of whole cohorts, which an asynchronous server does not have"

    def divergence_hint(self) -> str | None:
        return f"AdaBest extrapolates by beta={self.beta} every round; lower beta or mu"

    def evaluated(self, server: State) -> State:
        return {"aggregate": server["aggregate"]}
