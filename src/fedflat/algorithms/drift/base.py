"""Drift: what corrects a client's direction, and what the server makes of what comes back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from fedflat.algorithms.slot import At, Gradient, Returned, Slot, State

WholeGradient = Literal["none", "own", "common"]


@dataclass(frozen=True)
class Drift(Slot):
    """No correction: d_k = g(y_k), and the server moves to z + mean D_i (FedAvg)."""

    @property
    def whole_gradient(self) -> WholeGradient:
        """Whether a client needs the gradient of its whole data at z: its own at the end, or the cohort's mean before it starts."""
        return "none"

    @property
    def whole_gradient_batches(self) -> int:
        """How many batches make up the whole gradient; 0 is all of the client's data."""
        return 0

    @property
    def extra_passes(self) -> int:
        """Backward passes per step beside the one at the iterate."""
        return 0

    def start(self, x: Tensor, server: State) -> Tensor:
        """z, the model to broadcast."""
        return x

    def begin(self, at: At) -> State:
        """What stays the same within a client's round, computed once."""
        return {}

    def direction(self, g: Tensor, at: At, gradient: Gradient) -> Tensor:
        """d_k, from the (perturbed) gradient and the unperturbed iterate."""
        return g

    def displacement(self, at: At) -> Tensor:
        """What is uploaded and averaged: D = y_K - z."""
        return at.moved

    def moved(self, displacement: Tensor, client: State) -> Tensor:
        """y_K - z, from what a client uploaded and what it kept before the round: for whoever looks at local models."""
        return displacement

    def finish(self, at: At) -> tuple[State, State]:
        """What the client keeps, and what it sends beside its displacement."""
        return {}, {}

    def aggregate(self, back: Returned, server: State) -> tuple[Tensor, State]:
        """The model to move towards, and the server's new vectors."""
        return back.z + back.displacement, {}

    def evaluated(self, server: State) -> State:
        """Further models of the method that deserve evaluation beside x."""
        return {}
