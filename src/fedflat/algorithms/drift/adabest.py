"""AdaBest."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedflat.algorithms.drift.base import Drift
from fedflat.algorithms.slot import At, Fields, Gradient, Returned, State, scalar, vector
from fedflat.text import param


@dataclass(frozen=True)
class AdaBest(Drift):
    """Adaptive bias estimates: d_k = g - h_i, h_i <- h_i / (t - last_i) + mu (z - y_K) (Varno et al. 2022).

    With a = mean_S(y_K), the server moves to a + beta (a - a_previous). Rounds count from t = 1, and last_i starts at 0.
    """

    mu: float = param(0.02, "how much of its displacement a client takes into its bias estimate", low=0)
    beta: float = param(0.9, "how far the server extrapolates its aggregate", low=0, high=1)

    def on_server(self) -> Fields:
        return (vector("aggregate", start="model", sent=False),)

    def on_client(self) -> Fields:
        return (vector("h"), scalar("last"))

    def direction(self, g: Tensor, at: At, gradient: Gradient) -> Tensor:
        return g - at.client["h"]

    def finish(self, at: At) -> tuple[State, State]:
        t = at.round + 1
        h = at.client["h"] / (t - at.client["last"]) - self.mu * at.moved
        return {"h": h, "last": t.to(h.dtype)}, {}

    def aggregate(self, back: Returned, server: State) -> tuple[Tensor, State]:
        a = back.z + back.displacement
        return a + self.beta * (a - server["aggregate"]), {"aggregate": a}

    def may_explode(self) -> str:
        return f"AdaBest extrapolates every round by beta={self.beta}: lower beta, or mu"

    def evaluated(self, server: State) -> State:
        return {"aggregate": server["aggregate"]}
