"""The text of a partition: a partitioner, and what is added to it by ``+``."""

from __future__ import annotations

from dataclasses import dataclass

from fedflat.data.partitioners.dirichlet import Dirichlet, DirichletClasswise, DirichletReuse
from fedflat.data.partitioners.held_out import HeldOut
from fedflat.data.partitioners.lda import DirichletLda
from fedflat.data.partitioners.listed import Listed
from fedflat.data.partitioners.longtail import LongTail
from fedflat.data.partitioners.natural import Natural
from fedflat.data.partitioners.pachinko import Pachinko
from fedflat.data.partitioners.partitioner import Partitioner
from fedflat.data.partitioners.pathological import Pathological
from fedflat.data.partitioners.uniform import Centralised, Iid
from fedflat.data.partitioners.virtual import Virtual
from fedflat.errors import UserError, one_of
from fedflat.text import Value, changed, make, parameters, parse, show

PARTITIONERS: dict[str, type[Partitioner]] = {
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
"""Partitions, by name."""
PARTITION_MODIFIERS: dict[str, type[LongTail] | type[HeldOut]] = {"longtail": LongTail, "held-out": HeldOut}
"""What can be added to any of them, in the order in which it takes effect."""


@dataclass(frozen=True)
class Recipe:
    """A partitioner by its name, and what is added to it."""

    name: str
    partitioner: Partitioner
    longtail: LongTail | None = None
    held_out: HeldOut | None = None

    @property
    def text(self) -> str:
        """The shortest text of the recipe."""
        return "+".join(show(name, changed(spec)) for name, spec in self._specs())

    @property
    def full_text(self) -> str:
        """The text of the recipe with every parameter."""
        return "+".join(show(name, _values(spec)) for name, spec in self._specs())

    def _specs(self) -> list[tuple[str, object]]:
        added = zip(PARTITION_MODIFIERS, (self.longtail, self.held_out), strict=True)
        return [(self.name, self.partitioner), *((name, spec) for name, spec in added if spec is not None)]


def read_recipe(text: str) -> Recipe:
    """The recipe of a text such as ``dirichlet(alpha=0.1)+longtail(factor=100)``, with everything checked."""
    first, *added = parse(text)
    if first.name in PARTITION_MODIFIERS:
        raise UserError(
            f"{first.name} is added to a partition and is none itself; write for example dirichlet+{first.name}"
        )
    if first.name not in PARTITIONERS:
        raise one_of("partition", first.name, PARTITIONERS, "fedflat data")
    longtail, held_out = None, None
    for call in added:
        if call.name in PARTITIONERS:
            raise UserError(
                f"'{text}' has {len(added) + 1} parts, but only {' and '.join(PARTITION_MODIFIERS)} can be added to a partition"
            )
        if call.name not in PARTITION_MODIFIERS:
            raise one_of("part of a partition", call.name, PARTITION_MODIFIERS, "fedflat data")
        if [other.name for other in added].count(call.name) > 1:
            raise UserError(f"'{text}' has {call.name} more than once; expected each part once")
        if call.name == "longtail":
            longtail = make(LongTail, call, "partition part")
        else:
            held_out = make(HeldOut, call, "partition part")
    partitioner = make(PARTITIONERS[first.name], first, "partition")
    if held_out and not partitioner.disjoint:
        raise UserError(
            f"{first.name} gives the same examples to several clients, so that none could be unseen; held-out cannot be added"
        )
    return Recipe(first.name, partitioner, longtail, held_out)


def _values(spec: object) -> dict[str, Value]:
    return {field.name: getattr(spec, field.name) for field in parameters(spec)}
