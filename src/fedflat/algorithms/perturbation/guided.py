"""FedWMSAM: momentum-guided perturbation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from fedflat.algorithms.drift import Wmsam
from fedflat.algorithms.perturbation.released import scalar_shift
from fedflat.algorithms.slot import Gradient, LocalContext, Perturbation, Slot, unit
from fedflat.algorithms.state import State
from fedflat.text import param


@dataclass(frozen=True)
class Guided(Perturbation):
    """The perturbation points against the direction in which the client's momentum moves the model (FedWMSAM, 2025).

        e = rho unit((z + k Delta_i) - y_k)
        g = g(y_k + e)

    - e: perturbation, i.e. the offset from y_k to the point at which the gradient is evaluated
    - unit(v): v / ||v||
    - z: broadcast model, from which clients start
    - y_k: the client's model after k local steps
    - Delta_i: personalised momentum of client i, Delta + alpha / (1 - alpha) (c - c_i). The drift correction ``wmsam``
      defines the weight alpha, the server's momentum Delta, and the control variates c and c_i
    - g(y): gradient of the loss on the step's batch at the model y
    - g: gradient that the local step uses

    Unlike SAM, this needs no extra backward pass. The first local step has no perturbation, because y_0 = z.

    >>> from torch import tensor
    >>> from fedflat.testing import local_context
    >>> ctx = local_context(y=[1.0, 1.0], z=[1.0, 1.0], drift={"personal momentum": [1.5, 2.0]}, step=2)
    >>> Guided(rho=0.1).offset(ctx, None)[0]  # unit([3, 4])
    tensor([0.0600, 0.0800])
    """

    rho: float = param(0.01, "length of the perturbation", low=0, positional=True)
    perturb_sign: Literal[1, -1] = param(
        1, "sign of the perturbation: 1 is uphill, as in the paper; -1 is downhill, as in the published code"
    )
    indexing: Literal["vector", "tensor"] = param(
        "vector", "one offset per parameter (vector), or per parameter tensor as in the published code (tensor) (D3)"
    )

    def offset(self, ctx: LocalContext, gradient: Gradient) -> tuple[Tensor | None, State]:
        if self.rho == 0:
            return None, {}
        ahead = ctx.z + ctx.step * ctx.drift["personal momentum"] - ctx.y  # from y_k to z + k Delta_i
        direction = unit(ahead) if self.indexing == "vector" else scalar_shift(ahead, ctx.layout)
        return self.perturb_sign * self.rho * direction, {}

    def conflict(self, slots: Mapping[str, Slot]) -> str | None:
        drift = slots["drift"]
        if not isinstance(drift, Wmsam):
            return "the guided perturbation follows FedWMSAM's personalised momentum and requires the drift wmsam"
        if self.rho and drift.alpha0 == 1:
            return "alpha0=1 leaves no momentum for the guided perturbation to follow; use alpha0 < 1 or rho=0"
        return None
