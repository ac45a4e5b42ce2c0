"""FedSMOO's dynamically regularised perturbation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedflat.algorithms.perturbation.base import Perturbation
from fedflat.algorithms.slot import At, Fields, Gradient, Returned, State, unit, vector
from fedflat.text import param


@dataclass(frozen=True)
class Smoo(Perturbation):
    """A perturbation with a dual of its own: sh = rho unit(g(y_k) - mu_i - s), mu_i <- mu_i + sh - s (FedSMOO; Sun et al. 2023).

    The dual moves at every step and stays with the client. The server's s <- rho unit(mean_S(mu_i - sh_last)); with s_source=dual,
    rho unit(mean_S(mu_i)) as in FL-Simulator.
    """

    rho: float = param(0.1, "length of the offset", low=0)
    s_source: Literal["paper", "dual"] = param("paper", "what a client sends for s: mu_i - sh, or mu_i alone")

    @property
    def ascent_passes(self) -> int:
        return 1 if self.rho else 0

    def on_server(self) -> Fields:
        return (vector("s"),)

    def on_client(self) -> Fields:
        return (vector("mu"),)

    def sends(self) -> Fields:
        return (vector("s"),)

    def begin(self, at: At) -> State:
        return {"mu": at.client["mu"], "sh": torch.zeros_like(at.z)}

    def offset(self, at: At, gradient: Gradient) -> tuple[Tensor | None, State]:
        if self.rho == 0:
            return None, {}
        sh = self.rho * unit(gradient(at.y) - at.local["mu"] - at.server["s"])
        return sh, {"mu": at.local["mu"] + sh - at.server["s"], "sh": sh}

    def finish(self, at: At) -> tuple[State, State]:
        mu = at.local["mu"]
        return {"mu": mu}, {"s": mu - at.local["sh"] if self.s_source == "paper" else mu}

    def aggregate(self, back: Returned, server: State, x: Tensor) -> State:
        return {"s": self.rho * unit(back.mean["s"])}
