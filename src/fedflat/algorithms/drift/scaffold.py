"""SCAFFOLD."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from fedflat.algorithms.drift.base import Drift, WholeGradient
from fedflat.algorithms.slot import At, Fields, Gradient, Returned, State, vector
from fedflat.text import param


@dataclass(frozen=True)
class Scaffold(Drift):
    """Control variates: d_k = g - c_i + c, then c_i+ by option and c <- c + (|S|/N) mean(c_i+ - c_i) (Karimireddy et al. 2020, eqs. 3-5).

    Option I: c_i+ is the gradient of the client's whole data at z. Option II: c_i+ = c_i - c + (z - y_K) / H.
    """

    option: Literal["I", "II"] = param("II", "how a client renews its variate: whole gradient (I) or displacement (II)")
    cv_weight: float = param(1.0, "weight of c - c_i in the direction; FedLESAM-S was released with 0.1", low=0)

    @property
    def whole_gradient(self) -> WholeGradient:
        return "own" if self.option == "I" else "none"

    def on_server(self) -> Fields:
        return (vector("c"),)

    def on_client(self) -> Fields:
        return (vector("c"),)

    def sends(self) -> Fields:
        return (vector("dc"),)

    def begin(self, at: At) -> State:
        return {"correction": self.cv_weight * (at.server["c"] - at.client["c"])}

    def direction(self, g: Tensor, at: At, gradient: Gradient) -> Tensor:
        return g + at.local["correction"]

    def finish(self, at: At) -> tuple[State, State]:
        c = at.client["c"] - at.server["c"] + at.mean_direction if at.own_gradient is None else at.own_gradient
        return {"c": c}, {"dc": c - at.client["c"]}

    def aggregate(self, back: Returned, server: State) -> tuple[Tensor, State]:
        return back.z + back.displacement, {"c": server["c"] + back.share * back.mean["dc"]}

    def needs_the_mean(self) -> str:
        return "the server's control variate is the mean of those that clients keep"
