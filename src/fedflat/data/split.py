"""Dividing a training set among clients: the dialects by name, and the split that comes out.

A split is a function of its text, the seed and the labels. It names its dialect, hashes its index lists, and says what it did to the
data: how large and how different the clients are, which share of the examples is used, and how many are used twice.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fedflat.data.dialects.dialect import Dialect, IntArray, Pool
from fedflat.data.dialects.dirichlet import Dirichlet, DirichletClasswise, DirichletReuse
from fedflat.data.dialects.natural import Natural
from fedflat.data.dialects.pathological import Pathological
from fedflat.data.dialects.uniform import Centralised, Iid
from fedflat.errors import UserError, one_of
from fedflat.text import changed, make, parse_one, show

SPLITS: dict[str, type[Dialect]] = {
    "iid": Iid,
    "dirichlet": Dirichlet,
    "dirichlet-reuse": DirichletReuse,
    "dirichlet-classwise": DirichletClasswise,
    "pathological": Pathological,
    "natural": Natural,
    "centralised": Centralised,
}

# The purposes for which a split draws numbers: each has its own stream, so that a validation set does not disturb the other.
_DIVIDE, _HOLD_OUT = 0x5911, 0x401D

Labels = torch.Tensor | IntArray


@dataclass(frozen=True, eq=False)
class Split:
    """Who has which training examples: sorted positions for each client, and those held out for validation."""

    clients: tuple[IntArray, ...]
    validation: IntArray
    text: str
    seed: int

    def digest(self) -> str:
        """sha256 over the index lists."""
        digest = hashlib.sha256()
        for indices in (*self.clients, self.validation):
            digest.update(len(indices).to_bytes(8, "little"))
            digest.update(indices.astype("<i8").tobytes())
        return digest.hexdigest()

    def histogram(self, targets: Labels, num_classes: int) -> IntArray:
        """How many examples of each class every client has, [clients, classes]."""
        labels = np.asarray(targets)
        return np.stack([np.bincount(labels[indices], minlength=num_classes) for indices in self.clients])

    def describe(self, targets: Labels, num_classes: int) -> dict[str, Any]:
        """The split as plain values, as ``split.json`` keeps it.

        ``heterogeneity`` is the mean over clients of the total variation distance between the class distribution of the client and that
        of all training examples: near 0 for an i.i.d. split, (C - 1) / C when every client has one of C equally frequent classes.
        """
        histogram, everything = self.histogram(targets, num_classes), np.bincount(np.asarray(targets), minlength=num_classes)
        sizes, used = histogram.sum(1), len(np.unique(np.concatenate(self.clients)))
        distance = np.abs(histogram / sizes[:, None] - everything / everything.sum()).sum(1) / 2
        return {
            "dialect": self.text,
            "seed": self.seed,
            "hash": self.digest(),
            "clients": len(self.clients),
            "sizes": {"min": int(sizes.min()), "median": float(np.median(sizes)), "max": int(sizes.max())},
            "validation": len(self.validation),
            "coverage": used / (int(everything.sum()) - len(self.validation)),
            "duplicates": int(sizes.sum()) - used,
            "classes_per_client": float(np.count_nonzero(histogram, axis=1).mean()),
            "heterogeneity": float(distance.mean()),
            "histogram": histogram.tolist(),
        }


def read_split(text: str) -> tuple[str, Dialect]:
    """The name and the checked dialect of a text such as ``dirichlet(alpha=0.1)``."""
    call = parse_one(text)
    if call.name not in SPLITS:
        raise one_of("split", call.name, SPLITS, "fedflat data")
    return call.name, make(SPLITS[call.name], call, "split")


def canonical_split(text: str) -> str:
    """The shortest text of a split.

    >>> canonical_split(" dirichlet( alpha = 0.10 )"), canonical_split("dirichlet(alpha=1)")
    ('dirichlet', 'dirichlet(alpha=1.0)')
    """
    name, dialect = read_split(text)
    return show(name, changed(dialect))


def partition(
    text: str,
    targets: Labels,
    num_classes: int,
    clients: int | None,
    seed: int,
    validation: float = 0.0,
    groups: Labels | None = None,
) -> Split:
    """Divide training examples among clients, after holding out a share of every class for validation; a function of its arguments."""
    name, dialect = read_split(text)
    if seed < 0:
        raise UserError(f"the seed of a split must be at least 0, not {seed}")
    labels = np.asarray(targets).astype(np.int64)
    held_out = _hold_out(labels, validation, seed)
    rest = np.flatnonzero(~np.isin(np.arange(len(labels)), held_out))
    pool = Pool(labels[rest], num_classes)
    if groups is not None:
        names, numbers = np.unique(np.asarray(groups), return_inverse=True)
        pool = Pool(labels[rest], num_classes, numbers[rest], len(names))
    parts = dialect.divide(pool, clients, _stream(seed, _DIVIDE))
    return Split(tuple(rest[part] for part in parts), held_out, show(name, changed(dialect)), seed)


def _hold_out(labels: IntArray, share: float, seed: int) -> IntArray:
    """A share of every class, to the nearest whole number, drawn at random."""
    if not 0 <= share < 1:
        raise UserError(f"the share held out for validation must be at least 0 and below 1, not {share}")
    rng = _stream(seed, _HOLD_OUT)
    shuffled = [rng.permutation(np.flatnonzero(labels == label)) for label in np.unique(labels)]
    return np.sort(np.concatenate([members[: round(share * len(members))] for members in shuffled])) if shuffled else labels


def _stream(seed: int, purpose: int) -> np.random.Generator:
    return np.random.default_rng(np.random.SeedSequence([seed, purpose]))
