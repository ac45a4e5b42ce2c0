"""FedACG: accelerated client gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from fedflat.algorithms.server import Sgd
from fedflat.algorithms.slot import CohortMeans, Drift, Gradient, LocalContext, Slot
from fedflat.algorithms.state import Fields, State, vector
from fedflat.text import param


@dataclass(frozen=True)
class Acg(Drift):
    """Clients start from the server model, moved ahead along its momentum (FedACG; Kim et al. 2024).

        z = x + lam m
        d_k = g + beta (y_k - z)
        m <- lam m + mean_S D_i
        x <- x + m

    - x: server model
    - m: momentum of the server
    - z: broadcast model, from which clients start: the server model moved ahead by lam m
    - d_k: direction of local step k
    - g: gradient of the loss on the step's batch
    - y_k: the client's model after k local steps
    - D_i: displacement y_K - y_0 of client i in the round, where K is its number of local steps
    - mean_S: mean over the round's cohort S

    >>> from torch import tensor
    >>> from fedflat.testing import cohort_means
    >>> acg, m = Acg(lam=0.5), tensor([0.2, -0.2])
    >>> z = acg.start(tensor([1.0, 2.0]), {"m": m})
    >>> z
    tensor([1.1000, 1.9000])
    >>> acg.aggregate(cohort_means(z=z, displacement=[0.1, 0.1]), {"m": m})
    (tensor([1.2000, 2.0000]), {'m': tensor([0.2000, 0.0000])})
    """

    lam: float = param(0.85, "coefficient of the server's momentum, and look-ahead factor", low=0, high=1)
    beta: float = param(
        0.002, "strength of the pull towards z; twice the paper's 1e-3, whose penalty has no factor 1/2", low=0
    )

    def on_server(self) -> Fields:
        return (vector("m", sent=False, momentum="descent"),)

    def start(self, x: Tensor, server: State) -> Tensor:
        return x + self.lam * server["m"]

    def direction(self, g: Tensor, ctx: LocalContext, gradient: Gradient) -> Tensor:
        return g + self.beta * (ctx.y - ctx.z)

    def aggregate(self, means: CohortMeans, server: State) -> tuple[Tensor, State]:
        """Return the target z + mean_S D_i, and the new momentum m.

        The target equals x plus the new m, because z = x + lam m already contains the old momentum.
        """
        return means.z + means.displacement, {"m": self.lam * server["m"] + means.displacement}

    def asynchronous_conflict(self) -> str | None:
        return "clients start ahead of the server model, along a momentum that has changed when they arrive"

    def conflict(self, slots: Mapping[str, Slot]) -> str | None:
        if slots["server"] == Sgd():
            return None
        return "FedACG has its own server momentum and allows only the server optimiser sgd(server_lr=1)"
