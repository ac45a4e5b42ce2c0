"""Long-tailed class frequencies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedflat.data.partitioners.partitioner import IntArray, PartitionModifier, deal
from fedflat.text import param


@dataclass(frozen=True)
class LongTail(PartitionModifier):
    """Before partitioning, class c of C keeps n_max * factor^(-c / (C - 1)) examples (Cao et al. 2019).

    n_max is the size of the largest class. Counts are rounded down, but every class keeps at least one example.
    """

    stream: ClassVar[int] = 0x7A11
    by_label: ClassVar[bool] = True
    citation: ClassVar[str] = "Cao et al. 2019"
    examples: ClassVar[tuple[str, ...]] = ("iid+longtail(factor=10)", "dirichlet(alpha=0.1)+longtail(factor=10)")
    factor: float = param(100.0, "size of the first class relative to the last", low=1)

    def counts(self, available: IntArray) -> IntArray:
        """Number of examples of each class to keep, given how many there are [C].

        >>> LongTail(100.0).counts(np.full(10, 5000)).tolist()
        [5000, 2997, 1796, 1077, 645, 387, 232, 139, 83, 50]
        """
        rank = np.arange(len(available)) / max(len(available) - 1, 1)
        tail = np.floor(available.max() * self.factor**-rank * (1 + 1e-12)).astype(np.int64)
        counts: IntArray = np.minimum(available, np.maximum(tail, 1))
        return counts

    def select(self, targets: IntArray, num_classes: int, rng: np.random.Generator) -> IntArray:
        return deal(self.counts(np.bincount(targets, minlength=num_classes))[None, :], targets, rng)[0]
