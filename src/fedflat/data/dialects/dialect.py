"""What the dialects have in common.

Most dialects only say how many examples of each class every client gets, a matrix of counts; which examples those are is then left
to chance, in one place (``deal``). So the class histograms depend on the seed and the class counts alone, never on the order in
which the examples happen to lie.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedflat.errors import UserError

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Pool:
    """The examples that are to be divided: the class of each, and its natural client (0, 1, ...) where there is one."""

    targets: IntArray
    num_classes: int
    groups: IntArray | None = None
    num_groups: int = 0


class Dialect(ABC):
    """A way to divide a training set among clients."""

    @abstractmethod
    def divide(self, pool: Pool, clients: int | None, rng: np.random.Generator) -> list[IntArray]:
        """The positions in the pool that each client gets."""


class ByClass(Dialect):
    """A dialect that is a matrix of counts."""

    @abstractmethod
    def counts(self, available: IntArray, clients: int, rng: np.random.Generator) -> IntArray:
        """How many examples of each class every client gets, [clients, classes], given how many of each class there are."""

    def divide(self, pool: Pool, clients: int | None, rng: np.random.Generator) -> list[IntArray]:
        """The examples dealt out by the matrix of counts."""
        if clients is None or clients < 1:
            raise UserError(f"this split needs a number of clients of at least 1, not {clients}")
        if clients > len(pool.targets):
            raise UserError(
                f"{len(pool.targets)} training examples cannot be divided among {clients} clients; expected at most one client each"
            )
        available = np.bincount(pool.targets, minlength=pool.num_classes)
        return deal(self.counts(available, clients, rng), pool.targets, rng)


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


def equal_sizes(total: int, parts: int) -> IntArray:
    """``total`` in ``parts`` whole numbers that differ by at most one, the larger ones first.

    >>> equal_sizes(11, 4).tolist()
    [3, 3, 3, 2]
    """
    return total // parts + (np.arange(parts) < total % parts)
