"""Base class of MIME and MIMELite: clients apply the server's optimiser with its state frozen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from fedflat.algorithms.slot import CohortMeans, Drift, LocalContext
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
