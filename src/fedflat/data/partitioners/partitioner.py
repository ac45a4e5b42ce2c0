"""Base classes of partitioners and of partition modifiers.

Most partitioners only decide how many examples of each class every client gets; ``deal`` then draws the examples. The
class histograms therefore depend on the seed and the class counts alone, not on the order of the examples.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch

from fedflat.errors import UserError

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class LabelledExamples:
    """The examples to distribute.

    Attributes:
        targets: class of each example [n].
        num_classes: number of classes C.
        groups: natural client (0, 1, ...) of each example [n]; None if unknown.
        num_groups: number of natural clients.
        coarse: superclass (0, 1, ...) of each class [C], -1 for classes without examples; None if unknown.
        positions: position of each example in the training set [n].
        total: size of the training set.
    """

    targets: IntArray
    num_classes: int
    groups: IntArray | None = None
    num_groups: int = 0
    coarse: IntArray | None = None
    positions: IntArray | None = None
    total: int = 0

    @property
    def class_counts(self) -> IntArray:
        """Number of examples of each class [C]."""
        return np.bincount(self.targets, minlength=self.num_classes)


class Partitioner(ABC):
    """Distributes examples over clients; a frozen dataclass whose fields are the parameters of its text.

    Attributes:
        by_label: whether it uses the labels, so that every example must have exactly one.
        disjoint: whether every example belongs to at most one client.
        sizes: client sizes in words, for the documentation.
        citation: publication, for the documentation.
        examples: texts to draw in the documentation.
    """

    by_label: ClassVar[bool] = True
    disjoint: ClassVar[bool] = True
    sizes: ClassVar[str] = "equal"
    citation: ClassVar[str] = ""
    examples: ClassVar[tuple[str, ...]] = ()

    @property
    def fixes_clients(self) -> bool:
        """Whether the partitioner itself determines the number of clients."""
        return False

    @abstractmethod
    def divide(self, data: LabelledExamples, clients: int | None, rng: np.random.Generator) -> Sequence[IntArray]:
        """Distribute the examples.

        Args:
            data: the examples.
            clients: number of clients; None if the partitioner determines it.
            rng: source of randomness.

        Returns:
            For each client, the indices of its examples in ``data``.
        """


class ClassCountPartitioner(Partitioner):
    """A partitioner that is defined by how many examples of each class every client gets."""

    @abstractmethod
    def counts(self, available: IntArray, clients: int, rng: np.random.Generator) -> IntArray:
        """Number of examples per client and class.

        Args:
            available: number of examples of each class [classes].
            clients: number of clients.
            rng: source of randomness.

        Returns:
            Counts [clients, classes].
        """

    def divide(self, data: LabelledExamples, clients: int | None, rng: np.random.Generator) -> list[IntArray]:
        number = check_clients(clients, len(data.targets))
        return deal(self.counts(data.class_counts, number, rng), data.targets, rng)


class PartitionModifier(ABC):
    """Added to a partition with ``+``; a frozen dataclass whose fields are the parameters of its text.

    Attributes:
        stream: number of its own random stream.
        by_label: whether it uses the labels.
        needs_disjoint: whether it requires that clients share no examples.
        citation: publication, for the documentation.
        examples: texts to draw in the documentation.
    """

    stream: ClassVar[int]
    by_label: ClassVar[bool] = False
    needs_disjoint: ClassVar[bool] = False
    citation: ClassVar[str] = ""
    examples: ClassVar[tuple[str, ...]] = ()

    def select(self, targets: IntArray, num_classes: int, rng: np.random.Generator) -> IntArray:
        """Before partitioning: sorted indices of the examples to keep, given their classes [n]."""
        return np.arange(len(targets))

    def separate(
        self, clients: tuple[IntArray, ...], rng: np.random.Generator
    ) -> tuple[tuple[IntArray, ...], tuple[IntArray, ...]]:
        """After partitioning: the clients that train, and those that never do."""
        return clients, ()


def check_clients(clients: int | None, examples: int) -> int:
    """The number of clients, which must be at least 1 and at most the number of examples."""
    if clients is None or clients < 1:
        raise UserError(f"this partition needs at least 1 client, not {clients}")
    if clients > examples:
        raise UserError(f"{examples} training examples are too few for {clients} clients; expected at least one each")
    return clients


def deal(counts: IntArray, targets: IntArray, rng: np.random.Generator) -> list[IntArray]:
    """Draw examples without replacement; an exhausted class starts again from its first example.

    Args:
        counts: number of examples per client and class [clients, classes].
        targets: class of each example [n].
        rng: source of randomness.

    Returns:
        For each client, the sorted indices of its examples.
    """
    clients, classes = counts.shape
    shuffled = rng.permutation(len(targets))
    by_class = np.split(
        shuffled[np.argsort(targets[shuffled], kind="stable")], np.cumsum(np.bincount(targets, minlength=classes))[:-1]
    )
    dealt = np.concatenate([np.resize(members, asked) for members, asked in zip(by_class, counts.sum(0), strict=True)])
    owner = np.repeat(np.tile(np.arange(clients), classes), counts.T.ravel())
    by_owner = dealt[np.lexsort((dealt, owner))].astype(np.int64)
    return np.split(by_owner, np.cumsum(counts.sum(1))[:-1])


def class_counter(targets: torch.Tensor | IntArray, num_classes: int) -> Callable[[IntArray], IntArray]:
    """A function from positions to class counts [classes].

    Masks are counted once, one by one, since together they may exceed memory; ignored pixels are left out.
    """
    labels = np.asarray(targets)
    if labels.ndim < 3:
        return lambda rows: np.bincount(labels[rows].ravel(), minlength=num_classes)
    counts = np.stack([np.bincount(mask.ravel(), minlength=num_classes)[:num_classes] for mask in labels])
    return lambda rows: counts[rows].sum(0)


def coarse_of_class(labels: IntArray, coarse: IntArray, num_classes: int) -> IntArray:
    """Superclass of each class [classes], numbered from 0; -1 for classes without examples."""
    numbers = np.unique(coarse, return_inverse=True)[1]
    of_class = np.full(num_classes, -1)
    of_class[labels] = numbers
    wrong = of_class[labels] != numbers
    if wrong.any():
        raise UserError(f"class {labels[wrong.argmax()]} has examples of two coarse labels; expected one per class")
    return of_class


def validation_positions(labels: IntArray, share: float, rng: np.random.Generator) -> IntArray:
    """Sorted positions of a random ``share`` of every class, rounded to the nearest integer."""
    if not 0 <= share < 1:
        raise UserError(f"the validation share is {share}; expected at least 0 and below 1")
    shuffled = [rng.permutation(np.flatnonzero(labels == label)) for label in np.unique(labels)]
    if not shuffled:
        return labels
    return np.sort(np.concatenate([members[: round(share * len(members))] for members in shuffled]))


SIGMA_HELP = "standard deviation of the logarithm of client sizes; 0: equal sizes"


def equal_sizes(total: int, parts: int) -> IntArray:
    """``total`` as ``parts`` integers that differ by at most one, larger ones first.

    >>> equal_sizes(11, 4).tolist()
    [3, 3, 3, 2]
    """
    return total // parts + (np.arange(parts) < total % parts)


def client_sizes(total: int, parts: int, sigma: float, rng: np.random.Generator) -> IntArray:
    """``total`` as ``parts`` integers in proportion to exp(sigma * N(0, 1)) (Acar et al. 2021); equal for sigma = 0.

    Every client gets one example first, so none is empty; the rest is apportioned by largest remainders.
    """
    if sigma == 0:
        return equal_sizes(total, parts)
    logs = sigma * rng.standard_normal(parts)
    weights = np.exp(logs - logs.max())
    exact = (total - parts) * weights / weights.sum()
    sizes: IntArray = np.floor(exact).astype(np.int64) + 1
    by_remainder = np.argsort(np.floor(exact) - exact, kind="stable")
    sizes[by_remainder[: total - sizes.sum()]] += 1
    return sizes
