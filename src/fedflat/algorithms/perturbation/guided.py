"""FedWMSAM's momentum-guided perturbation (C1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from fedflat.algorithms.perturbation.base import Perturbation
from fedflat.algorithms.perturbation.released import scalar_shift
from fedflat.algorithms.slot import At, Gradient, State, unit
from fedflat.text import param


@dataclass(frozen=True)
class Guided(Perturbation):
    """Uphill along the momentum, against where it leads: e_b = rho unit((z + b Delta_i) - y_b), with no extra pass (FedWMSAM; C1).

    Delta_i is the personalised momentum of the drift. The first step of a round is unperturbed.
    """

    rho: float = param(0.01, "length of the offset", low=0)
    perturb_sign: Literal[1, -1] = param(1, "1 as on the slide (ascent), -1 as in the released code (look-ahead)")
    indexing: Literal["vector", "tensor"] = param(
        "vector", "the whole vector, or one scalar per tensor as in the released code"
    )

    def offset(self, at: At, gradient: Gradient) -> tuple[Tensor | None, State]:
        if self.rho == 0:
            return None, {}
        ahead = at.z + at.step * at.drift["personal momentum"] - at.y
        shape = unit(ahead) if self.indexing == "vector" else scalar_shift(ahead, at.layout)
        return self.perturb_sign * self.rho * shape, {}
