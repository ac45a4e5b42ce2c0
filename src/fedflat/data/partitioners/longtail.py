"""Long-tailed class frequencies."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedflat.data.partitioners.partitioner import IntArray, PartitionModifier, draw_examples
from fedflat.text import param


@dataclass(frozen=True)
class LongTail(PartitionModifier):
    """Before partitioning, class c of C keeps n_max * factor^(-c / (C - 1)) examples (Cao et al. 2019).

    Classes c are counted from 0, and n_max is the size of the largest class. The number of examples is rounded down,
    but every class keeps at least one example.
    """

    stream = 0x7A11
    by_label = True
    citation = "Cao et al. 2019"
    examples = ("iid+longtail(factor=10)", "dirichlet(alpha=0.1)+longtail(factor=10)")
    factor: float = param(100.0, "size of the first class relative to the last", low=1)

    def counts(self, examples_per_class: IntArray) -> IntArray:
        """Return the number of examples of each class to keep [C], given how many there are [C].

        >>> LongTail(100.0).counts(np.full(10, 5000)).tolist()
        [5000, 2997, 1796, 1077, 645, 387, 232, 139, 83, 50]
        """
        exponent = np.arange(len(examples_per_class)) / max(len(examples_per_class) - 1, 1)
        # The factor above 1 keeps rounding errors from turning an integer into the one below it.
        tail = np.floor(examples_per_class.max() * self.factor**-exponent * (1 + 1e-12)).astype(np.int64)
        counts: IntArray = np.minimum(examples_per_class, np.maximum(tail, 1))
        return counts

    def select_examples(self, targets: IntArray, num_classes: int, rng: np.random.Generator) -> IntArray:
        """Draw the examples to keep and return their sorted indices, given the class of each example [n]."""
        counts = self.counts(np.bincount(targets, minlength=num_classes))
        # draw_examples expects counts per client; here a single "client" gets all examples to keep.
        return draw_examples(counts[None, :], targets, rng)[0]
