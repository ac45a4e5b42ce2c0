"""Pachinko allocation: label skew over two levels of labels."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedflat.data.partitioners.dirichlet import Reals, draw_class_counts, log_dirichlet, softmax
from fedflat.data.partitioners.partitioner import (
    IntArray,
    LabelledExamples,
    Partitioner,
    check_clients,
    draw_examples,
    equal_sizes,
)
from fedflat.errors import UserError
from fedflat.text import param


@dataclass(frozen=True)
class Pachinko(Partitioner):
    """Each client draws q ~ Dir(alpha) over coarse labels and, for each of them, r ~ Dir(beta) over its fine labels.

    For each of its examples, the client draws a coarse label from q and then one of that label's fine labels from r.
    All clients get the same number of examples, and every example is used once. An exhausted fine label is removed from
    its r, an exhausted coarse label from q, and the rest is renormalised (Li and McCallum 2006). Reddi et al. 2021
    partition CIFAR-100 in this way into 500 clients of 100 examples.
    """

    citation = "Li and McCallum 2006; Reddi et al. 2021"
    examples = ("pachinko(alpha=0.1,beta=10)",)
    alpha: float = param(0.1, "concentration over coarse labels: smaller values give clients fewer of them", above=0)
    beta: float = param(10.0, "concentration over the fine labels of a coarse one", above=0)

    def divide(self, data: LabelledExamples, clients: int | None, rng: np.random.Generator) -> list[IntArray]:
        """Draw each client's class counts with probabilities q * r, then the examples.

        Returns the indices of each client's examples in ``data``.
        """
        if data.coarse is None:
            raise UserError(
                "pachinko needs coarse labels, which this dataset lacks; use cifar100, or dirichlet instead"
            )
        number = check_clients(clients, len(data.targets))
        coarse = data.coarse  # coarse label of each fine label
        log_coarse = log_dirichlet(self.alpha, (number, int(coarse.max()) + 1), rng)  # log q, unnormalised
        log_fine = log_dirichlet(self.beta, (number, data.num_classes), rng)  # log r, unnormalised

        def priors(remaining: IntArray) -> Reals:
            """Return every client's probabilities of the fine labels that are not exhausted [clients, remaining].

            Each is q * r, where q is the client's probability of the coarse label, and r that of the fine label given
            the coarse one. Both are renormalised over the labels that remain.
            """
            coarse_labels, parents = np.unique(coarse[remaining], return_inverse=True)
            shares = softmax(log_coarse[:, coarse_labels])[:, parents]
            for parent in range(len(coarse_labels)):
                children = np.flatnonzero(parents == parent)
                shares[:, children] *= softmax(log_fine[:, remaining[children]])
            return shares

        counts = draw_class_counts(data.class_counts, equal_sizes(len(data.targets), number), priors, rng)
        return draw_examples(counts, data.targets, rng)
