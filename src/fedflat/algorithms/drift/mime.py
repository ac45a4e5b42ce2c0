"""MIME and MIMELite: clients apply the server's optimiser with its state frozen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from fedflat.algorithms.slot import CohortMeans, Drift, FullGradient, Gradient, LocalContext
from fedflat.algorithms.state import Fields, State, vector
from fedflat.text import param


@dataclass(frozen=True)
class FrozenMomentum(Drift):
    """Local steps with the server's momentum, which stays fixed within the round.

        d_k = r_k + beta m
        m <- G + beta m

    - d_k: direction of local step k
    - r_k: gradient of the step's batch, which a subclass may correct
    - m: momentum of the server
    - G: mean of the cohort's full-batch gradients at the broadcast model

    With ``form=ema``, r_k and G are multiplied by 1 - beta.
    """

    beta: float = param(0.0, "momentum coefficient; 0 is plain SGD", low=0, high=1)
    form: Literal["fedjax", "ema"] = param(
        "fedjax", "update of m: G + beta m, as in FedJAX (fedjax), or the paper's exponential moving average (ema)"
    )

    @property
    def _gradient_weight(self) -> float:
        """Factor of r_k and G: 1, or 1 - beta for an exponential moving average."""
        return 1.0 if self.form == "fedjax" else 1 - self.beta

    def on_server(self) -> Fields:
        return (vector("m", momentum="ascent"),) if self.beta else ()

    def _with_momentum(self, gradient: Tensor, ctx: LocalContext) -> Tensor:
        """Return the direction d_k = r_k + beta m of a step, where ``gradient`` is r_k, shape (P,).

        Without momentum (beta = 0), the server sends no m.
        """
        d = self._gradient_weight * gradient
        return d + self.beta * ctx.server["m"] if self.beta else d

    def _target_and_momentum(self, means: CohortMeans, server: State, gradient: Tensor | None) -> tuple[Tensor, State]:
        """Return the target, i.e. the mean of the cohort's models, and the new server momentum m <- G + beta m.

        Args:
            means: averages over the cohort.
            server: the drift's server state.
            gradient: G, the cohort's mean full-batch gradient, shape (P,); None only without momentum (beta = 0).
        """
        target = means.z + means.displacement
        if not self.beta:
            return target, {}
        assert gradient is not None
        return target, {"m": self._gradient_weight * gradient + self.beta * server["m"]}


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
