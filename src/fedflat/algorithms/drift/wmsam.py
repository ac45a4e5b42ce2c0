"""FedWMSAM: personalised momentum with an adaptive weight."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedflat.algorithms.drift.adaptive_momentum import AdaptiveMomentum
from fedflat.algorithms.slot import CohortMeans, LocalContext
from fedflat.algorithms.state import Fields, State, vector


@dataclass(frozen=True)
class Wmsam(AdaptiveMomentum):
    """Local steps mix corrected gradients and the server's momentum, with an adaptive weight (FedWMSAM, NeurIPS 2025).

        d_k = alpha (g + c - c_i) + (1 - alpha) Delta
        c_i+ = c_i - c - D_i / H
        sim_i = 1 + cos(D_i, Delta)
        alpha <- (1 - lam) alpha + lam clip(mean_S sim_i, 0.1, 0.9)
        c <- c + (|S| / N) mean_S (c_i+ - c_i)
        Delta <- -mean_S D_i / H

    - d_k: direction of local step k
    - g: gradient of the loss on the step's batch
    - alpha: weight of the gradient, which follows the cohort's mean of sim_i at the rate lam
    - Delta: momentum of the server, which points uphill like a gradient
    - c_i: control variate of client i, as in SCAFFOLD; c_i+ is its value after the round
    - c: control variate of the server
    - D_i: displacement of client i in the round: its model after K local steps minus the broadcast model
    - H: sum of the learning rates of the client's K local steps
    - sim_i: disagreement between D_i and Delta
    - mean_S: mean over the round's cohort S
    - |S|, N: number of clients in the cohort S, and of all clients

    The authors call sim_i a similarity, but it grows with disagreement: Delta points uphill and D_i downhill, so a
    client that fully agrees has cosine -1 and sim_i = 0.

    >>> from torch import tensor
    >>> from fedflat.testing import local_context
    >>> wmsam, server = Wmsam(), {"momentum": [1.0, -1.0], "c": [1.0, 1.0], "alpha": 0.5}
    >>> ctx = local_context(y=[0.9, 1.1], z=[1.0, 1.0], server=server, client={"c": [0.0, 2.0]}, lr_sum=0.1)
    >>> wmsam.direction(tensor([2.0, 2.0]), ctx._replace(local=wmsam.begin(ctx)), None)  # (g + [1, -1]) / 2 + Delta / 2
    tensor([2., 0.])
    """

    def on_server(self) -> Fields:
        momentum, alpha = super().on_server()
        return (momentum, vector("c"), alpha) if self.personal else (momentum, alpha)

    def on_client(self) -> Fields:
        return (vector("c"),) if self.personal else ()

    def sends(self) -> Fields:
        return (vector("dc"), *super().sends()) if self.personal else super().sends()

    def begin(self, ctx: LocalContext) -> State:
        """Return the part of d_k that stays constant in the round, and the momentum that ``guided`` follows."""
        alpha, momentum = ctx.server["alpha"], ctx.server["momentum"]
        r = ctx.server["c"] - ctx.client["c"] if self.personal else torch.zeros_like(momentum)
        return {"constant": alpha * r + (1 - alpha) * momentum, "personal momentum": momentum + alpha / (1 - alpha) * r}

    def finish(self, ctx: LocalContext) -> tuple[State, State]:
        state, sent = super().finish(ctx)
        if self.personal:
            state["c"] = ctx.client["c"] - ctx.server["c"] + ctx.mean_direction
            sent["dc"] = state["c"] - ctx.client["c"]
        return state, sent

    def aggregate(self, means: CohortMeans, server: State) -> tuple[Tensor, State]:
        target, state = super().aggregate(means, server)
        return target, state | ({"c": server["c"] + means.share * means.mean["dc"]} if self.personal else {})

    def robust_aggregation_conflict(self) -> str | None:
        """Return why robust aggregation must not replace the mean, or None without control variates (``personal``)."""
        mean_of_variates = "the server's control variate must equal the mean of the clients' control variates"
        return mean_of_variates if self.personal else None
