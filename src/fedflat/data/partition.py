"""``Partition``, the distribution of a training set over clients, and ``make_partition``, which creates one.

A partition is a function of its text, the seed and the labels.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from fedflat.data.description import summarise_sizes
from fedflat.data.partitioners.dirichlet import Dirichlet, DirichletClasswise, DirichletReuse
from fedflat.data.partitioners.held_out import HeldOut
from fedflat.data.partitioners.lda import DirichletLda
from fedflat.data.partitioners.listed import Listed
from fedflat.data.partitioners.longtail import LongTail
from fedflat.data.partitioners.natural import Natural
from fedflat.data.partitioners.pachinko import Pachinko
from fedflat.data.partitioners.partitioner import (
    Clients,
    IntArray,
    LabelledExamples,
    Partitioner,
    PartitionModifier,
    class_counter,
    coarse_of_class,
    validation_positions,
)
from fedflat.data.partitioners.pathological import Pathological
from fedflat.data.partitioners.uniform import Centralised, Iid
from fedflat.data.partitioners.virtual import Virtual, VirtualClients
from fedflat.errors import UserError
from fedflat.registry import Registry
from fedflat.text import changed, make, parse, show

PARTITIONERS: Registry[type[Partitioner]] = Registry("partition", see="fedflat data list")
"""Partitioners by name."""
PARTITION_MODIFIERS: Registry[type[PartitionModifier]] = Registry("partition modifier", see="fedflat data list")
"""Modifiers by name, in the order in which they are applied."""
PARTITIONERS.register("iid", Iid)
PARTITIONERS.register("dirichlet", Dirichlet)
PARTITIONERS.register("dirichlet-reuse", DirichletReuse)
PARTITIONERS.register("dirichlet-classwise", DirichletClasswise)
PARTITIONERS.register("dirichlet-lda", DirichletLda)
PARTITIONERS.register("pathological", Pathological)
PARTITIONERS.register("pachinko", Pachinko)
PARTITIONERS.register("natural", Natural)
PARTITIONERS.register("virtual", Virtual)
PARTITIONERS.register("listed", Listed)
PARTITIONERS.register("centralised", Centralised)
PARTITION_MODIFIERS.register("longtail", LongTail)
PARTITION_MODIFIERS.register("held-out", HeldOut)


@dataclass(frozen=True)
class PartitionSpec:
    """A partitioner with its modifiers, by name and in order of application."""

    name: str
    partitioner: Partitioner
    modifiers: dict[str, PartitionModifier]

    @property
    def by_label(self) -> bool:
        """Whether every example must have exactly one label."""
        return self.partitioner.by_label or any(modifier.by_label for modifier in self.modifiers.values())

    @property
    def text(self) -> str:
        """Canonical text: only parameters that differ from their defaults."""
        return "+".join(show(name, changed(part)) for name, part in self._parts())

    @property
    def full_text(self) -> str:
        """Text with all parameters, except those that are None, i.e. unused."""
        parts = ((name, dataclasses.asdict(part).items()) for name, part in self._parts())
        return "+".join(
            show(name, {key: value for key, value in values if value is not None}) for name, values in parts
        )

    def _parts(self) -> list[tuple[str, Any]]:
        return [(self.name, self.partitioner), *self.modifiers.items()]


def partition_spec(text: str) -> PartitionSpec:
    """Parse the text of a partition, a partitioner and modifiers joined by ``+``, and check its parameters.

    >>> partition_spec("Dirichlet(alpha=0.5)+held-out").text
    'dirichlet(alpha=0.5)+held-out'
    """
    first, *added_calls = parse(text)
    if PARTITION_MODIFIERS.spelling(first.name):
        raise UserError(f"{first.name} modifies a partition; write for example dirichlet+{first.name}")
    partitioner = make(PARTITIONERS.find(first.name), first, "partition")
    name = PARTITIONERS.spelling(first.name) or first.name
    modifiers: dict[str, PartitionModifier] = {}
    for call in added_calls:
        if PARTITIONERS.spelling(call.name):
            raise UserError(
                f"'{text}' combines two partitions; only {' and '.join(PARTITION_MODIFIERS)} can be added with +"
            )
        modifier = make(PARTITION_MODIFIERS.find(call.name), call, "partition modifier")
        key = PARTITION_MODIFIERS.spelling(call.name) or call.name
        if key in modifiers:
            raise UserError(f"'{text}' contains {key} more than once; expected each modifier once")
        if modifier.needs_disjoint and not partitioner.disjoint:
            raise UserError(f"{key} cannot be added to {name}, whose clients share examples; choose another partition")
        modifiers[key] = modifier
    # Modifiers are applied in the registry's order, whatever the order in the text.
    ordered = {key: modifiers[key] for key in PARTITION_MODIFIERS if key in modifiers}
    return PartitionSpec(name, partitioner, ordered)


# Numbers of the random streams; each modifier has a separate one.
_DIVIDE_STREAM, _VALIDATION_STREAM = 0x5911, 0x401D

Labels = torch.Tensor | IntArray

MAX_SUMMARISED = 1000
"""Number of clients that summaries cover if clients are generated on access."""


@dataclass(frozen=True, eq=False)
class Partition:
    """Which client has which training examples.

    Attributes:
        clients: for each training client, the sorted positions of its examples in the training set: a tuple, or
            ``VirtualClients``, which generates clients when they are accessed.
        validation: sorted positions of the examples set aside for validation.
        text: the partition as text, e.g. ``dirichlet(alpha=0.5)``.
        seed: seed with which the partition was drawn.
        unseen: for each held-out client, which never trains, the positions of its examples.
        dropped: positions of the examples that the modifier ``longtail`` removed from the training set.
    """

    clients: Sequence[IntArray]
    validation: IntArray
    text: str
    seed: int
    unseen: tuple[IntArray, ...] = ()
    dropped: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    @property
    def summarised_clients(self) -> Sequence[IntArray]:
        """The clients that statistics cover: all, or the first 1000 if clients are generated when they are accessed."""
        return list(self.clients[:MAX_SUMMARISED]) if self._is_lazy else self.clients

    @property
    def _is_lazy(self) -> bool:
        return isinstance(self.clients, VirtualClients)

    @property
    def trained_on(self) -> IntArray:
        """Sorted positions of all examples that ``summarised_clients`` have, without repetitions."""
        return np.unique(np.concatenate(self.summarised_clients))

    def digest(self) -> str:
        """Return the sha256 hash of the positions of the clients' examples and of the validation examples.

        If clients are generated when they are accessed, their number and the first 1000 of them are hashed.
        """
        digest = hashlib.sha256(f"{len(self.clients)}\n".encode() if self._is_lazy else b"")
        for positions in (*self.summarised_clients, self.validation, *self.unseen):
            digest.update(len(positions).to_bytes(8, "little"))
            digest.update(positions.astype("<i8").tobytes())
        return digest.hexdigest()

    def histogram(self, targets: Labels, num_classes: int) -> IntArray:
        """Count the examples (in masks, the pixels) of each class that each client has, shape [clients, classes].

        The rows are all clients, or the first 1000 if clients are generated when they are accessed.

        Args:
            targets: targets of the whole training set: classes [n], multi-label targets [n, labels], real numbers
                (all examples count as one class), or masks.
            num_classes: number of classes.
        """
        count = class_counter(targets, num_classes)
        return np.stack([count(positions) for positions in self.summarised_clients])

    def describe(self, targets: Labels, num_classes: int) -> dict[str, Any]:
        """Summarise the partition as plain values, as written to ``partition.json``.

        If clients are generated when they are accessed, the first 1000 are described. ``thinned`` is the number of
        dropped examples, and ``coverage`` the share of the available examples that belong to at least one client.
        ``duplicates`` is the number of additional copies: an example that three clients have counts twice.
        ``heterogeneity`` is the total variation distance between the class distributions of a client and of the
        training set (after ``longtail``), averaged over clients. It is near 0 for i.i.d. clients, and (C - 1) / C if
        each client has one of C equally frequent classes.

        Args:
            targets: targets of the whole training set: classes [n], labels [n, labels], numbers, or masks.
            num_classes: number of classes.
        """
        clients, count = self.summarised_clients, class_counter(targets, num_classes)
        histogram = np.stack([count(positions) for positions in clients])
        class_counts = count(np.arange(len(targets))) - count(self.dropped)
        class_shares = class_counts / class_counts.sum()
        client_shares = histogram / np.maximum(histogram.sum(1, keepdims=True), 1)
        sizes = np.array([len(positions) for positions in clients])
        num_used = len(np.unique(np.concatenate(clients)))
        num_available = len(targets) - len(self.validation) - len(self.dropped) - sum(map(len, self.unseen))
        return {
            "partitioner": self.text,
            "seed": self.seed,
            "hash": self.digest(),
            "clients": len(self.clients),
            "described_clients": len(clients),
            "unseen": len(self.unseen),
            "sizes": summarise_sizes(sizes),
            "validation": len(self.validation),
            "thinned": len(self.dropped),
            "coverage": num_used / num_available,
            "duplicates": int(sizes.sum()) - num_used,
            "classes_per_client": float(np.count_nonzero(histogram, axis=1).mean()),
            "heterogeneity": float(np.abs(client_shares - class_shares).sum(1).mean() / 2),
            "histogram": histogram.tolist(),
        }


def canonical_partition(text: str) -> str:
    """Return the shortest text that names the same partition.

    >>> canonical_partition(" dirichlet( alpha = 0.10 )")
    'dirichlet'
    >>> canonical_partition("dirichlet(alpha=1)+held-out+longtail(factor=50)")
    'dirichlet(alpha=1.0)+longtail(factor=50.0)+held-out'
    """
    return partition_spec(text).text


def full_partition(text: str) -> str:
    """Return the text of a partition with all parameters.

    >>> full_partition("iid+held-out")
    'iid(sigma=0.0)+held-out(share=0.2)'
    """
    return partition_spec(text).full_text


def fixes_clients(text: str) -> bool:
    """Return whether a partition determines the number of clients itself, so that ``data.clients`` stays unset.

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
    """Distribute training examples over clients.

    A share of every class is set aside for validation. Of the other examples, modifiers such as ``longtail`` may drop
    some. The partitioner distributes the rest. Finally, the modifier ``held-out`` may choose clients that never train.

    Args:
        text: the partition, e.g. ``dirichlet(alpha=0.1)+held-out``: a partitioner and optional modifiers.
        targets: targets of the training set: classes [n], labels [n, labels], numbers, or masks.
        num_classes: number of classes.
        clients: number of clients; None if the partitioner determines it.
        seed: non-negative seed.
        validation: share of every class to set aside for validation, from 0 to below 1.
        groups: natural client of each example [n], e.g. its writer; None if unknown.
        coarse: superclass of each example [n]; None if unknown.
    """
    spec = partition_spec(text)
    if seed < 0:
        raise UserError(f"the partition seed is {seed}; expected at least 0")
    labels, num_classes = _labels_for(spec, targets, num_classes)
    validation_set = validation_positions(labels, validation, _generator(seed, _VALIDATION_STREAM))
    training_set = np.setdiff1d(np.arange(len(labels)), validation_set, assume_unique=True)
    if not len(training_set):
        raise UserError(f"a validation share of {validation} leaves no training examples; choose a smaller one")
    positions = training_set
    for modifier in spec.modifiers.values():
        rng = _generator(seed, modifier.stream)
        positions = positions[modifier.select_examples(labels[positions], num_classes, rng)]
    dropped = np.setdiff1d(training_set, positions, assume_unique=True)
    superclasses = None if coarse is None else coarse_of_class(labels, np.asarray(coarse), num_classes)
    data = LabelledExamples(labels[positions], num_classes, coarse=superclasses, positions=positions, total=len(labels))
    if groups is not None:  # number the natural clients 0, 1, ...
        group_ids, group_numbers = np.unique(np.asarray(groups), return_inverse=True)
        data = dataclasses.replace(data, groups=group_numbers[positions], num_groups=len(group_ids))
    # The partitioner returns indices in ``data``, which become positions in the training set below.
    divided = spec.partitioner.divide(data, clients, _generator(seed, _DIVIDE_STREAM))
    if isinstance(divided, VirtualClients):  # generated on access; no modifier holds out such clients
        return Partition(divided.renumbered(positions), validation_set, spec.text, seed, dropped=dropped)
    seen: Clients = tuple(positions[indices] for indices in divided)
    unseen: Clients = ()
    for modifier in spec.modifiers.values():
        seen, newly_unseen = modifier.hold_out_clients(seen, _generator(seed, modifier.stream))
        unseen += newly_unseen
    return Partition(seen, validation_set, spec.text, seed, unseen, dropped)


