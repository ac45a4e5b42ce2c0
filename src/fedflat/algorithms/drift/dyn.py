"""FedDyn: dynamic regularisation, also the dual of FedSpeed, FedSMOO and FedLESAM-D."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from fedflat.algorithms.drift.dual import Dual
from fedflat.algorithms.slot import CohortMeans, Gradient, LocalContext
from fedflat.algorithms.state import Fields, State, vector
from fedflat.text import param


@dataclass(frozen=True)
class Dyn(Dual):
    """A regulariser that changes every round aligns the clients' minima (FedDyn; Acar et al. 2021, eqs. 1-3).

        d_k = g + alpha (y_k - z + a_i)
        a_i <- a_i + D_i
        target = mean_S y_K + mean_all a_i

    - d_k: direction of local step k
    - g: gradient of the loss on the step's batch
    - a_i: dual variable of client i, i.e. the sum of its displacements over all rounds so far; the paper's dual
      variable is -alpha a_i
    - D_i: displacement y_K - y_0 of client i in the round, where K is its number of local steps
    - z: broadcast model, from which clients start
    - y_k: the client's model after k local steps
    - mean_S: mean over the round's cohort S
    - mean_all: mean over all clients
    - target: model towards which the server moves

    The FedSpeed paper averages only the duals of the cohort: target = mean_S (y_K + a_i). ``dual_scope=active`` selects
    this form.

    The mean of the cohort's models is evaluated along with the server model; with ``all_mean``, so is the mean of all
    clients' latest models.

    >>> from torch import tensor
    >>> from fedflat.testing import local_context
    >>> ctx = local_context(y=[1.0, 3.0], z=[1.0, 1.0], client={"a": [0.5, -0.5]})
    >>> Dyn(alpha=0.1).direction(tensor([0.1, 0.1]), ctx, None)
    tensor([0.1500, 0.2500])
    >>> Dyn(alpha=0.1).finish(ctx)[0]
    {'a': tensor([0.5000, 1.5000])}
    """

    alpha: float = param(
        0.01, "regularisation strength; called 1/lambda in FedSpeed and lamb in FedSMOO's code", above=0
    )
    dual_scope: Literal["all", "active"] = param(
        "all", "clients whose duals are averaged: all clients (all) or the cohort (active)"
    )
    all_mean: bool = param(
        False, "whether to also evaluate the mean of all clients' latest models; clients then keep one more vector"
    )

    def on_server(self) -> Fields:
        """Declare the mean ``a`` of all clients' duals, and the models to evaluate; clients need none of them."""
        fields = (vector("a", sent=False), vector("active", start="model", sent=False))
        return (*fields, vector("everyone", start="model", sent=False)) if self.all_mean else fields

    def on_client(self) -> Fields:
        return (*super().on_client(), vector("last", start="model")) if self.all_mean else super().on_client()

    def sends(self) -> Fields:
        return (vector("change"),) if self.all_mean else ()

    def direction(self, g: Tensor, ctx: LocalContext, gradient: Gradient) -> Tensor:
        return g + self.alpha * (ctx.y - ctx.z + ctx.client["a"])

    def displacement(self, ctx: LocalContext) -> Tensor:
        # With dual_scope=active, the server needs only the mean of D_i plus the new dual, which is a_i + D_i.
        return ctx.displacement if self.dual_scope == "all" else ctx.client["a"] + 2 * ctx.displacement

    def local_displacement(self, uploaded: Tensor, client: State) -> Tensor:
        return uploaded if self.dual_scope == "all" else (uploaded - client["a"]) / 2

    def finish(self, ctx: LocalContext) -> tuple[State, State]:
        """Return the client's new dual, and with ``all_mean`` its model (state) and the model's change (message)."""
        state, sent = super().finish(ctx)
        if not self.all_mean:
            return state, sent
        return state | {"last": ctx.y}, {"change": ctx.y - ctx.client["last"]}

    def aggregate(self, means: CohortMeans, server: State) -> tuple[Tensor, State]:
        """Return the target model, mean_S y_K + a, and the new server state.

        With ``dual_scope=active``, the uploaded vectors contain the duals already, so nothing is added.
        """
        active = means.z + means.displacement
        state = {"active": active}
        if self.all_mean:
            # Only the cohort's models change, so the mean over all clients changes by |S| / N times the mean change.
            state["everyone"] = server["everyone"] + means.share * means.mean["change"]
        if self.dual_scope == "active":
            return active, state
        target, dual = super().aggregate(means, server)
        return target, state | dual

    def evaluated(self, server: State) -> State:
        models = {} if self.dual_scope == "active" else {"active mean": server["active"]}
        return models | {"all mean": server["everyone"]} if self.all_mean else models

    def robust_aggregation_conflict(self) -> str | None:
        keeps_mean_over_all = self.dual_scope == "all" or self.all_mean
        return super().robust_aggregation_conflict() if keeps_mean_over_all else None

    def divergence_hint(self) -> str | None:
        return (
            "FedDyn's dual accumulates displacements without decay and may explode with heterogeneous clients; "
            "clip gradients (training.clip=10) or change alpha"
        )
