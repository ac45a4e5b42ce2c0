"""Partitions without heterogeneity: i.i.d. clients, or a single client."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedflat.data.partitioners.partitioner import (
    SIGMA_HELP,
    ClassCountPartitioner,
    IntArray,
    LabelledExamples,
    Partitioner,
    client_sizes,
)
from fedflat.errors import UserError
from fedflat.text import param


@dataclass(frozen=True)
class Iid(ClassCountPartitioner):
    """Clients get equal numbers of random examples or, with ``sigma``, lognormally distributed numbers of them."""

    by_label = False
    sizes = "equal or lognormal"
    citation = "McMahan et al. 2017"
    examples = ("iid", "iid(sigma=0.5)")
    sigma: float = param(0.0, SIGMA_HELP, low=0, high=10)

    def counts(self, examples_per_class: IntArray, clients: int, rng: np.random.Generator) -> IntArray:
        """Deal the shuffled labels of all examples to the clients, and count the classes of each."""
        classes = len(examples_per_class)
        labels = rng.permutation(np.repeat(np.arange(classes), examples_per_class))
        client_of_label = np.repeat(np.arange(clients), client_sizes(len(labels), clients, self.sigma, rng))
        counts = np.zeros((clients, classes), dtype=np.int64)
        np.add.at(counts, (client_of_label, labels), 1)
        return counts


@dataclass(frozen=True)
class Centralised(Partitioner):
    """A single client has all training examples; such a run is the centralised reference for federated runs."""

    by_label = False
    fixes_clients = True
    clients = 1
    sizes = "all examples"
    citation = "the centralised reference run"
    examples = ("centralised",)

    def divide(self, data: LabelledExamples, clients: int | None, rng: np.random.Generator) -> list[IntArray]:
        """Give all examples in ``data`` to one client; ``clients`` may be None or 1, and ``rng`` is unused."""
        if clients not in (None, 1):
            raise UserError(f"a centralised partition has 1 client, not {clients}; set clients to 1: --clients 1")
        return [np.arange(len(data.targets))]
