"""Base classes of partitioners and of partition modifiers.

Most partitioners only decide how many examples of each class every client gets; ``draw_examples`` then draws them. The
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
Clients = tuple[IntArray, ...]
"""Positions of the examples of each client."""
MAX_COUNTED_TOKENS = 1000
"""Tokens of larger vocabularies are not counted per client; their examples count as one class."""
SIGMA_HELP = "standard deviation of the logarithm of client sizes; 0: equal sizes"


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
        by_label: whether every example must have exactly one label.
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
    def counts(self, examples_per_class: IntArray, clients: int, rng: np.random.Generator) -> IntArray:
        """Decide how many examples of each class every client gets.

        Args:
            examples_per_class: number of examples of each class [classes].
            clients: number of clients.
            rng: source of randomness.

        Returns:
            Counts [clients, classes].
        """

    def divide(self, data: LabelledExamples, clients: int | None, rng: np.random.Generator) -> list[IntArray]:
        """Draw every client's examples at random, according to ``counts``; returns their indices in ``data``."""
        number = check_clients(clients, len(data.targets))
        return draw_examples(self.counts(data.class_counts, number, rng), data.targets, rng)


class PartitionModifier(ABC):
    """Modifies a partition, to which it is added with ``+``; a frozen dataclass whose fields are its parameters.

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

    def select_examples(self, targets: IntArray, num_classes: int, rng: np.random.Generator) -> IntArray:
        """Before partitioning, return the sorted indices of the examples to keep, given their classes [n]."""
        return np.arange(len(targets))

    def hold_out_clients(self, clients: Clients, rng: np.random.Generator) -> tuple[Clients, Clients]:
        """After partitioning, return the clients that train and those that never do."""
        return clients, ()


def check_clients(clients: int | None, examples: int | None = None) -> int:
    """Return the number of clients, after checking that it is at least 1 and at most ``examples``, if given."""
    if clients is None:
        raise UserError("this partition needs a number of clients; set it: --clients N, in Python clients=N")
    if clients < 1:
        raise UserError(f"this partition needs at least 1 client, not {clients}")
    if examples is not None and clients > examples:
        raise UserError(
            f"{examples} training examples are too few for {clients} clients; set their number to {examples} or less: "
            "--clients N, in Python clients=N (default: 50)"
        )
    return clients


def draw_examples(counts: IntArray, targets: IntArray, rng: np.random.Generator) -> list[IntArray]:
    """Draw examples of each class without replacement; an exhausted class starts again from its first example.

    Args:
        counts: number of examples per client and class [clients, classes].
        targets: class of each example [n].
        rng: source of randomness.

    Returns:
        For each client, the sorted indices of its examples.
    """
    clients, classes = counts.shape
    shuffled = rng.permutation(len(targets))
    sorted_by_class = shuffled[np.argsort(targets[shuffled], kind="stable")]
    by_class = np.split(sorted_by_class, np.cumsum(np.bincount(targets, minlength=classes))[:-1])
    # np.resize truncates a class, or repeats it if more examples are wanted than exist.
    drawn = np.concatenate([np.resize(members, total) for members, total in zip(by_class, counts.sum(0), strict=True)])
    # ``drawn`` is ordered by class; within each class, the first examples go to client 0, the next to client 1, ...
    client_of_drawn = np.repeat(np.tile(np.arange(clients), classes), counts.T.ravel())
    sorted_by_client = drawn[np.lexsort((drawn, client_of_drawn))].astype(np.int64)
    return np.split(sorted_by_client, np.cumsum(counts.sum(1))[:-1])


def class_counter(targets: torch.Tensor | IntArray, num_classes: int) -> Callable[[IntArray], IntArray]:
    """Return a function that counts the classes among some examples, for the class histogram of a client.

    The function takes positions of examples in the training set, and returns the number of examples, or of pixels if
    targets are masks, of each class [classes].

    Args:
        targets: targets of the whole training set: classes [n], labels [n, labels], numbers, or masks.
        num_classes: number of classes.
    """
    labels = np.asarray(targets)
    if labels.dtype.kind == "f":  # regression: no classes, so all examples count as one class
        return lambda positions: np.array([len(positions)])
    if labels.dtype.kind == "b" and labels.ndim == 2:  # multi-label: an example counts once for each of its labels
        return lambda positions: labels[positions].sum(0)
    if labels.ndim == 2 and num_classes > MAX_COUNTED_TOKENS:  # a histogram over the vocabulary would be too large
        return lambda positions: np.array([len(positions)])
    if labels.ndim < 3:  # one class per example, or per token of a sequence; negative tokens do not count

        def count_labels(positions: IntArray) -> IntArray:
            chosen = labels[positions].ravel()
            return np.bincount(chosen[chosen >= 0], minlength=num_classes)

        return count_labels
    # Masks [n, height, width]: count the pixels of each mask now, one mask at a time, as all masks may exceed memory.
    # The slice drops ignored pixels, whose label is above all classes.
    pixel_counts = np.stack([np.bincount(mask.ravel(), minlength=num_classes)[:num_classes] for mask in labels])
    return lambda positions: pixel_counts[positions].sum(0)


def coarse_of_class(labels: IntArray, coarse: IntArray, num_classes: int) -> IntArray:
    """Return the superclass of each class [classes], numbered from 0; -1 for classes without examples.

    Args:
        labels: class of each example [n].
        coarse: superclass of each example [n], in any numbering.
        num_classes: number of classes.
    """
    _, superclasses = np.unique(coarse, return_inverse=True)
    superclass_of_class = np.full(num_classes, -1)
    superclass_of_class[labels] = superclasses
    conflicts = superclass_of_class[labels] != superclasses
    if conflicts.any():
        raise UserError(f"class {labels[conflicts.argmax()]} has examples of two coarse labels; expected one per class")
    return superclass_of_class


def validation_positions(labels: IntArray, share: float, rng: np.random.Generator) -> IntArray:
    """Draw the examples that are set aside for validation, and return their sorted positions.

    Args:
        labels: class of each example [n].
        share: share of every class to draw, rounded to a whole number of examples.
        rng: source of randomness.
    """
    if not 0 <= share < 1:
        raise UserError(f"the validation share is {share}; expected at least 0 and below 1")
    drawn = [np.zeros(0, dtype=np.int64)]  # np.concatenate needs at least one array
    for label in np.unique(labels):
        shuffled = rng.permutation(np.flatnonzero(labels == label))
        drawn.append(shuffled[: round(share * len(shuffled))])
    return np.sort(np.concatenate(drawn))


def equal_sizes(total: int, parts: int) -> IntArray:
    """Split ``total`` into ``parts`` integers that differ by at most one, larger ones first.

    >>> equal_sizes(11, 4).tolist()
    [3, 3, 3, 2]
    """
    return total // parts + (np.arange(parts) < total % parts)


def client_sizes(total: int, clients: int, sigma: float, rng: np.random.Generator) -> IntArray:
    """Split ``total`` examples over clients in proportion to exp(sigma * N(0, 1)) (Acar et al. 2021).

    Every client gets one example first, so none is empty; the rest is apportioned by largest remainders. With
    sigma = 0, sizes are equal.

    Args:
        total: number of examples.
        clients: number of clients.
        sigma: standard deviation of the logarithm of client sizes.
        rng: source of randomness.

    Returns:
        The number of examples of each client [clients].
    """
    if sigma == 0:
        return equal_sizes(total, clients)
    logs = sigma * rng.standard_normal(clients)
    weights = np.exp(logs - logs.max())  # the shift avoids overflow and cancels below
    exact = (total - clients) * weights / weights.sum()
    sizes: IntArray = np.floor(exact).astype(np.int64) + 1
    largest_remainder_first = np.argsort(np.floor(exact) - exact, kind="stable")
    unassigned = total - sizes.sum()
    sizes[largest_remainder_first[:unassigned]] += 1
    return sizes
