"""Long-tailed classes, before any partition."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedflat.data.partitioners.partitioner import IntArray, deal
from fedflat.text import param


@dataclass(frozen=True)
class LongTail:
    """Class c of C keeps n_max * factor^(-c / (C - 1)) examples, the others are left out before the partition (Cao et al. 2019).

    n_max is the size of the largest class. Numbers are rounded down as there, but a class keeps one example at least.
    """

    factor: float = param(100.0, "how much larger the first class is than the last", low=1)

    def counts(self, available: IntArray) -> IntArray:
        """How many examples of each class are kept.

        >>> LongTail(100.0).counts(np.full(10, 5000)).tolist()
        [5000, 2997, 1796, 1077, 645, 387, 232, 139, 83, 50]
        """
        rank = np.arange(len(available)) / max(len(available) - 1, 1)
        tail = np.floor(available.max() * self.factor**-rank * (1 + 1e-12)).astype(np.int64)
        kept: IntArray = np.minimum(available, np.maximum(tail, 1))
        return kept

    def kept(self, targets: IntArray, num_classes: int, rng: np.random.Generator) -> IntArray:
        """The positions of the examples that are kept, drawn at random within each class."""
        return deal(self.counts(np.bincount(targets, minlength=num_classes))[None, :], targets, rng)[0]
