"""Pachinko allocation: label skew over two levels of labels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedflat.data.partitioners.dirichlet import Reals, log_dirichlet, ration, softmax
from fedflat.data.partitioners.partitioner import (
    IntArray,
    LabelledExamples,
    Partitioner,
    check_clients,
    deal,
    equal_sizes,
)
from fedflat.errors import UserError
from fedflat.text import param


@dataclass(frozen=True)
class Pachinko(Partitioner):
    """Every client draws q ~ Dir(alpha) over coarse labels and r ~ Dir(beta) over the fine labels of each.

    Its examples are drawn by q * r. Clients are equally large and every example is used once. An exhausted fine label
    is removed from its r, an exhausted coarse label from q, and the rest is renormalised (Li and McCallum 2006;
    Reddi et al. 2021: CIFAR-100 as 500 clients of 100 examples).
    """

    citation: ClassVar[str] = "Li and McCallum 2006; Reddi et al. 2021"
    examples: ClassVar[tuple[str, ...]] = ("pachinko(alpha=0.1,beta=10)",)
    alpha: float = param(0.1, "concentration over coarse labels: smaller values give clients fewer of them", above=0)
    beta: float = param(10.0, "concentration over the fine labels of a coarse one", above=0)

    def divide(self, data: LabelledExamples, clients: int | None, rng: np.random.Generator) -> list[IntArray]:
        if data.coarse is None:
            raise UserError(
                "pachinko needs coarse labels, which this dataset lacks; use cifar100, or dirichlet instead"
            )
        number, coarse = check_clients(clients, len(data.targets)), data.coarse
        log_coarse = log_dirichlet(self.alpha, (number, int(coarse.max()) + 1), rng)
        log_fine = log_dirichlet(self.beta, (number, data.num_classes), rng)

        def priors(open_classes: IntArray) -> Reals:
            """q over the remaining coarse labels, times r over the remaining fine labels of each."""
            left, parent = np.unique(coarse[open_classes], return_inverse=True)
            shares = softmax(log_coarse[:, left])[:, parent]
            for index in range(len(left)):
                children = np.flatnonzero(parent == index)
                shares[:, children] *= softmax(log_fine[:, open_classes[children]])
            return shares

        counts = ration(data.class_counts, equal_sizes(len(data.targets), number), priors, rng)
        return deal(counts, data.targets, rng)
