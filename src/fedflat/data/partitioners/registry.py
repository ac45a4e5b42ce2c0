"""The registry of partitioners, and the text of a partition: ``dirichlet(alpha=0.1)+longtail(factor=100)``."""

from __future__ import annotations

from dataclasses import dataclass

from fedflat.data.partitioners.dirichlet import Dirichlet, DirichletClasswise, DirichletReuse
from fedflat.data.partitioners.held_out import HeldOut
from fedflat.data.partitioners.lda import DirichletLda
from fedflat.data.partitioners.listed import Listed
from fedflat.data.partitioners.longtail import LongTail
from fedflat.data.partitioners.natural import Natural
from fedflat.data.partitioners.pachinko import Pachinko
from fedflat.data.partitioners.partitioner import Partitioner, PartitionModifier
from fedflat.data.partitioners.pathological import Pathological
from fedflat.data.partitioners.uniform import Centralised, Iid
from fedflat.data.partitioners.virtual import Virtual
from fedflat.errors import UserError
from fedflat.registry import Registry
from fedflat.text import changed, make, parameters, parse, show

PARTITIONERS: Registry[type[Partitioner]] = Registry("partition", see="fedflat data list")
"""Partitioners by name."""
PARTITION_MODIFIERS: Registry[type[PartitionModifier]] = Registry("partition modifier", see="fedflat data list")
"""Modifiers by name, in the order in which they are applied."""

_BUILT_IN: dict[str, type[Partitioner]] = {
    "iid": Iid,
    "dirichlet": Dirichlet,
    "dirichlet-reuse": DirichletReuse,
    "dirichlet-classwise": DirichletClasswise,
    "dirichlet-lda": DirichletLda,
    "pathological": Pathological,
    "pachinko": Pachinko,
    "natural": Natural,
    "virtual": Virtual,
    "listed": Listed,
    "centralised": Centralised,
}
for _name, _partitioner in _BUILT_IN.items():
    PARTITIONERS.register(_name, _partitioner)
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
        return "+".join(show(name, changed(spec)) for name, spec in self._specs())

    @property
    def full_text(self) -> str:
        """Text with all parameters."""
        return "+".join(
            show(name, {field.name: getattr(spec, field.name) for field in parameters(spec)})
            for name, spec in self._specs()
        )

    def _specs(self) -> list[tuple[str, object]]:
        return [(self.name, self.partitioner), *self.modifiers.items()]


def partition_spec(text: str) -> PartitionSpec:
    """Parse the text of a partition and check its parameters.

    >>> partition_spec("Dirichlet(alpha=0.5)+held-out").text
    'dirichlet(alpha=0.5)+held-out'
    """
    first, *added = parse(text)
    if PARTITION_MODIFIERS.spelling(first.name):
        raise UserError(f"{first.name} modifies a partition; write for example dirichlet+{first.name}")
    partitioner = make(PARTITIONERS.find(first.name), first, "partition")
    name = PARTITIONERS.spelling(first.name) or first.name
    modifiers: dict[str, PartitionModifier] = {}
    for call in added:
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
    ordered = {key: modifiers[key] for key in PARTITION_MODIFIERS if key in modifiers}
    return PartitionSpec(name, partitioner, ordered)
