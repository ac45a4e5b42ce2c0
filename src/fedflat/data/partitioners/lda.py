"""Label skew by the Dirichlet distribution as the published federated CIFAR files have it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedflat.data.partitioners.dirichlet import log_dirichlet, one_class_each, softmax
from fedflat.data.partitioners.partitioner import ByClass, IntArray
from fedflat.data.partitioners.sizes import equal_sizes
from fedflat.text import param


@dataclass(frozen=True)
class DirichletLda(ByClass):
    """One client after the other draws q ~ Dir(alpha * p), p the shares of the classes, and takes equally many examples by q.

    Here alpha is the sum over all classes, so that it is C times the alpha of ``dirichlet`` (Hsu et al. 2019). Who finds a class
    dealt out draws a new q over those that are left. So every example is used once, and the numbers of classes per client are those of
    the published files of Hsu et al. (2020), on which FedSAM (2022) and WiMA (2023) train: 1.3 and 5 on CIFAR-10 and CIFAR-100.
    """

    alpha: float = param(
        0.5, "total concentration: the smaller, the fewer classes a client has; 0 is one class each", low=0
    )

    def counts(self, available: IntArray, clients: int, rng: np.random.Generator) -> IntArray:
        """What each client takes of what those before it have left."""
        if self.alpha == 0:
            return one_class_each(available, clients)
        concentration = self.alpha * (available / available.sum())
        left = available.copy()
        counts = np.zeros((clients, len(available)), dtype=np.int64)
        for client, wanted in enumerate(equal_sizes(int(available.sum()), clients)):
            # Whoever goes short has emptied a class, so that there are at most as many draws as clients and classes together.
            while wanted:
                open_classes = np.flatnonzero(left)
                shares = softmax(log_dirichlet(concentration[open_classes], (1, len(open_classes)), rng))[0]
                taken = np.minimum(rng.multinomial(wanted, shares), left[open_classes])
                counts[client, open_classes] += taken
                left[open_classes] -= taken
                wanted -= taken.sum()
        return counts
