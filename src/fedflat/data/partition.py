"""Dividing a training set among clients: the partition that a text names, and what it did to the data.

A partition is a function of its text, the seed and the labels. It names its partitioner, hashes its index lists, and says what it did to the
data: how large and how different the clients are, which share of the examples is used, and how many are used twice.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from fedflat.data.partitioners.labels import class_counter, coarse_of_class, held_out_share, one_label_each
from fedflat.data.partitioners.partitioner import IntArray, Partitioner, Pool
from fedflat.data.partitioners.recipe import PARTITION_MODIFIERS, PARTITIONERS, read_recipe
from fedflat.data.partitioners.virtual import VirtualClients
from fedflat.errors import UserError

__all__ = [
    "PARTITIONERS",
    "PARTITION_MODIFIERS",
    "Partition",
    "canonical_partition",
    "fixes_clients",
    "full_partition",
    "make_partition",
    "read_partition",
]

# The purposes for which a partition draws numbers: each has its own stream, so that none disturbs another.
_DIVIDE, _HOLD_OUT, _LONG_TAIL, _UNSEEN = 0x5911, 0x401D, 0x7A11, 0x0B5E

Labels = torch.Tensor | IntArray

LOOKED_AT = 1000
"""How many clients, the first ones, are looked at where clients are drawn only when asked for."""


def _nothing() -> IntArray:
    return np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, eq=False)
class Partition:
    """Who has which training examples: sorted positions for each client, and those that no client trains on."""

    clients: Sequence[IntArray]
    """The clients that train; a tuple, or a lazy sequence whose memory does not depend on how many there are."""
    validation: IntArray
    text: str
    seed: int
    unseen: tuple[IntArray, ...] = ()
    """The clients that never train."""
    thinned: IntArray = field(default_factory=_nothing)
    """The examples that a long tail left out."""

    @property
    def looked_at(self) -> Sequence[IntArray]:
        """The clients that hash, histogram and description look at: all, or the first 1000 where they are drawn only when asked for."""
        return [self.clients[i] for i in range(min(len(self.clients), LOOKED_AT))] if self._lazy else self.clients

    @property
    def _lazy(self) -> bool:
        return isinstance(self.clients, VirtualClients)

    @property
    def trained_on(self) -> IntArray:
        """The examples of the clients that are looked at, each once: neither validation examples nor those of clients that never train."""
        return np.unique(np.concatenate(self.looked_at))

    def digest(self) -> str:
        """sha256 over the index lists (and, where clients are drawn only when asked for, their number)."""
        digest = hashlib.sha256(f"{len(self.clients)}\n".encode() if self._lazy else b"")
        for indices in (*self.looked_at, self.validation, *self.unseen):
            digest.update(len(indices).to_bytes(8, "little"))
            digest.update(indices.astype("<i8").tobytes())
        return digest.hexdigest()

    def histogram(self, targets: Labels, num_classes: int) -> IntArray:
        """How many examples of each class every client has that is looked at, [clients, classes]; of masks, how many pixels."""
        count = class_counter(targets, num_classes)
        return np.stack([count(indices) for indices in self.looked_at])

    def describe(self, targets: Labels, num_classes: int) -> dict[str, Any]:
        """The partition as plain values, as ``partition.json`` keeps it.

        ``coverage`` is the share of the examples that clients could train on which some client has. ``heterogeneity`` is the mean over
        clients of the total variation distance between the class distribution of the client and that of all training examples (without
        what a long tail left out): near 0 for an i.i.d. partition, (C - 1) / C when every client has one of C equally frequent classes.
        """
        clients, count = self.looked_at, class_counter(targets, num_classes)
        histogram = np.stack([count(indices) for indices in clients])
        everything = count(np.arange(len(targets))) - count(self.thinned)
        whole = everything / everything.sum()
        sizes, used = np.array([len(indices) for indices in clients]), len(np.unique(np.concatenate(clients)))
        offered = len(targets) - len(self.validation) - len(self.thinned) - sum(map(len, self.unseen))
        return {
            "partitioner": self.text,
            "seed": self.seed,
            "hash": self.digest(),
            "clients": len(self.clients),
            "looked_at": len(clients),
            "unseen": len(self.unseen),
            "sizes": {"min": int(sizes.min()), "median": float(np.median(sizes)), "max": int(sizes.max())},
            "validation": len(self.validation),
            "thinned": len(self.thinned),
            "coverage": used / offered,
            "duplicates": int(sizes.sum()) - used,
            "classes_per_client": float(np.count_nonzero(histogram, axis=1).mean()),
            "heterogeneity": float(
                np.abs(histogram / np.maximum(histogram.sum(1, keepdims=True), 1) - whole).sum(1).mean() / 2
            ),
            "histogram": histogram.tolist(),
        }


def read_partition(text: str) -> tuple[str, Partitioner]:
    """The name and the checked partitioner of a text such as ``dirichlet(alpha=0.1)``, without what is added to it."""
    recipe = read_recipe(text)
    return recipe.name, recipe.partitioner


def canonical_partition(text: str) -> str:
    """The shortest text of a partition.

    >>> canonical_partition(" dirichlet( alpha = 0.10 )"), canonical_partition("dirichlet(alpha=1)+held-out+longtail(factor=50)")
    ('dirichlet', 'dirichlet(alpha=1.0)+longtail(factor=50.0)+held-out')
    """
    return read_recipe(text).text


def full_partition(text: str) -> str:
    """The text of a partition with every parameter.

    >>> full_partition("iid+held-out")
    'iid(sigma=0.0)+held-out(share=0.2)'
    """
    return read_recipe(text).full_text


def fixes_clients(text: str) -> bool:
    """Whether a partition says itself how many clients there are, so that ``partition`` is best given none.

    >>> fixes_clients("natural+held-out"), fixes_clients("virtual(clients=100000)"), fixes_clients("iid")
    (True, True, False)
    """
    return read_recipe(text).partitioner.fixes_clients


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
    """Divide training examples among clients, after holding out a share of every class for validation; a function of its arguments.

    ``groups`` says which natural client an example belongs to, ``coarse`` which superclass.
    """
    recipe = read_recipe(text)
    if seed < 0:
        raise UserError(f"the seed of a partition must be at least 0, not {seed}")
    labels, num_classes = one_label_each(np.asarray(targets), num_classes, recipe)
    held_out = held_out_share(labels, validation, _stream(seed, _HOLD_OUT))
    rest = np.flatnonzero(~np.isin(np.arange(len(labels)), held_out))
    kept = rest
    if recipe.longtail and len(rest):
        kept = rest[recipe.longtail.kept(labels[rest], num_classes, _stream(seed, _LONG_TAIL))]
    above = None if coarse is None else coarse_of_class(labels, np.asarray(coarse), num_classes)
    pool = Pool(labels[kept], num_classes, coarse=above, positions=kept, total=len(labels))
    if groups is not None:
        names, numbers = np.unique(np.asarray(groups), return_inverse=True)
        pool = replace(pool, groups=numbers[kept], num_groups=len(names))
    parts = recipe.partitioner.divide(pool, clients, _stream(seed, _DIVIDE))
    if isinstance(parts, VirtualClients):
        return Partition(parts.renumbered(kept), held_out, recipe.text, seed, thinned=np.setdiff1d(rest, kept))
    seen, unseen = tuple(kept[part] for part in parts), tuple[IntArray]()
    if recipe.held_out:
        seen, unseen = recipe.held_out.separate(seen, _stream(seed, _UNSEEN))
    return Partition(seen, held_out, recipe.text, seed, unseen, np.setdiff1d(rest, kept))


def _stream(seed: int, purpose: int) -> np.random.Generator:
    return np.random.default_rng(np.random.SeedSequence([seed, purpose]))
