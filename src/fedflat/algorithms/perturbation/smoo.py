"""FedSMOO: dynamically regularised perturbation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedflat.algorithms.drift import Dyn
from fedflat.algorithms.perturbation.ascent import AscentStep
from fedflat.algorithms.slot import CohortMeans, Gradient, LocalContext, Slot, unit
from fedflat.algorithms.state import Fields, State, vector
from fedflat.text import param


@dataclass(frozen=True)
class Smoo(AscentStep):
    """A dual variable ties each client's perturbation to a global one (FedSMOO; Sun et al. 2023).

        e = rho unit(g(y_k) - mu_i - s)
        mu_i <- mu_i + e - s
        g = g(y_k + e)
        s <- rho unit(mean_S (mu_i - e))

    - e: perturbation, i.e. the offset from y_k to the point at which the gradient is evaluated
    - s: global perturbation, which the server estimates after every round
    - mu_i: dual variable of client i, which changes in every local step and is kept between rounds
    - y_k: the client's model after k local steps
    - g(y): gradient of the loss on the step's batch at the model y
    - g: gradient that the local step uses
    - unit(v): v / ||v||
    - mean_S: mean over the round's cohort S, of the values after each client's last step

    >>> from fedflat.testing import local_context
    >>> ctx = local_context(y=[2.0, 2.5], z=[0.0, 0.0], server={"s": [0.0, 0.0]}, local={"mu": [1.0, 1.0]})
    >>> offset, local = Smoo(rho=0.1).offset(ctx, gradient=lambda point: 2 * point)  # g - mu = [3, 4]
    >>> offset, local["mu"]
    (tensor([0.0600, 0.0800]), tensor([1.0600, 1.0800]))
    """

    rho: float = param(0.1, "length of the perturbation", low=0, positional=True)
    s_source: Literal["paper", "dual"] = param(
        "paper", "source of s: mu_i - e, as in the paper (paper), or mu_i alone, as in FL-Simulator (dual)"
    )

    def on_server(self) -> Fields:
        return (vector("s"),)

    def on_client(self) -> Fields:
        return (vector("mu"),)

    def sends(self) -> Fields:
        return (vector("s"),)

    def begin(self, ctx: LocalContext) -> State:
        return {"mu": ctx.client["mu"], "last offset": torch.zeros_like(ctx.z)}

    def offset(self, ctx: LocalContext, gradient: Gradient) -> tuple[Tensor | None, State]:
        """Return e, or None if rho is 0, and the new dual; ``finish`` also needs e of the last step."""
        if self.rho == 0:
            return None, {}
        e = self.rho * unit(gradient(ctx.y) - ctx.local["mu"] - ctx.server["s"])
        return e, {"mu": ctx.local["mu"] + e - ctx.server["s"], "last offset": e}

    def finish(self, ctx: LocalContext) -> tuple[State, State]:
        mu = ctx.local["mu"]
        sent = mu - ctx.local["last offset"] if self.s_source == "paper" else mu
        return {"mu": mu}, {"s": sent}

    def aggregate(self, means: CohortMeans, server: State, x: Tensor) -> State:
        return {"s": self.rho * unit(means.mean["s"])}

    def conflict(self, slots: Mapping[str, Slot]) -> str | None:
        if isinstance(slots["drift"], Dyn):
            return None
        return "FedSMOO's perturbation is part of FedDyn's dual problem and requires the drift dyn"
