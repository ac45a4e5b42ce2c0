"""FedWMSAM's personalised momentum with a weight that adapts itself (C2 and C3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedflat.algorithms.drift.base import Drift
from fedflat.algorithms.slot import At, Fields, Gradient, Returned, State, scalar, vector
from fedflat.text import param

CLIP = (0.1, 0.9)
"""The range to which the signal is clipped (C3)."""


@dataclass(frozen=True)
class Wmsam(Drift):
    """Personalised momentum: d_k = alpha (g + r_i) + (1 - alpha) Delta with r_i = c - c_i (FedWMSAM; C2, C3).

    At the end c_i+ = c_i - c + (z - y_K) / H. The server: alpha <- (1 - lam) alpha + lam clip(mean sim_i, 0.1, 0.9) with
    sim_i = 1 + cos(D_i, Delta), c <- c + (|S|/N) mean(c_i+ - c_i), Delta <- mean_S (z - y_K) / H.
    """

    alpha0: float = param(0.1, "weight of the gradient against the momentum in the first round", low=0, high=1)
    lam: float = param(0.01, "how fast that weight adapts; 0 keeps it (ablation: Weighted off)", low=0, high=1)
    personal: bool = param(True, "whether the momentum is corrected per client (ablation: Mom)")
    alpha_signal: Literal["disagreement", "agreement"] = param(
        "disagreement", "1 + cos(D_i, Delta) as in the code, or -cos as printed"
    )

    def on_server(self) -> Fields:
        return (
            (vector("momentum"), vector("c"), scalar("alpha", start=self.alpha0))
            if self.personal
            else self._impersonal()
        )

    def _impersonal(self) -> Fields:
        return (vector("momentum"), scalar("alpha", start=self.alpha0))

    def on_client(self) -> Fields:
        return (vector("c"),) if self.personal else ()

    def sends(self) -> Fields:
        return (vector("dc"), scalar("signal")) if self.personal else (scalar("signal"),)

    def begin(self, at: At) -> State:
        alpha, momentum = at.server["alpha"], at.server["momentum"]
        r = at.server["c"] - at.client["c"] if self.personal else torch.zeros_like(momentum)
        return {"constant": alpha * r + (1 - alpha) * momentum, "personal momentum": momentum + alpha / (1 - alpha) * r}

    def direction(self, g: Tensor, at: At, gradient: Gradient) -> Tensor:
        return at.server["alpha"] * g + at.local["constant"]

    def finish(self, at: At) -> tuple[State, State]:
        signal = self._signal(at.moved, at.server["momentum"])
        if not self.personal:
            return {}, {"signal": signal}
        c = at.client["c"] - at.server["c"] + at.mean_direction
        return {"c": c}, {"dc": c - at.client["c"], "signal": signal}

    def aggregate(self, back: Returned, server: State) -> tuple[Tensor, State]:
        alpha = (1 - self.lam) * server["alpha"] + self.lam * back.mean["signal"].clamp(*CLIP)
        kept = {"momentum": back.direction, "alpha": alpha}
        if self.personal:
            kept["c"] = server["c"] + back.share * back.mean["dc"]
        return back.z + back.displacement, kept

    def needs_the_mean(self) -> str:
        return "the server's control variate is the mean of those that clients keep" if self.personal else ""

    def _signal(self, moved: Tensor, momentum: Tensor) -> Tensor:
        norms = moved.norm() * momentum.norm()
        cosine = (moved @ momentum) / norms.clamp(min=torch.finfo(norms.dtype).tiny)
        signal = 1 + cosine if self.alpha_signal == "disagreement" else -cosine
        return torch.where(norms > 0, signal, torch.zeros_like(signal))
