"""FedWMSAM: personalised momentum with an adaptive weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedflat.algorithms.slot import CohortMeans, Drift, Gradient, LocalContext
from fedflat.algorithms.state import Fields, State, scalar, vector
from fedflat.text import param

SIGNAL_RANGE = (0.1, 0.9)
"""Range to which the cohort's mean of sim_i is clipped."""


@dataclass(frozen=True)
class Wmsam(Drift):
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
    >>> float(wmsam.finish(ctx)[1]["signal"])  # D_i is opposite to Delta, so they agree
    0.0
    """

    alpha0: float = param(0.1, "initial weight alpha of the gradient against the momentum", low=0, high=1)
    lam: float = param(
        0.01,
        "adaptation rate of alpha; 0 keeps alpha fixed, as in the paper's ablation 'without Weighted'",
        low=0,
        high=1,
    )
    personal: bool = param(True, "whether to add c - c_i for each client; false is the paper's ablation 'without Mom'")
    alpha_signal: Literal["disagreement", "agreement"] = param(
        "disagreement",
        "sim_i: 1 + cos(D_i, Delta) as in the published code, or -cos(D_i, Delta) as printed (agreement)",
    )

    def on_server(self) -> Fields:
        momentum, alpha = vector("momentum", momentum="ascent"), scalar("alpha", start=self.alpha0)
        return (momentum, vector("c"), alpha) if self.personal else (momentum, alpha)

    def on_client(self) -> Fields:
        return (vector("c"),) if self.personal else ()

    def sends(self) -> Fields:
        return (vector("dc"), scalar("signal")) if self.personal else (scalar("signal"),)

    def begin(self, ctx: LocalContext) -> State:
        """Return the part of d_k that stays constant in the round, and the momentum that ``guided`` follows."""
        alpha, momentum = ctx.server["alpha"], ctx.server["momentum"]
        r = ctx.server["c"] - ctx.client["c"] if self.personal else torch.zeros_like(momentum)
        return {"constant": alpha * r + (1 - alpha) * momentum, "personal momentum": momentum + alpha / (1 - alpha) * r}

    def direction(self, g: Tensor, ctx: LocalContext, gradient: Gradient) -> Tensor:
        return ctx.server["alpha"] * g + ctx.local["constant"]

    def finish(self, ctx: LocalContext) -> tuple[State, State]:
        """Return c_i+ and the messages; sim_i is 0 if D_i or Delta is 0, because the cosine is undefined."""
        momentum = ctx.server["momentum"]
        norms = ctx.displacement.norm() * momentum.norm()
        cosine = (ctx.displacement @ momentum) / norms.clamp(min=torch.finfo(norms.dtype).tiny)
        signal = 1 + cosine if self.alpha_signal == "disagreement" else -cosine
        sent = {"signal": torch.where(norms > 0, signal, torch.zeros_like(signal))}
        if not self.personal:
            return {}, sent
        new_c = ctx.client["c"] - ctx.server["c"] + ctx.mean_direction
        return {"c": new_c}, sent | {"dc": new_c - ctx.client["c"]}

    def aggregate(self, means: CohortMeans, server: State) -> tuple[Tensor, State]:
        alpha = (1 - self.lam) * server["alpha"] + self.lam * means.mean["signal"].clamp(*SIGNAL_RANGE)
        state = {"momentum": means.direction, "alpha": alpha}
        if self.personal:
            state["c"] = server["c"] + means.share * means.mean["dc"]
        return means.z + means.displacement, state

    def sgd_conflict(self, optimiser: str) -> str | None:
        return f"{self.NEEDS_SGD}; use a drift correction without momentum, e.g. scaffold(option=I)+{optimiser}"

    def robust_aggregation_conflict(self) -> str | None:
        mean_of_variates = "the server's control variate must equal the mean of the clients' control variates"
        return mean_of_variates if self.personal else None
