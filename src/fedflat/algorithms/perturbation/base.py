"""Perturbation: where a client takes its gradient."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedflat.algorithms.slot import At, Gradient, Returned, Slot, State

FAR = 10
"""A length of offsets that is beyond all that is known to work."""
FROM = "what is climbed: the gradient of the data, or the direction that the drift makes of it (FedProx's pull, control variates)"


@dataclass(frozen=True)
class Perturbation(Slot):
    """None: the gradient is taken at the iterate itself."""

    @property
    def ascent_passes(self) -> int:
        """Backward passes spent per step to find the offset."""
        return 0

    @property
    def climbs_the_direction(self) -> bool:
        """Whether the offset is found from whole directions, with what the drift adds to gradients, and not from those alone."""
        return False

    def may_explode(self) -> str:
        rho = getattr(self, "rho", 0)
        return f"rho={rho:g} takes gradients far from the model: lower it" if rho > FAR else ""

    def begin(self, at: At) -> State:
        """What is set up once in a client's round."""
        return {}

    def offset(self, at: At, gradient: Gradient) -> tuple[Tensor | None, State]:
        """e_k, the offset from y_k (None for none) by what ``gradient`` finds, and what changes in this slot's local state at this step."""
        return None, {}

    def blend(self, g: Tensor, at: At) -> Tensor:
        """The gradient handed on, from the one at the perturbed point."""
        return g

    def finish(self, at: At) -> tuple[State, State]:
        """What the client keeps, and what it sends."""
        return {}, {}

    def aggregate(self, back: Returned, server: State, x: Tensor) -> State:
        """The server's new vectors of this slot, after its model has become ``x``."""
        return {}
