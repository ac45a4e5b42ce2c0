"""Base class of FedDyn, which keeps means of clients' models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from fedflat.algorithms.drift.dual import Dual
from fedflat.algorithms.slot import CohortMeans, LocalContext
from fedflat.algorithms.state import Fields, State, vector
from fedflat.text import param


@dataclass(frozen=True)
class ModelMeans(Dual):
    """FedDyn's dual variable and parameters, and the means of clients' models without the dual, which are evaluated.

    - active mean: mean of the cohort's models; with ``dual_scope=active``, it is the target itself
    - all mean: mean of all clients' latest models; only with ``all_mean``
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