def _labels_for(spec: PartitionSpec, targets: Labels, num_classes: int) -> tuple[IntArray, int]:
    """Return the class of each example [n] and the number of classes, as the partitioner needs them.

    Targets that are not one class per example, e.g. masks, become a single class if the partition ignores labels,
    and raise a ``UserError`` otherwise.
    """
    labels = np.asarray(targets)
    are_floats = labels.dtype.kind == "f"
    if labels.ndim == 1 and not are_floats:
        labels = labels.astype(np.int64)
        if len(labels) and labels.max() >= num_classes:
            raise UserError(f"labels reach {labels.max()}, but num_classes is {num_classes}; increase num_classes")
        if len(labels) and labels.min() < 0:
            raise UserError(f"labels begin at {labels.min()}; number the classes 0, 1, 2, ...")
        return labels, num_classes
    if spec.by_label:
        problem = "the targets are numbers" if are_floats else f"each has {labels[0].size}"
        raise UserError(
            f"the partition {spec.text} needs one label per example, but {problem}; "
            "use iid, natural, virtual, listed or centralised"
        )
    return np.zeros(len(labels), dtype=np.int64), 1


def _generator(seed: int, stream: int) -> np.random.Generator:
    return np.random.default_rng(np.random.SeedSequence([seed, stream]))
