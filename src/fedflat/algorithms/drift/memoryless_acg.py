"""The momentum of FedNSAM's published code: FedACG's, but without memory of earlier rounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from fedflat.algorithms.drift.acg import Acg
from fedflat.algorithms.slot import CohortMeans, Slot
from fedflat.algorithms.state import State


@dataclass(frozen=True)
class MemorylessAcg(Acg):
    """FedACG's momentum, without memory of earlier rounds (published code of FedNSAM, 2026).

        z = x + lam m
        d_k = g + beta (y_k - z)
        m <- (1 + lam) mean_S D_i
        x <- x + m

    - x: server model
    - m: momentum of the server; after round 0, it is mean_S D_i without the factor
    - z: broadcast model, from which clients start: the server model moved ahead by lam m
    - d_k: direction of local step k
    - g: gradient of the loss on the step's batch
    - y_k: the client's model after k local steps
    - D_i: displacement y_K - y_0 of client i in the round, where K is its number of local steps
    - mean_S: mean over the round's cohort S

    The published code, ``fednsam(variant=released)``, has beta = 0 and SAM on clients (D30).

    >>> from fedflat.testing import cohort_means
    >>> means = cohort_means(z=[1.0, 2.0], displacement=[0.2, -0.2], round=1)
    >>> MemorylessAcg(lam=0.5).aggregate(means, {})
    (tensor([1.3000, 1.7000]), {'m': tensor([ 0.3000, -0.3000])})
    """

    def aggregate(self, means: CohortMeans, server: State) -> tuple[Tensor, State]:
        """Return the target x + m and the new momentum m, which does not depend on the old one."""
        m = (1 + self.lam if means.round else 1.0) * means.displacement
        return means.x + m, {"m": m}

    def conflict(self, slots: Mapping[str, Slot]) -> str | None:
        if getattr(slots["start"], "server", None) == "average":
            return "memoryless-acg steps from the server model, so server=average has no effect; use displacement"
        return super().conflict(slots)
