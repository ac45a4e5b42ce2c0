"""FedDyn: dynamic regularisation, also the dual of FedSpeed, FedSMOO and FedLESAM-D."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedflat.algorithms.drift.model_means import ModelMeans
from fedflat.algorithms.slot import Gradient, LocalContext
from fedflat.algorithms.state import State


@dataclass(frozen=True)
class Dyn(ModelMeans):
    """A regulariser that changes every round aligns the clients' minima (FedDyn; Acar et al. 2021, eqs. 1-3).

        d_k = g + alpha (y_k - z + a_i)
        a_i <- a_i + D_i
        target = mean_S y_K + mean_all a_i

    - d_k: direction of local step k
    - g: gradient of the loss on the step's batch
    - a_i: dual variable of client i, i.e. the sum of its displacements over all rounds so far; the paper's dual
      variable is -alpha a_i
    - D_i: displacement y_K - z of client i in the round, where K is its number of local steps
    - z: broadcast model, from which clients start
    - y_k: the client's model after k local steps
    - mean_S: mean over the round's cohort S
    - mean_all: mean over all clients
    - target: model towards which the server moves

    The FedSpeed paper averages only the duals of the cohort: target = mean_S (y_K + a_i). ``dual_scope=active`` selects
    this form.

    >>> from torch import tensor
    >>> from fedflat.testing import local_context
    >>> ctx = local_context(y=[1.0, 3.0], z=[1.0, 1.0], client={"a": [0.5, -0.5]})
    >>> Dyn(alpha=0.1).direction(tensor([0.1, 0.1]), ctx, None)
    tensor([0.1500, 0.2500])
    >>> Dyn(alpha=0.1).finish(ctx)[0]
    {'a': tensor([0.5000, 1.5000])}
    """

    def direction(self, g: Tensor, ctx: LocalContext, gradient: Gradient) -> Tensor:
        return g + self.alpha * (ctx.y - ctx.z + ctx.client["a"])

    def displacement(self, ctx: LocalContext) -> Tensor:
        # With dual_scope=active, the server needs only the mean of D_i plus the new dual, which is a_i + D_i.
        return ctx.displacement if self.dual_scope == "all" else ctx.client["a"] + 2 * ctx.displacement

    def local_displacement(self, uploaded: Tensor, client: State) -> Tensor:
        return uploaded if self.dual_scope == "all" else (uploaded - client["a"]) / 2

    def robust_aggregation_conflict(self) -> str | None:
        keeps_mean_over_all = self.dual_scope == "all" or self.all_mean
        return super().robust_aggregation_conflict() if keeps_mean_over_all else None

    def divergence_hint(self) -> str | None:
        return (
            "FedDyn's dual accumulates displacements without decay and may explode with heterogeneous clients; "
            "clip gradients (training.clip=10) or change alpha"
        )
