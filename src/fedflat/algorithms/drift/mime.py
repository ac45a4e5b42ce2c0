"""MIME and MIMELite: the server's optimiser, mimicked by the clients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from fedflat.algorithms.drift.base import Drift, WholeGradient
from fedflat.algorithms.slot import At, Fields, Gradient, Returned, State, vector
from fedflat.text import param


@dataclass(frozen=True)
class Mimic(Drift):
    """Steps by the server's frozen momentum m: d_k = q_k + beta m, m <- G + beta m (form fedjax; EMA: both q and G times 1 - beta)."""

    beta: float = param(0.0, "momentum; 0 is plain SGD", low=0, high=1)
    form: Literal["fedjax", "ema"] = param(
        "fedjax", "m <- G + beta m as in FedJAX, or the exponential average of the paper"
    )

    @property
    def _gain(self) -> float:
        return 1.0 if self.form == "fedjax" else 1 - self.beta

    def on_server(self) -> Fields:
        return (vector("m"),) if self.beta else ()

    def _with_momentum(self, q: Tensor, at: At) -> Tensor:
        return self._gain * q + self.beta * at.server["m"] if self.beta else self._gain * q

    def _renewed(self, server: State, whole_gradient: Tensor) -> State:
        return {"m": self._gain * whole_gradient + self.beta * server["m"]}


@dataclass(frozen=True)
class Mime(Mimic):
    """The server's optimiser with variance-reduced steps: q_k = g(y_k) - g(z) + G on the same batch (Karimireddy et al. 2021).

    G is the cohort's whole gradient at z, weighted by samples and taken before anyone trains. Then d_k = q_k + beta m and
    m <- G + beta m (form=fedjax), or with q and G both times 1 - beta (form=ema).
    """

    @property
    def whole_gradient(self) -> WholeGradient:
        return "common"

    @property
    def extra_passes(self) -> int:
        return 1

    def needs_the_mean(self) -> str:
        return "every client trains with the mean of the cohort's gradients"

    def direction(self, g: Tensor, at: At, gradient: Gradient) -> Tensor:
        assert at.common_gradient is not None
        return self._with_momentum(g - gradient(at.perturbed(at.z)) + at.common_gradient, at)

    def aggregate(self, back: Returned, server: State) -> tuple[Tensor, State]:
        assert back.common_gradient is not None
        kept = self._renewed(server, back.common_gradient) if self.beta else {}
        return back.z + back.displacement, kept


@dataclass(frozen=True)
class MimeLite(Mimic):
    """The server's optimiser without variance reduction: q_k = g(y_k), G uploaded with the displacement (Karimireddy et al. 2021).

    d_k = q_k + beta m and m <- G + beta m (form=fedjax), or with q and G both times 1 - beta (form=ema). With beta=0 it is FedAvg.
    """

    @property
    def whole_gradient(self) -> WholeGradient:
        return "own" if self.beta else "none"

    def sends(self) -> Fields:
        return (vector("gradient", by_samples=True),) if self.beta else ()

    def direction(self, g: Tensor, at: At, gradient: Gradient) -> Tensor:
        return self._with_momentum(g, at)

    def finish(self, at: At) -> tuple[State, State]:
        return {}, {} if at.own_gradient is None else {"gradient": at.own_gradient}

    def aggregate(self, back: Returned, server: State) -> tuple[Tensor, State]:
        kept = self._renewed(server, back.mean["gradient"]) if self.beta else {}
        return back.z + back.displacement, kept
