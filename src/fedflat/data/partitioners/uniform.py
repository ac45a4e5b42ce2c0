"""Partitions without heterogeneity: i.i.d. clients, or a single client."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

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
    """Every client gets random examples; client sizes are equal, or lognormal with ``sigma``."""

    by_label: ClassVar[bool] = False
    sizes: ClassVar[str] = "equal or lognormal"
    citation: ClassVar[str] = "McMahan et al. 2017"
    examples: ClassVar[tuple[str, ...]] = ("iid", "iid(sigma=0.5)")
    sigma: float = param(0.0, SIGMA_HELP, low=0, high=10)

    def counts(self, available: IntArray, clients: int, rng: np.random.Generator) -> IntArray:
        classes = len(available)
        labels = rng.permutation(np.repeat(np.arange(classes), available))
        owner = np.repeat(np.arange(clients), client_sizes(len(labels), clients, self.sigma, rng))
        return np.bincount(owner * classes + labels, minlength=clients * classes).reshape(clients, classes)


@dataclass(frozen=True)
class Centralised(Partitioner):
    """A single client has all examples: the reference for federated runs."""

    by_label: ClassVar[bool] = False
    sizes: ClassVar[str] = "all examples"
    citation: ClassVar[str] = "the centralised reference run"
    examples: ClassVar[tuple[str, ...]] = ("centralised",)

    @property
    def fixes_clients(self) -> bool:
        return True

    def divide(self, data: LabelledExamples, clients: int | None, rng: np.random.Generator) -> list[IntArray]:
        if clients not in (None, 1):
            raise UserError(f"a centralised partition has 1 client, not {clients}; set clients to 1")
        return [np.arange(len(data.targets))]
