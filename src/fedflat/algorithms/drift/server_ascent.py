"""Base class of FedGloSS: SAM on the server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from fedflat.algorithms.drift.ramp import RAMP, START_RHO, ramped
from fedflat.algorithms.slot import LARGE_RHO, CohortMeans, Drift, Slot, unit
from fedflat.algorithms.state import Fields, State, scalar, vector
from fedflat.text import param


@dataclass(frozen=True)
class ServerAscent(Drift):
    """Clients start uphill of the server model, along its last update.

        z = x - server_rho unit(u)
        u <- mean_S D_i

    A subclass also derives from the drift correction whose steps the clients take.
    """

    server_rho: float = param(0.15, "distance from the server model to the broadcast model (rho in the paper)", low=0)
    ramp: int = param(0, RAMP, low=0)
    start_rho: float = param(0.001, START_RHO, low=0)
    ramp_rho: float | None = param(
        None,
        "constant radius of the server during the ramp, as in the published code (D32); if none, the radius rises",
        low=0,
    )

    def on_server(self) -> Fields:
        return (*super().on_server(), vector("q", sent=False), scalar("round", sent=False))

    def start(self, x: Tensor, server: State) -> Tensor:
        rho: float | Tensor = self.server_rho
        if self.ramp:
            rho = ramped(self.server_rho, self.start_rho, self.ramp, server["round"])
            if self.ramp_rho is not None:
                ramping = (server["round"] <= self.ramp).to(x.dtype)
                rho = ramping * self.ramp_rho + (1 - ramping) * self.server_rho
        return x - rho * unit(server["q"])

    def aggregate(self, means: CohortMeans, server: State) -> tuple[Tensor, State]:
        """Return the target, shifted by x - z because the server steps from x instead of z, and the new state."""
        target, state = super().aggregate(means, server)
        state |= {"q": means.displacement, "round": server["round"] + 1}
        return target + (means.x - means.z), state

    def conflict(self, slots: Mapping[str, Slot]) -> str | None:
        """Return an error message for ``relaxed(server=average)``, which changes what the server averages."""
        if getattr(slots["start"], "server", None) == "average":
            return "FedGloSS steps from the server model, so relaxed(server=average) has no effect; use displacement"
        return super().conflict(slots)

    def divergence_hint(self) -> str | None:
        if self.server_rho > LARGE_RHO:
            return f"server_rho={self.server_rho:g} starts clients far from the server model; lower it"
        return super().divergence_hint()
