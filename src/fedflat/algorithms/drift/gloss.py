"""FedGloSS: SAM on the server, with FedDyn's dual."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from fedflat.algorithms.drift.dyn import Dyn
from fedflat.algorithms.drift.ramp import RAMP, START_RHO, ramped
from fedflat.algorithms.slot import LARGE_RHO, CohortMeans, Slot, unit
from fedflat.algorithms.state import Fields, State, scalar, vector
from fedflat.text import param


@dataclass(frozen=True)
class Gloss(Dyn):
    """Clients start uphill of the server model, along its last update (FedGloSS; Caldarola et al. 2025).

        z = x - server_rho unit(u)
        d_k = g + alpha (y_k - z + a_i)
        a_i <- a_i + D_i
        u <- mean_S D_i
        target = x + u + mean_all a_i

    - x: server model
    - z: broadcast model, from which clients start
    - u: mean displacement of the previous round, initially 0; in the target, that of the current round
    - unit(v): v / ||v||
    - d_k: direction of local step k
    - g: gradient of the loss on the step's batch, which FedGloSS computes with SAM
    - a_i: dual variable of client i, i.e. the sum of its displacements over all rounds so far
    - D_i: displacement y_K - y_0 of client i in the round, where K is its number of local steps
    - y_k: the client's model after k local steps
    - mean_S: mean over the round's cohort S
    - mean_all: mean over all clients
    - target: model towards which the server moves

    The paper's beta is 1 / alpha.

    >>> from torch import tensor
    >>> from fedflat.testing import cohort_means
    >>> gloss, zero = Gloss(server_rho=0.5), tensor([0.0, 0.0])
    >>> gloss.start(tensor([1.0, 1.0]), {"q": tensor([-3.0, -4.0]), "round": tensor(1.0)})
    tensor([1.3000, 1.4000])
    >>> means = cohort_means(z=[1.3, 1.4], displacement=[0.1, 0.1])._replace(x=tensor([1.0, 1.0]))
    >>> gloss.aggregate(means, {"a": zero, "q": zero, "round": tensor(1.0)})[0]
    tensor([1.2000, 1.2000])
    """

    server_rho: float = param(0.15, "distance from the server model to the broadcast model (rho in the paper)", low=0)
    ramp: int = param(0, RAMP, low=0)
    start_rho: float = param(0.001, START_RHO, low=0)
    ramp_rho: float | None = param(
        None,
        "constant radius of the server during the ramp, as in the published code (D32); if none, the radius rises",
        low=0,
    )
    dual_divisor: Literal["clients", "cohort"] = param(
        "clients",
        "divisor of the server's dual: the number of clients (clients), or, as in the published code (D33), the "
        "number of clients times the cohort's size (cohort)",
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
        """Return FedDyn's target, shifted by x - z because the server steps from x instead of z, and the new state."""
        if self.dual_divisor == "cohort":
            means = means._replace(uniform=means.uniform / means.cohort_size)
        target, state = super().aggregate(means, server)
        state |= {"q": means.displacement, "round": server["round"] + 1}
        return target + (means.x - means.z), state

    def conflict(self, slots: Mapping[str, Slot]) -> str | None:
        if self.dual_scope == "active":
            return "FedGloSS needs the mean displacement, which clients do not upload with dual_scope=active; use all"
        if getattr(slots["start"], "server", None) == "average":
            return "FedGloSS steps from the server model, so relaxed(server=average) has no effect; use displacement"
        return super().conflict(slots)

    def divergence_hint(self) -> str | None:
        if self.server_rho > LARGE_RHO:
            return f"server_rho={self.server_rho:g} starts clients far from the server model; lower it"
        return super().divergence_hint()
