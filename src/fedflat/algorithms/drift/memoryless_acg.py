"""FedNSAM's script of 2026: FedACG with a momentum that forgets."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedflat.algorithms.drift.acg import Acg
from fedflat.algorithms.slot import CohortMeans
from fedflat.algorithms.state import State


@dataclass(frozen=True)
class MemorylessAcg(Acg):
    """FedACG whose momentum contains only the last round's displacements (FedNSAM's published code of 2026, D30).

        z = x + lam m
        d_k = g + beta (y_k - z)
        m <- (1 + lam) mean_S D_i
        x <- x + m

    m is the server's momentum; in round 0, it is mean_S D_i. Clients start from z, the server model x moved ahead by
    lam m. d_k is the direction of local step k, g the gradient of its batch and y_k the client's model. D_i = y_K - z
    is the displacement of client i after its K local steps, and mean_S the mean over the cohort. The published code is
    ``fedavg+memoryless-acg(beta=0)+sam(rho=0.05)``.

    >>> from fedflat.testing import cohort_means
    >>> means = cohort_means(z=[1.0, 2.0], displacement=[0.2, -0.2], round=1)
    >>> MemorylessAcg(lam=0.5).aggregate(means, {})
    (tensor([1.3000, 1.7000]), {'m': tensor([ 0.3000, -0.3000])})
    """

    def aggregate(self, means: CohortMeans, server: State) -> tuple[Tensor, State]:
        """Return the target x + m and the new momentum m, which does not depend on the old one."""
        m = (1 + self.lam if means.round else 1.0) * means.displacement
        return means.x + m, {"m": m}
