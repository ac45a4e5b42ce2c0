"""FedCM: client-level momentum."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedflat.algorithms.slot import CohortMeans, Drift, Gradient, LocalContext
from fedflat.algorithms.state import Fields, State, vector
from fedflat.text import param


@dataclass(frozen=True)
class Cm(Drift):
    """Each local step combines the gradient with the server's momentum (FedCM; Xu et al. 2021).

        d_k = alpha g + (1 - alpha) Delta
        Delta <- mean_S (z - y_K) / H

    - d_k: direction of local step k
    - g: gradient of the loss on the step's batch
    - Delta: momentum of the server, i.e. the mean direction of all local steps of the previous round
    - z: broadcast model, from which clients start
    - y_K: the client's model after its K local steps
    - H: sum of the learning rates of the client's K local steps
    - mean_S: mean over the round's cohort S

    >>> from torch import tensor
    >>> from fedflat.testing import local_context
    >>> cm = Cm(alpha=0.1)
    >>> ctx = local_context(y=[0.0, 0.0], z=[0.0, 0.0], server={"momentum": [1.0, -1.0]})
    >>> cm.direction(tensor([2.0, 2.0]), ctx._replace(local=cm.begin(ctx)), None)
    tensor([ 1.1000, -0.7000])
    """

    alpha: float = param(0.1, "weight of the gradient; the momentum has weight 1 - alpha", low=0, high=1)

    def on_server(self) -> Fields:
        return (vector("momentum", momentum="ascent"),)

    def begin(self, ctx: LocalContext) -> State:
        """Return the part of every direction that stays constant during the round, (1 - alpha) Delta."""
        return {"momentum": (1 - self.alpha) * ctx.server["momentum"]}

    def direction(self, g: Tensor, ctx: LocalContext, gradient: Gradient) -> Tensor:
        return self.alpha * g + ctx.local["momentum"]

    def aggregate(self, means: CohortMeans, server: State) -> tuple[Tensor, State]:
        return means.z + means.displacement, {"momentum": means.direction}

    def privacy_conflict(self, equal_steps: bool) -> str | None:
        reason = "the server divides displacements by the clients' sums of learning rates, which must be equal; "
        return None if equal_steps else reason + "set training.local_steps, and do not set federation.partial"

    def sgd_conflict(self, optimiser: str) -> str | None:
        return f"{self.NEEDS_SGD}; use a drift correction without momentum, e.g. fedprox+{optimiser}"
