"""Base class of drifts with FedDyn's dual variable."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedflat.algorithms.slot import CohortMeans, Drift, LocalContext
from fedflat.algorithms.state import Fields, State, vector


@dataclass(frozen=True)
class Dual(Drift):
    """A dual variable accumulates each client's displacements, and the target contains its mean over all clients.

        a_i <- a_i + D_i
        target = mean_S y_K + mean_all a_i

    A subclass declares the server's vector ``a``, which is mean_all a_i, and uses ``a`` of the client in its steps.
    """

    def on_client(self) -> Fields:
        return (vector("a"),)

    def finish(self, ctx: LocalContext) -> tuple[State, State]:
        return {"a": ctx.client["a"] + ctx.displacement}, {}

    def aggregate(self, means: CohortMeans, server: State) -> tuple[Tensor, State]:
        # Only the duals of the cohort S change, each by D_i, so the mean over all N clients changes by |S| / N times
        # the uniform mean of D_i.
        a = server["a"] + means.share * means.uniform
        return means.z + means.displacement + a, {"a": a}

    def robust_aggregation_conflict(self) -> str | None:
        return "the server's dual must equal the mean of the clients' duals"

    def asynchronous_conflict(self) -> str | None:
        return "the server's dual must equal the mean of the clients' duals, which staleness weights would change"
