"""Drift slot: how a client corrects its gradient, and how the server forms its target from the client updates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from fedflat.algorithms.slot import CohortMeans, Gradient, LocalContext, Slot, State

FullGradient = Literal["none", "own", "common"]


@dataclass(frozen=True)
class Drift(Slot):
    """No drift correction (FedAvg; McMahan et al. 2017).

        d_k = g
        target = z + mean_S D_i

    >>> from torch import tensor
    >>> from fedflat.testing import cohort_means
    >>> means = cohort_means(z=[1.0, 2.0], displacement=[0.1, -0.1])
    >>> Drift().aggregate(means, {})
    (tensor([1.1000, 1.9000]), {})
    """

    @property
    def full_gradient(self) -> FullGradient:
        """Full-batch gradient at z: ``own`` computes the client's, ``common`` the cohort's mean before training."""
        return "none"

    @property
    def full_gradient_batches(self) -> int:
        """Number of batches that form the full-batch gradient; 0 uses all of the client's data."""
        return 0

    @property
    def extra_passes(self) -> int:
        """Backward passes per local step in addition to the one at the iterate."""
        return 0

    def start(self, x: Tensor, server: State) -> Tensor:
        """The model z to broadcast, shape (P,)."""
        return x

    def begin(self, ctx: LocalContext) -> State:
        """Local state at the start of a client's round, e.g. a correction that stays constant within it."""
        return {}

    def direction(self, g: Tensor, ctx: LocalContext, gradient: Gradient) -> Tensor:
        """The direction d_k of a local step, shape (P,).

        Args:
            g: gradient at the perturbed point, shape (P,).
            ctx: the client's context; ``ctx.y`` is the unperturbed iterate.
            gradient: gradient of the current batch at any point, one backward pass per call.
        """
        return g

    def displacement(self, ctx: LocalContext) -> Tensor:
        """The vector that the client uploads and the server averages; by default D = y_K - z, shape (P,)."""
        return ctx.displacement

    def local_displacement(self, uploaded: Tensor, client: State) -> Tensor:
        """y_K - z recovered from the uploaded vector and the client's state before the round, shape (P,)."""
        return uploaded

    def finish(self, ctx: LocalContext) -> tuple[State, State]:
        """Changed client state, and messages sent in addition to the displacement, after the last local step."""
        return {}, {}

    def aggregate(self, means: CohortMeans, server: State) -> tuple[Tensor, State]:
        """The target model that the server optimiser moves towards, shape (P,), and changed server state."""
        return means.z + means.displacement, {}

    def evaluated(self, server: State) -> State:
        """Further models, by name, to evaluate along with the server model."""
        return {}
