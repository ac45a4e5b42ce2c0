"""ASAM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedflat.algorithms.perturbation.base import FROM, Perturbation
from fedflat.algorithms.slot import At, Gradient, State, unit
from fedflat.text import param


@dataclass(frozen=True)
class Asam(Perturbation):
    """Adaptive SAM: e = rho T q / ||q||, q = T g(y_k), T = |w| + eta on weights and 1 elsewhere (FedASAM; Caldarola et al. 2022, eq. 5)."""

    rho: float = param(0.5, "radius of the ascent step, in the norm scaled by T", low=0)
    eta: float = param(0.2, "added to |w|, so that small weights are perturbed too", low=0)
    scope: Literal["weight", "all"] = param(
        "weight", "which tensors are scaled: those named weight, or all (the other common variant)"
    )
    perturb_from: Literal["data", "total"] = param("data", FROM)

    @property
    def ascent_passes(self) -> int:
        return 1 if self.rho else 0

    @property
    def climbs_the_direction(self) -> bool:
        return self.perturb_from == "total"

    def begin(self, at: At) -> State:
        return {"scaled": at.layout.indicator(lambda name: self.scope == "all" or "weight" in name, at.z)}

    def offset(self, at: At, gradient: Gradient) -> tuple[Tensor | None, State]:
        if self.rho == 0:
            return None, {}
        scale = torch.where(at.local["scaled"], at.y.abs() + self.eta, 1.0)
        return self.rho * scale * unit(scale * gradient(at.y)), {}
