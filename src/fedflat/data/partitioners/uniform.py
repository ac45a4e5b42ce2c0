"""Partitions without heterogeneity: everything at random, or everything in one place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedflat.data.partitioners.partitioner import ByClass, IntArray, Partitioner, Pool
from fedflat.data.partitioners.sizes import SIGMA, client_sizes
from fedflat.errors import UserError
from fedflat.text import param


@dataclass(frozen=True)
class Iid(ByClass):
    """Every client gets an equal share of all examples, or a lognormal one, drawn at random."""

    by_label: ClassVar[bool] = False
    sigma: float = param(0.0, SIGMA, low=0, high=10)

    def counts(self, available: IntArray, clients: int, rng: np.random.Generator) -> IntArray:
        """The class counts of consecutive blocks of a random permutation."""
        classes = len(available)
        labels = rng.permutation(np.repeat(np.arange(classes), available))
        owner = np.repeat(np.arange(clients), client_sizes(len(labels), clients, self.sigma, rng))
        return np.bincount(owner * classes + labels, minlength=clients * classes).reshape(clients, classes)


@dataclass(frozen=True)
class Centralised(Partitioner):
    """One client has everything: the reference run that federated ones are compared with."""

    by_label: ClassVar[bool] = False

    @property
    def fixes_clients(self) -> bool:
        """There is one client."""
        return True

    def divide(self, pool: Pool, clients: int | None, rng: np.random.Generator) -> list[IntArray]:
        """All examples."""
        if clients not in (None, 1):
            raise UserError(f"a centralised partition has 1 client, but {clients} were asked for; set clients to 1")
        return [np.arange(len(pool.targets))]
