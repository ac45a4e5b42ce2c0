"""SAM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedflat.algorithms.perturbation.base import FROM, Perturbation
from fedflat.algorithms.slot import At, Gradient, State, unit
from fedflat.text import param


@dataclass(frozen=True)
class Sam(Perturbation):
    """Sharpness-aware: e = rho g(y_k) / ||g(y_k)||, then g(y_k + e) (FedSAM; Caldarola et al. 2022, eqs. 3-4).

    FedSpeed hands on the blend (1 - share) g(y_k) + share g(y_k + e).
    """

    rho: float = param(0.05, "radius of the ascent step", low=0)
    share: float = param(1.0, "share of the perturbed gradient in the blend (FedSpeed's alpha)", low=0, high=1)
    normalise: bool = param(True, "whether the ascent step has length rho, or is rho g")
    perturb_from: Literal["data", "total"] = param("data", FROM)

    @property
    def ascent_passes(self) -> int:
        return 1 if self.rho else 0

    @property
    def climbs_the_direction(self) -> bool:
        return self.perturb_from == "total"

    def begin(self, at: At) -> State:
        return {} if self.share == 1 else {"ascent": torch.zeros_like(at.z)}

    def offset(self, at: At, gradient: Gradient) -> tuple[Tensor | None, State]:
        if self.rho == 0:
            return None, {}
        g = gradient(at.y)
        return self.rho * (unit(g) if self.normalise else g), {} if self.share == 1 else {"ascent": g}

    def blend(self, g: Tensor, at: At) -> Tensor:
        return g if self.share == 1 or self.rho == 0 else (1 - self.share) * at.local["ascent"] + self.share * g
