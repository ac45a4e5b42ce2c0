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

        d_k = q_k + beta m
        m <- G + beta m

    d_k is the direction of local step k and q_k its gradient, which a subclass may correct. m is the server's momentum,
    and G the cohort's mean full-batch gradient at the broadcast model. With ``form=ema``, q_k and G are multiplied by
    1 - beta.
    """

    beta: float = param(0.0, "momentum coefficient; 0 is plain SGD", low=0, high=1)
    form: Literal["fedjax", "ema"] = param(
        "fedjax", "update of m: G + beta m, as in FedJAX (fedjax), or the paper's exponential moving average (ema)"
    )

    @property
    def _gradient_weight(self) -> float:
        """Weight of q_k and G next to beta m."""
        return 1.0 if self.form == "fedjax" else 1 - self.beta

    def on_server(self) -> Fields:
        return (vector("m", momentum="ascent"),) if self.beta else ()

    def _with_momentum(self, gradient: Tensor, ctx: LocalContext) -> Tensor:
        """The direction d_k = q_k + beta m of a step, where ``gradient`` is q_k of shape (P,).

        Without momentum (beta = 0), the server sends no m.
        """
        d = self._gradient_weight * gradient
        return d + self.beta * ctx.server["m"] if self.beta else d

    def _target_and_momentum(self, means: CohortMeans, server: State, gradient: Tensor | None) -> tuple[Tensor, State]:
        """The target model, i.e. the mean of the cohort's models, and the new server momentum m <- G + beta m.

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

        q_k = g(y_k) - g(z) + G
        d_k = q_k + beta m
        m <- G + beta m

    q_k is the variance-reduced gradient of local step k; g(y_k) and g(z) are the gradients of the step's batch at the
    client's model y_k and at the broadcast model z. G is the mean of the clients' full-batch gradients at z, weighted
    by their numbers of samples; it is computed before local training. m is the server's momentum. With ``form=ema``,
    q_k and G are multiplied by 1 - beta.

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

    def direction(self, g: Tensor, ctx: LocalContext, gradient: Gradient) -> Tensor:
        """The direction g(y_k) - g(z) + G + beta m, where ``g`` is g(y_k) and ``gradient`` computes g(z).

        A perturbation of y_k, which ``g`` includes, is applied to z as well.
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

    d_k is the direction of local step k, g the gradient of its batch, and m the server's momentum. Along with its
    displacement, each client uploads its full-batch gradient at the broadcast model z. G is the mean of these
    gradients, weighted by the clients' numbers of samples. With ``form=ema``, g and G are multiplied by 1 - beta. With
    beta = 0, MIMELite equals FedAvg.

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
