"""``Partition``, the distribution of a training set over clients, and ``make_partition``, which creates one.

A partition is a function of its text, the seed and the labels.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from fedflat.data.partitioners.labels import class_counter, coarse_of_class, validation_positions
from fedflat.data.partitioners.partitioner import IntArray, LabelledExamples
from fedflat.data.partitioners.registry import partition_spec
from fedflat.data.partitioners.virtual import VirtualClients
from fedflat.errors import UserError

# Random streams; modifiers have their own.
_DIVIDE, _VALIDATION = 0x5911, 0x401D

Labels = torch.Tensor | IntArray

MAX_DESCRIBED = 1000
"""Number of lazily generated clients that hash, histogram and description cover."""


@dataclass(frozen=True, eq=False)
class Partition:
    """Which client has which training examples.

    Attributes:
        clients: sorted positions of each training client's examples; a tuple, or a lazy sequence.
        validation: sorted positions held out for validation.
        text: canonical text, e.g. ``dirichlet(alpha=0.5)``.
        seed: seed of the partition.
        unseen: positions of each client that never trains.
        thinned: positions left out by ``longtail``.
    """

    clients: Sequence[IntArray]
    validation: IntArray
    text: str
    seed: int
    unseen: tuple[IntArray, ...] = ()
    thinned: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    @property
    def described_clients(self) -> Sequence[IntArray]:
        """The clients that hash, histogram and description cover: all, or the first 1000 of a lazy sequence."""
        if not self._lazy:
            return self.clients
        return [self.clients[number] for number in range(min(len(self.clients), MAX_DESCRIBED))]

    @property
    def _lazy(self) -> bool:
        return isinstance(self.clients, VirtualClients)

    @property
    def trained_on(self) -> IntArray:
        """Sorted positions of the examples of ``described_clients``, each once."""
        return np.unique(np.concatenate(self.described_clients))

    def digest(self) -> str:
        """sha256 over the positions of all clients; for a lazy sequence, over its length and ``described_clients``."""
        digest = hashlib.sha256(f"{len(self.clients)}\n".encode() if self._lazy else b"")
        for positions in (*self.described_clients, self.validation, *self.unseen):
            digest.update(len(positions).to_bytes(8, "little"))
            digest.update(positions.astype("<i8").tobytes())
        return digest.hexdigest()

    def histogram(self, targets: Labels, num_classes: int) -> IntArray:
        """Number of examples (for masks: pixels) per client and class [described clients, classes].

        Args:
            targets: targets of the whole training set, as in ``Examples``.
            num_classes: number of classes.
        """
        count = class_counter(targets, num_classes)
        return np.stack([count(positions) for positions in self.described_clients])

    def describe(self, targets: Labels, num_classes: int) -> dict[str, Any]:
        """Summary as plain values, as written to ``partition.json``.

        ``coverage`` is the share of the examples available to training clients that at least one of them has.
        ``heterogeneity`` is the mean over clients of the total variation distance between the class distributions of
        the client and of the training set (after ``longtail``): near 0 for i.i.d. clients, (C - 1) / C for one of C
        equally frequent classes per client.

        Args:
            targets: targets of the whole training set, as in ``Examples``.
            num_classes: number of classes.
        """
        clients, count = self.described_clients, class_counter(targets, num_classes)
        histogram = np.stack([count(positions) for positions in clients])
        class_counts = count(np.arange(len(targets))) - count(self.thinned)
        class_shares = class_counts / class_counts.sum()
        client_shares = histogram / np.maximum(histogram.sum(1, keepdims=True), 1)
        sizes = np.array([len(positions) for positions in clients])
        used = len(np.unique(np.concatenate(clients)))
        available = len(targets) - len(self.validation) - len(self.thinned) - sum(map(len, self.unseen))
        return {
            "partitioner": self.text,
            "seed": self.seed,
            "hash": self.digest(),
            "clients": len(self.clients),
            "described_clients": len(clients),
            "unseen": len(self.unseen),
            "sizes": {"min": int(sizes.min()), "median": float(np.median(sizes)), "max": int(sizes.max())},
            "validation": len(self.validation),
            "thinned": len(self.thinned),
            "coverage": used / available,
            "duplicates": int(sizes.sum()) - used,
            "classes_per_client": float(np.count_nonzero(histogram, axis=1).mean()),
            "heterogeneity": float(np.abs(client_shares - class_shares).sum(1).mean() / 2),
            "histogram": histogram.tolist(),
        }


def canonical_partition(text: str) -> str:
    """The shortest text that names the same partition.

    >>> canonical_partition(" dirichlet( alpha = 0.10 )")
    'dirichlet'
    >>> canonical_partition("dirichlet(alpha=1)+held-out+longtail(factor=50)")
    'dirichlet(alpha=1.0)+longtail(factor=50.0)+held-out'
    """
    return partition_spec(text).text


def full_partition(text: str) -> str:
    """The text of a partition with all parameters.

    >>> full_partition("iid+held-out")
    'iid(sigma=0.0)+held-out(share=0.2)'
    """
    return partition_spec(text).full_text


def fixes_clients(text: str) -> bool:
    """Whether a partition determines the number of clients itself, so that none need be given.

    >>> fixes_clients("natural+held-out"), fixes_clients("virtual(clients=100000)"), fixes_clients("iid")
    (True, True, False)
    """
    return partition_spec(text).partitioner.fixes_clients


def make_partition(
    text: str,
    targets: Labels,
    num_classes: int,
    clients: int | None,
    seed: int,
    validation: float = 0.0,
    groups: Labels | None = None,
    coarse: Labels | None = None,
) -> Partition:
    """Distribute training examples over clients, after holding out a share of every class for validation.

    Args:
        text: the partition, e.g. ``dirichlet(alpha=0.1)+held-out``.
        targets: targets of the training set, as in ``Examples``.
        num_classes: number of classes.
        clients: number of clients; None if the partition determines it.
        seed: non-negative seed.
        validation: share of every class to hold out, from 0 to below 1.
        groups: natural client of each example [n].
        coarse: superclass of each example [n].
    """
    spec = partition_spec(text)
    if seed < 0:
        raise UserError(f"the partition seed is {seed}; expected at least 0")
    labels = np.asarray(targets)
    if labels.ndim == 1:
        labels = labels.astype(np.int64)
    elif spec.by_label:
        raise UserError(
            f"the partition {spec.text} needs one label per example, but each has {labels[0].size}; "
            "use iid, natural or centralised"
        )
    else:
        labels, num_classes = np.zeros(len(labels), dtype=np.int64), 1
    held_out = validation_positions(labels, validation, _stream(seed, _VALIDATION))
    rest = np.flatnonzero(~np.isin(np.arange(len(labels)), held_out))
    positions = rest
    for modifier in spec.modifiers.values():
        if len(positions):
            selected = modifier.select(labels[positions], num_classes, _stream(seed, modifier.stream))
            positions = positions[selected]
    thinned = np.setdiff1d(rest, positions)
    superclass = None if coarse is None else coarse_of_class(labels, np.asarray(coarse), num_classes)
    data = LabelledExamples(labels[positions], num_classes, coarse=superclass, positions=positions, total=len(labels))
    if groups is not None:
        names, numbers = np.unique(np.asarray(groups), return_inverse=True)
        data = replace(data, groups=numbers[positions], num_groups=len(names))
    divided = spec.partitioner.divide(data, clients, _stream(seed, _DIVIDE))
    if isinstance(divided, VirtualClients):
        return Partition(divided.renumbered(positions), held_out, spec.text, seed, thinned=thinned)
    seen, unseen = tuple(positions[indices] for indices in divided), tuple[IntArray]()
    for modifier in spec.modifiers.values():
        seen, removed = modifier.separate(seen, _stream(seed, modifier.stream))
        unseen += removed
    return Partition(seen, held_out, spec.text, seed, unseen, thinned)


def _stream(seed: int, purpose: int) -> np.random.Generator:
    return np.random.default_rng(np.random.SeedSequence([seed, purpose]))
