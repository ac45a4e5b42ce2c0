"""Pachinko allocation: label skew over two levels of labels."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedflat.data.partitioners.dirichlet import Reals, log_dirichlet, ration, softmax
from fedflat.data.partitioners.partitioner import IntArray, Partitioner, Pool, checked_clients, deal
from fedflat.data.partitioners.sizes import equal_sizes
from fedflat.errors import UserError
from fedflat.text import param


@dataclass(frozen=True)
class Pachinko(Partitioner):
    """Every client draws q ~ Dir(alpha) over the coarse labels and r ~ Dir(beta) over the fine labels of each, then its examples by q * r.

    Clients are equally large and every example is used once. A fine label that runs out is struck from its r, a coarse label with
    nothing left from q, and the rest renormalised (Li and McCallum 2006; Reddi et al. 2021, appendix: CIFAR-100 as 500 x 100).
    """

    alpha: float = param(0.1, "concentration over coarse labels: the smaller, the fewer of them a client has", above=0)
    beta: float = param(10.0, "concentration over the fine labels of a coarse one", above=0)

    def divide(self, pool: Pool, clients: int | None, rng: np.random.Generator) -> list[IntArray]:
        """The examples dealt out by what rationing leaves of everyone's wishes."""
        if pool.coarse is None:
            raise UserError(
                "pachinko needs coarse labels, which this dataset does not have; choose cifar100, or the partition dirichlet"
            )
        number, coarse = checked_clients(clients, len(pool.targets)), pool.coarse
        log_coarse = log_dirichlet(self.alpha, (number, int(coarse.max()) + 1), rng)
        log_fine = log_dirichlet(self.beta, (number, pool.num_classes), rng)

        def priors(open_classes: IntArray) -> Reals:
            """q over the coarse labels that are left, times r within each over the fine ones that are left."""
            left, parent = np.unique(coarse[open_classes], return_inverse=True)
            shares = softmax(log_coarse[:, left])[:, parent]
            for index in range(len(left)):
                children = np.flatnonzero(parent == index)
                shares[:, children] *= softmax(log_fine[:, open_classes[children]])
            return shares

        available = np.bincount(pool.targets, minlength=pool.num_classes)
        return deal(ration(available, equal_sizes(len(pool.targets), number), priors, rng), pool.targets, rng)
