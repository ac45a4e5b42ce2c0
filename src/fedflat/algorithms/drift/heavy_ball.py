"""Heavy-ball momentum in local steps: base classes of GHBM, LocalGHBM and FedHBM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from fedflat.algorithms.server import Sgd
from fedflat.algorithms.slot import TINY_LR, Drift, LocalContext, Slot
from fedflat.algorithms.state import Fields, scalar, vector
from fedflat.text import param


@dataclass(frozen=True)
class HeavyBall(Drift):
    """Base class of drifts that add a heavy-ball momentum, the difference of two models, to each local step."""

    beta: float = param(0.9, "weight of the momentum in the sum of a round's local steps", low=0)

    def _per_step(self, difference: Tensor, ctx: LocalContext) -> Tensor:
        """Return what each of the K local steps adds to its gradient.

        Together, steps with the learning rate of the first one move by -beta ``difference``.
        """
        return self.beta * difference / (ctx.first_lr.clamp(min=TINY_LR) * ctx.steps)

    def conflict(self, slots: Mapping[str, Slot]) -> str | None:
        if type(slots["server"]) is Sgd:
            return None
        return "GHBM, LocalGHBM and FedHBM have their own momentum and allow only the server optimiser sgd"

    def sgd_conflict(self, optimiser: str) -> str | None:
        return f"the momentum is scaled for SGD steps; use one without momentum, e.g. fedprox+{optimiser}"

    def divergence_hint(self) -> str | None:
        return f"heavy-ball momentum beta={self.beta:g} amplifies displacements; lower beta or the learning rate"


@dataclass(frozen=True)
class Anchored(HeavyBall):
    """Base class of drifts that compute the momentum from a model that the client keeps between participations."""

    participation: float = param(
        0.1, "share C of the clients that participate in a round, i.e. clients_per_round / clients", above=0, high=1
    )
    first_anchor: Literal["absent", "initial"] = param(
        "absent", "momentum when a client first participates: none (absent), or from the initial model (initial)"
    )

    def on_client(self) -> Fields:
        return (vector("last", start="model"), scalar("seen", start=float(self.first_anchor == "initial")))

    def _momentum(self, model: Tensor, ctx: LocalContext) -> Tensor:
        """Return what a step adds to its gradient for the momentum C (last - model).

        It is zero until the client has participated once (``seen``), unless ``first_anchor=initial``.
        """
        since_last = ctx.client["seen"] * (ctx.client["last"] - model)
        return self._per_step(self.participation * since_last, ctx)
