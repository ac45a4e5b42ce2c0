"""Label skew by the Dirichlet distribution, as in the published federated CIFAR files."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedflat.data.partitioners.dirichlet import log_dirichlet, one_class_per_client, softmax
from fedflat.data.partitioners.partitioner import ClassCountPartitioner, IntArray, equal_sizes
from fedflat.text import param


@dataclass(frozen=True)
class DirichletLda(ClassCountPartitioner):
    """One client after another draws class probabilities q ~ Dir(alpha * p), then its examples according to q.

    p holds the share of each class in the training set, and all clients get the same number of examples. Here alpha is
    the sum over all C classes, i.e. C times the alpha of ``dirichlet`` (Hsu et al. 2019). A client that draws an
    exhausted class draws a new q over the remaining classes, so every example is used once. The FedSAM (2022) and WiMA
    (2023) papers use partition files of Hsu et al. (2020), whose clients have on average 1.3 classes on CIFAR-10 (alpha
    0.05) and 5 on CIFAR-100 (alpha 0.5); here, clients have about as many classes.
    """

    citation = "Hsu et al. 2019; the files of Hsu et al. 2020, used by FedSAM (2022) and WiMA (2023)"
    examples = ("dirichlet-lda(alpha=1)", "dirichlet-lda(alpha=0.1)")
    alpha: float = param(
        0.5, "total concentration: smaller values give clients fewer classes; 0: one class per client", low=0
    )

    def counts(self, examples_per_class: IntArray, clients: int, rng: np.random.Generator) -> IntArray:
        if self.alpha == 0:
            return one_class_per_client(examples_per_class, clients)
        concentration = self.alpha * (examples_per_class / examples_per_class.sum())
        unused = examples_per_class.copy()
        counts = np.zeros((clients, len(examples_per_class)), dtype=np.int64)
        for client, missing in enumerate(equal_sizes(int(examples_per_class.sum()), clients)):
            # A client is short only if it exhausted a class, so there are at most clients + classes draws.
            while missing:
                remaining = np.flatnonzero(unused)
                shares = softmax(log_dirichlet(concentration[remaining], (1, len(remaining)), rng))[0]
                taken = np.minimum(rng.multinomial(missing, shares), unused[remaining])
                counts[client, remaining] += taken
                unused[remaining] -= taken
                missing -= taken.sum()
        return counts
