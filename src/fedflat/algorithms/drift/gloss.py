"""FedGloSS: SAM on the server, with FedDyn's dual."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from fedflat.algorithms.drift.dyn import Dyn
from fedflat.algorithms.slot import LARGE_RHO, CohortMeans, Slot, unit
from fedflat.algorithms.state import Fields, State, scalar, vector
from fedflat.text import param

RAMP = "number of first rounds over which the radius rises linearly from start_rho; 0 keeps it constant"
START_RHO = "radius in round 0, if ramp is above 0"


def ramped(rho: float, start_rho: float, ramp: int, round: Tensor) -> Tensor:
    """The radius in a round (counted from 0, shape ()), which rises linearly to ``rho`` in the first ``ramp`` rounds.

    >>> from torch import tensor
    >>> ramped(0.5, start_rho=0.1, ramp=4, round=tensor(1.0))
    tensor(0.2000)
    """
    return start_rho + (rho - start_rho) * round.clamp(max=ramp) / ramp


@dataclass(frozen=True)
class Gloss(Dyn):
    """Clients start uphill of the server model, along its last update (FedGloSS; Caldarola et al. 2025).

        z = x - server_rho unit(q)
        d_k = g + alpha (y_k - z + a_i)
        a_i <- a_i + D_i
        q <- mean_S D_i
        target = x + q + mean_all a_i

    x is the server model, q the mean displacement of the previous round's cohort (initially 0), and unit(q) = q /
    ||q||. Clients start from z. d_k is the direction of local step k and g the gradient of its batch, which FedGloSS
    takes with SAM. a_i is the dual variable of client i: the sum of its displacements D_i = y_K - z over all rounds so
    far. y_k is the client's model after k of its K local steps, mean_S the mean over the round's cohort and mean_all
    that over all clients. The server moves from x towards the target. The paper's beta is 1 / alpha.

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
        "constant radius of the server during the ramp, as in the published code (D32); none rises linearly",
        low=0,
    )
    dual_divisor: Literal["clients", "cohort"] = param(
        "clients",
        "divisor of the server's dual: the number of clients (clients), or also the cohort's size, as in the published "
        "code (cohort; D33)",
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
        """FedDyn's target, moved from z to x: the step starts from the server model, not from the broadcast one."""
        dual_means = means
        if self.dual_divisor == "cohort":
            dual_means = means._replace(uniform=means.uniform / means.cohort_size)
        target, state = super().aggregate(dual_means, server)
        state |= {"q": means.displacement, "round": server["round"] + 1}
        return target + (means.x - means.z), state

    def conflict(self, slots: Mapping[str, Slot]) -> str | None:
        """Why FedGloSS cannot use ``dual_scope=active``, or a start that replaces the broadcast model on the server."""
        if getattr(slots["start"], "server", None) == "average":
            return "FedGloSS steps from the server model, so relaxed(server=average) has no effect; use displacement"
        if self.dual_scope == "all":
            return None
        return "FedGloSS needs the mean displacement, which clients do not upload with dual_scope=active; use all"

    def divergence_hint(self) -> str | None:
        if self.server_rho > LARGE_RHO:
            return f"server_rho={self.server_rho:g} starts clients far from the server model; lower it"
        return super().divergence_hint()
