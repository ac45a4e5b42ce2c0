"""FedDyn's dynamic regularisation, also the dual of FedSpeed, FedSMOO and FedLESAM-D."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from fedflat.algorithms.drift.base import Drift
from fedflat.algorithms.slot import At, Fields, Gradient, Returned, State, vector
from fedflat.text import param


@dataclass(frozen=True)
class Dyn(Drift):
    """Dynamic regularisation: d_k = g + alpha (y_k - z + a_i), then a_i <- a_i + D_i (FedDyn; Acar et al. 2021, eqs. 1-3).

    The dual is kept as a sum of displacements, a_i = -ghat_i / alpha. The server moves to mean_S(y_K) + mean_all(a_i);
    with dual_scope=active (FedSpeed as published) to mean_S(y_K + a_i).
    """

    alpha: float = param(0.01, "strength of the regulariser; FedSpeed's 1/lambda, FedSMOO's lamb", above=0)
    dual_scope: Literal["all", "active"] = param(
        "all", "whose duals the server adds: all clients' or only the cohort's"
    )
    all_mean: bool = param(False, "also evaluate the mean of every client's last model (one more vector kept and sent)")

    def on_server(self) -> Fields:
        everyone = (vector("everyone", start="model", sent=False),) if self.all_mean else ()
        return (vector("a", sent=False), vector("active", start="model", sent=False), *everyone)

    def on_client(self) -> Fields:
        return (vector("a"), *((vector("last", start="model"),) if self.all_mean else ()))

    def sends(self) -> Fields:
        return (vector("change"),) if self.all_mean else ()

    def direction(self, g: Tensor, at: At, gradient: Gradient) -> Tensor:
        return g + self.alpha * (at.moved + at.client["a"])

    def displacement(self, at: At) -> Tensor:
        return at.moved if self.dual_scope == "all" else at.client["a"] + 2 * at.moved

    def moved(self, displacement: Tensor, client: State) -> Tensor:
        return displacement if self.dual_scope == "all" else (displacement - client["a"]) / 2

    def finish(self, at: At) -> tuple[State, State]:
        kept = {"a": at.client["a"] + at.moved}
        if not self.all_mean:
            return kept, {}
        return kept | {"last": at.y}, {"change": at.y - at.client["last"]}

    def aggregate(self, back: Returned, server: State) -> tuple[Tensor, State]:
        target = back.z + back.displacement
        kept = {"active": target}
        if self.all_mean:
            kept["everyone"] = server["everyone"] + back.share * back.mean["change"]
        if self.dual_scope == "active":
            return target, kept
        a = server["a"] + back.share * back.uniform
        return target + a, kept | {"a": a}

    def needs_the_mean(self) -> str:
        return (
            "the server's dual is the mean of those that clients keep"
            if self.dual_scope == "all" or self.all_mean
            else ""
        )

    def may_explode(self) -> str:
        return "FedDyn's dual adds up displacements for ever and may explode when clients differ: clip (training.clip=10) or change alpha"

    def evaluated(self, server: State) -> State:
        models = {"active mean": server["active"]} if self.dual_scope == "all" else {}
        return models | {"all mean": server["everyone"]} if self.all_mean else models
