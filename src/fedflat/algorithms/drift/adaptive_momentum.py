"""Base class of FedWMSAM: the server's momentum, and its weight in local steps, which adapts to the clients."""

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
class AdaptiveMomentum(Drift):
    """FedWMSAM's parameters, and local steps that mix gradients and the server's momentum with an adaptive weight.

        d_k = alpha g + constant
        sim_i = 1 + cos(D_i, Delta)
        alpha <- (1 - lam) alpha + lam clip(mean_S sim_i, 0.1, 0.9)
        Delta <- -mean_S D_i / H

    A subclass returns ``constant``, which contains the server's momentum Delta, in ``begin``.

    >>> from fedflat.testing import local_context
    >>> ctx = local_context(y=[0.9, 1.1], z=[1.0, 1.0], server={"momentum": [1.0, -1.0]})
    >>> float(AdaptiveMomentum().finish(ctx)[1]["signal"])  # D_i is opposite to Delta, so they agree
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
        return (vector("momentum", momentum="ascent"), scalar("alpha", start=self.alpha0))

    def sends(self) -> Fields:
        return (scalar("signal"),)

    def direction(self, g: Tensor, ctx: LocalContext, gradient: Gradient) -> Tensor:
        return ctx.server["alpha"] * g + ctx.local["constant"]

    def finish(self, ctx: LocalContext) -> tuple[State, State]:
        """Send sim_i, which depends on a cosine; it is 0 if D_i or Delta is 0, because the cosine is undefined."""
        momentum = ctx.server["momentum"]
        norms = ctx.displacement.norm() * momentum.norm()
        cosine = (ctx.displacement @ momentum) / norms.clamp(min=torch.finfo(norms.dtype).tiny)
        signal = 1 + cosine if self.alpha_signal == "disagreement" else -cosine
        return {}, {"signal": torch.where(norms > 0, signal, torch.zeros_like(signal))}

    def aggregate(self, means: CohortMeans, server: State) -> tuple[Tensor, State]:
        alpha = (1 - self.lam) * server["alpha"] + self.lam * means.mean["signal"].clamp(*SIGNAL_RANGE)
        return means.z + means.displacement, {"momentum": means.direction, "alpha": alpha}

    def sgd_conflict(self, optimiser: str) -> str | None:
        return f"{self.NEEDS_SGD}; use a drift correction without momentum, e.g. scaffold(option=I)+{optimiser}"
