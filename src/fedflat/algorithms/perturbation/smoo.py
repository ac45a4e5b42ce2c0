"""FedSMOO: dynamically regularised perturbation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedflat.algorithms.drift import Dyn
from fedflat.algorithms.slot import CohortMeans, Gradient, LocalContext, Perturbation, Slot, unit
from fedflat.algorithms.state import Fields, State, vector
from fedflat.text import param


@dataclass(frozen=True)
class Smoo(Perturbation):
    """A dual variable ties each client's perturbation to a global one (FedSMOO; Sun et al. 2023).

        sh = rho unit(g(y_k) - mu_i - s)
        mu_i <- mu_i + sh - s
        g = g(y_k + sh)
        s <- rho unit(mean_S (mu_i - sh))

    unit(v) is v / ||v||, y_k the client's model before local step k, and g(y) the gradient of the batch's loss at y. sh
    is the perturbation of a client's step, s the global perturbation that the server estimates, and mu_i the dual
    variable of client i, which changes at every step and is kept between rounds. The server computes s from mu_i - sh
    after each client's last step; with ``s_source=dual`` it uses mu_i alone, as FL-Simulator does.

    >>> from fedflat.testing import local_context
    >>> ctx = local_context(y=[2.0, 2.5], z=[0.0, 0.0], server={"s": [0.0, 0.0]}, local={"mu": [1.0, 1.0]})
    >>> offset, local = Smoo(rho=0.1).offset(ctx, gradient=lambda point: 2 * point)  # g - mu = [3, 4]
    >>> offset, local["mu"]
    (tensor([0.0600, 0.0800]), tensor([1.0600, 1.0800]))
    """

    rho: float = param(0.1, "length of the perturbation", low=0, positional=True)
    s_source: Literal["paper", "dual"] = param(
        "paper", "what the server computes s from: mu_i - sh, as in the paper (paper), or mu_i alone (dual)"
    )

    @property
    def ascent_passes(self) -> int:
        return 1 if self.rho else 0

    def on_server(self) -> Fields:
        return (vector("s"),)

    def on_client(self) -> Fields:
        return (vector("mu"),)

    def sends(self) -> Fields:
        return (vector("s"),)

    def begin(self, ctx: LocalContext) -> State:
        return {"mu": ctx.client["mu"], "sh": torch.zeros_like(ctx.z)}

    def offset(self, ctx: LocalContext, gradient: Gradient) -> tuple[Tensor | None, State]:
        """The offset sh = rho unit(g(y_k) - mu_i - s), or None if rho is 0, and the new dual mu_i + sh - s.

        g(y_k) is the gradient at the client's model, s the server's estimate of the global perturbation, and unit(v) is
        v / ||v||. ``finish`` needs the last sh.
        """
        if self.rho == 0:
            return None, {}
        sh = self.rho * unit(gradient(ctx.y) - ctx.local["mu"] - ctx.server["s"])
        return sh, {"mu": ctx.local["mu"] + sh - ctx.server["s"], "sh": sh}

    def finish(self, ctx: LocalContext) -> tuple[State, State]:
        """Keep the dual mu_i, and send mu_i - sh (``s_source=paper``) or mu_i alone, from which the server computes s.

        sh is the offset of the last step.
        """
        mu = ctx.local["mu"]
        sent = mu - ctx.local["sh"] if self.s_source == "paper" else mu
        return {"mu": mu}, {"s": sent}

    def aggregate(self, means: CohortMeans, server: State, x: Tensor) -> State:
        return {"s": self.rho * unit(means.mean["s"])}

    def conflict(self, slots: Mapping[str, Slot]) -> str | None:
        """Why this perturbation cannot be combined with the drift in ``slots``; None if that is ``dyn``."""
        if isinstance(slots["drift"], Dyn):
            return None
        return "FedSMOO's perturbation is part of FedDyn's dual problem and requires the drift dyn"
