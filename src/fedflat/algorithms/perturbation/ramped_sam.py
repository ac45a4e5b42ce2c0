"""FedGloSS: SAM with a radius that rises in the first rounds."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedflat.algorithms.drift.ramp import RAMP, START_RHO, ramped
from fedflat.algorithms.perturbation.sam import Sam
from fedflat.algorithms.slot import Gradient, LocalContext
from fedflat.algorithms.state import State
from fedflat.text import param


@dataclass(frozen=True)
class RampedSam(Sam):
    """The radius of SAM rises linearly over the first rounds (FedGloSS; Caldarola et al. 2025).

        rho_t = start_rho + (rho - start_rho) min(t, ramp) / ramp
        e = rho_t g(y_k) / ||g(y_k)||
        g = g(y_k + e)

    - rho_t: radius in round t, counted from 0
    - y_k: the client's model after k local steps
    - g(y): gradient of the loss on the step's batch at the model y
    - e: perturbation, i.e. the offset from y_k to the point at which the gradient is evaluated
    - g: gradient that the local step uses

    With ``ramp=0``, the radius is rho in all rounds, as in SAM. With rho = 0, there is no perturbation.

    >>> from fedflat.testing import local_context
    >>> ctx = local_context(y=[1.5, 2.0], z=[0.0, 0.0], round=1)
    >>> sam = RampedSam(rho=0.2, ramp=2, start_rho=0.0)
    >>> sam.offset(ctx, gradient=lambda point: 2 * point)[0]  # g = [3, 4], norm 5
    tensor([0.0600, 0.0800])
    """

    ramp: int = param(0, RAMP, low=0)
    start_rho: float = param(0.001, START_RHO, low=0)

    def offset(self, ctx: LocalContext, gradient: Gradient) -> tuple[Tensor | None, State]:
        offset, changed_state = super().offset(ctx, gradient)
        if offset is None or not self.ramp:
            return offset, changed_state
        return ramped(self.rho, self.start_rho, self.ramp, ctx.round) / self.rho * offset, changed_state
