"""MIMELite: the server's momentum on clients, with plain gradients."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedflat.algorithms.drift.frozen_momentum import FrozenMomentum
from fedflat.algorithms.slot import CohortMeans, FullGradient, Gradient, LocalContext
from fedflat.algorithms.state import Fields, State, vector


@dataclass(frozen=True)
class MimeLite(FrozenMomentum):
    """Local steps use the server's momentum and plain gradients (MIMELite; Karimireddy et al. 2021, Algorithm 1).

        d_k = g + beta m
        m <- G + beta m

    - d_k: direction of local step k
    - g: gradient of the loss on the step's batch
    - m: momentum of the server
    - G: mean of the cohort's full-batch gradients at the broadcast model, weighted by the clients' numbers of samples

    Each client uploads its full-batch gradient along with its displacement. With ``form=ema``, g and G are multiplied
    by 1 - beta. With beta = 0, MIMELite equals FedAvg.

    >>> from torch import tensor
    >>> from fedflat.testing import local_context
    >>> ctx = local_context(y=[1.0, 3.0], z=[1.0, 1.0], server={"m": [1.0, 1.0]})
    >>> MimeLite(beta=0.1).direction(tensor([2.0, 6.0]), ctx, None)
    tensor([2.1000, 6.1000])
    """

    @property
    def full_gradient(self) -> FullGradient:
        return "own" if self.beta else "none"

    def sends(self) -> Fields:
        return (vector("gradient", weighting="samples"),) if self.beta else ()

    def direction(self, g: Tensor, ctx: LocalContext, gradient: Gradient) -> Tensor:
        return self._with_momentum(g, ctx)

    def finish(self, ctx: LocalContext) -> tuple[State, State]:
        return {}, {} if ctx.own_gradient is None else {"gradient": ctx.own_gradient}

    def aggregate(self, means: CohortMeans, server: State) -> tuple[Tensor, State]:
        return self._target_and_momentum(means, server, means.mean.get("gradient"))
