"""MIME: the server's momentum on clients, with reduced-variance gradients."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedflat.algorithms.drift.frozen_momentum import FrozenMomentum
from fedflat.algorithms.slot import CohortMeans, FullGradient, Gradient, LocalContext
from fedflat.algorithms.state import State


@dataclass(frozen=True)
class Mime(FrozenMomentum):
    """Local steps use the server's momentum and reduced-variance gradients (MIME; Karimireddy et al. 2021, Alg. 1).

        r_k = g(y_k) - g(z) + G
        d_k = r_k + beta m
        m <- G + beta m

    - r_k: gradient of local step k with reduced variance
    - g(y): gradient of the loss on the step's batch at the model y
    - y_k: the client's model after k local steps
    - z: broadcast model, from which clients start
    - G: mean of the cohort's full-batch gradients at z, weighted by the clients' numbers of samples; computed before
      local training
    - d_k: direction of local step k
    - m: momentum of the server

    With ``form=ema``, r_k and G are multiplied by 1 - beta.

    >>> from torch import tensor
    >>> from fedflat.testing import local_context
    >>> ctx = local_context(y=[1.0, 3.0], z=[1.0, 1.0], server={"m": [1.0, 1.0]}, common_gradient=[0.5, 0.5])
    >>> gradient = lambda point: 2 * point
    >>> Mime(beta=0.1).direction(gradient(ctx.y), ctx, gradient)  # [2, 6] - [2, 2] + 0.5 + 0.1
    tensor([0.6000, 4.6000])
    """

    @property
    def full_gradient(self) -> FullGradient:
        return "common"

    @property
    def extra_passes(self) -> int:
        return 1

    def robust_aggregation_conflict(self) -> str | None:
        return "every client trains with the mean of the cohort's gradients"

    def privacy_conflict(self, equal_steps: bool) -> str | None:
        return "clients also send the gradient of their data, before they train"

    def asynchronous_conflict(self) -> str | None:
        return "every client trains with the mean of the cohort's gradients, for which the cohort must start together"

    def direction(self, g: Tensor, ctx: LocalContext, gradient: Gradient) -> Tensor:
        """Return the direction g(y_k) - g(z) + G + beta m, where ``g`` is g(y_k) and ``gradient`` computes g(z).

        If y_k is perturbed, z is perturbed by the same offset.
        """
        assert ctx.common_gradient is not None
        return self._with_momentum(g - gradient(ctx.perturbed(ctx.z)) + ctx.common_gradient, ctx)

    def aggregate(self, means: CohortMeans, server: State) -> tuple[Tensor, State]:
        return self._target_and_momentum(means, server, means.common_gradient)
