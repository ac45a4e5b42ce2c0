"""FedMo and FedMoSWA's momentum-based stochastic control."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from fedflat.algorithms.drift.base import Drift, WholeGradient
from fedflat.algorithms.slot import At, Fields, Gradient, Returned, State, vector
from fedflat.text import param


@dataclass(frozen=True)
class Mo(Drift):
    """Momentum-based stochastic control: d_k = g - c_i + m, m <- m + gamma mean(c_i+ - m) (FedMoSWA; Liu et al. 2025, eqs. 5-7).

    Option I: c_i+ is the client's gradient at z. Option II: c_i+ = c_i - m + (z - y_K) / H.
    """

    gamma: float = param(
        0.2, "how far the server's momentum moves towards the clients' variates in a round", low=0, high=1
    )
    option: Literal["I", "II"] = param("II", "how a client renews its variate: gradient at z (I) or displacement (II)")
    option_I_batches: int = param(0, "batches behind option I's gradient; 0 is the client's whole data", low=0)
    gamma_first_round: float | None = param(None, "gamma of round 0 alone; released with 1", low=0, high=1)
    normaliser: Literal["sum", "trapezoid"] = param(
        "sum", "H: the sum of the rates used, or K (first + final) / 2 as released"
    )

    @property
    def whole_gradient(self) -> WholeGradient:
        return "own" if self.option == "I" else "none"

    @property
    def whole_gradient_batches(self) -> int:
        return self.option_I_batches

    def on_server(self) -> Fields:
        return (vector("m"),)

    def on_client(self) -> Fields:
        return (vector("c"),)

    def sends(self) -> Fields:
        return (vector("dm"),)

    def begin(self, at: At) -> State:
        return {"correction": at.server["m"] - at.client["c"]}

    def direction(self, g: Tensor, at: At, gradient: Gradient) -> Tensor:
        return g + at.local["correction"]

    def finish(self, at: At) -> tuple[State, State]:
        c = (
            at.own_gradient
            if at.own_gradient is not None
            else at.client["c"] - at.server["m"] + (at.z - at.y) / self._normaliser(at)
        )
        return {"c": c}, {"dm": c - at.server["m"]}

    def aggregate(self, back: Returned, server: State) -> tuple[Tensor, State]:
        gamma = self.gamma if back.round or self.gamma_first_round is None else self.gamma_first_round
        return back.z + back.displacement, {"m": server["m"] + gamma * back.mean["dm"]}

    def _normaliser(self, at: At) -> Tensor:
        if self.normaliser == "sum":
            return at.rates
        return at.steps * (at.first_lr + at.final_lr) / 2
