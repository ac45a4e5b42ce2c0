"""Splits without heterogeneity: everything at random, or everything in one place."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedflat.data.dialects.dialect import ByClass, Dialect, IntArray, Pool, equal_sizes
from fedflat.errors import UserError


@dataclass(frozen=True)
class Iid(ByClass):
    """Every client gets an equal share of all examples, drawn at random."""

    def counts(self, available: IntArray, clients: int, rng: np.random.Generator) -> IntArray:
        """The class counts of equal blocks of a random permutation."""
        classes = len(available)
        labels = rng.permutation(np.repeat(np.arange(classes), available))
        owner = np.repeat(np.arange(clients), equal_sizes(len(labels), clients))
        return np.bincount(owner * classes + labels, minlength=clients * classes).reshape(clients, classes)


@dataclass(frozen=True)
class Centralised(Dialect):
    """One client has everything: the reference run that federated ones are compared with."""

    def divide(self, pool: Pool, clients: int | None, rng: np.random.Generator) -> list[IntArray]:
        """All examples."""
        if clients not in (None, 1):
            raise UserError(f"a centralised split has 1 client, but {clients} were asked for; set clients to 1")
        return [np.arange(len(pool.targets))]
