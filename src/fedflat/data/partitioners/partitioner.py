"""What the partitioners have in common.

Most partitioners only say how many examples of each class every client gets, a matrix of counts; which examples those are is then left
to chance, in one place (``deal``). So the class histograms depend on the seed and the class counts alone, never on the order in
which the examples happen to lie.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from fedflat.errors import UserError

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Pool:
    """The examples that are to be divided: the class of each, and what else is known of them."""

    targets: IntArray
    num_classes: int
    groups: IntArray | None = None
    """The natural client (0, 1, ...) of each example."""
    num_groups: int = 0
    coarse: IntArray | None = None
    """The superclass (0, 1, ...) of each class, -1 for classes that do not occur."""
    positions: IntArray | None = None
    """The position of each example in the training set, which has ``total`` examples."""
    total: int = 0


class Partitioner(ABC):
    """A way to divide a training set among clients."""

    by_label: ClassVar[bool] = True
    """Whether it looks at the labels, so that every example must have exactly one."""
    disjoint: ClassVar[bool] = True
    """Whether no example is given to two clients."""

    @property
    def fixes_clients(self) -> bool:
        """Whether the partition says itself how many clients there are."""
        return False

    @abstractmethod
    def divide(self, pool: Pool, clients: int | None, rng: np.random.Generator) -> Sequence[IntArray]:
        """The positions in the pool that each client gets."""


class ByClass(Partitioner):
    """A partitioner that is a matrix of counts."""

    @abstractmethod
    def counts(self, available: IntArray, clients: int, rng: np.random.Generator) -> IntArray:
        """How many examples of each class every client gets, [clients, classes], given how many of each class there are."""

    def divide(self, pool: Pool, clients: int | None, rng: np.random.Generator) -> list[IntArray]:
        """The examples dealt out by the matrix of counts."""
        number = checked_clients(clients, len(pool.targets))
        available = np.bincount(pool.targets, minlength=pool.num_classes)
        return deal(self.counts(available, number, rng), pool.targets, rng)


def checked_clients(clients: int | None, examples: int) -> int:
    """The number of clients, refused where there is none or where there are too few examples for it."""
    if clients is None or clients < 1:
        raise UserError(f"this partition needs a number of clients of at least 1, not {clients}")
    if clients > examples:
        raise UserError(
            f"{examples} training examples cannot be divided among {clients} clients; expected at most one client each"
        )
    return clients


def deal(counts: IntArray, targets: IntArray, rng: np.random.Generator) -> list[IntArray]:
    """Hand out the examples of each class in random order; a class of which more is asked than there is starts again from its first."""
    clients, classes = counts.shape
    shuffled = rng.permutation(len(targets))
    by_class = np.split(
        shuffled[np.argsort(targets[shuffled], kind="stable")],
        np.cumsum(np.bincount(targets, minlength=classes))[:-1],
    )
    dealt = np.concatenate([np.resize(members, asked) for members, asked in zip(by_class, counts.sum(0), strict=True)])
    owner = np.repeat(np.tile(np.arange(clients), classes), counts.T.ravel())
    by_owner = dealt[np.lexsort((dealt, owner))].astype(np.int64)
    return np.split(by_owner, np.cumsum(counts.sum(1))[:-1])
