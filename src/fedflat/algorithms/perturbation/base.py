"""Perturbation slot: the offset from the iterate at which a client evaluates its gradient."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedflat.algorithms.slot import CohortMeans, Gradient, LocalContext, Slot, State

LARGE_RHO = 10
"""A perturbation radius beyond every published value."""
PERTURB_FROM = "ascend the data gradient, or the direction that the drift correction makes of it"


@dataclass(frozen=True)
class Perturbation(Slot):
    """No perturbation: the gradient is evaluated at the iterate.

    e = 0
    """

    @property
    def ascent_passes(self) -> int:
        """Backward passes per local step needed to compute the offset."""
        return 0

    @property
    def uses_drift(self) -> bool:
        """Whether the offset is computed from drift-corrected directions instead of data gradients."""
        return False

    def divergence_hint(self) -> str | None:
        rho = getattr(self, "rho", 0)
        return f"rho={rho:g} evaluates gradients far from the model; lower it" if rho > LARGE_RHO else None

    def begin(self, ctx: LocalContext) -> State:
        """Local state at the start of a client's round."""
        return {}

    def offset(self, ctx: LocalContext, gradient: Gradient) -> tuple[Tensor | None, State]:
        """The offset of a local step.

        Args:
            ctx: the client's context.
            gradient: gradient of the current batch at any point, one backward pass per call.

        Returns:
            The offset e_k of shape (P,), None for no offset, and changed local state.
        """
        return None, {}

    def blend(self, g: Tensor, ctx: LocalContext) -> Tensor:
        """The gradient passed to the drift correction, from the one at the perturbed point, shape (P,)."""
        return g

    def finish(self, ctx: LocalContext) -> tuple[State, State]:
        """Changed client state, and messages, after the last local step."""
        return {}, {}

    def aggregate(self, means: CohortMeans, server: State, x: Tensor) -> State:
        """Changed server state of this slot; ``x`` is the new server model, shape (P,)."""
        return {}
