"""Algorithms by name: the published ones, and those that a user registers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fedflat.algorithms.algorithm import SLOTS, Algorithm
from fedflat.algorithms.cards import CARDS
from fedflat.registry import Registry
from fedflat.text import Value, parameters, revise

NAMED: Registry[Algorithm] = Registry("algorithm", see="fedflat algorithms; load your own with --plugin FILE.py")
"""Algorithms by name: those of ``CARDS``, and registered ones."""
for _name, _card in CARDS.items():
    NAMED.register(_name, _card.algorithm)


def with_parameters(base: Algorithm, values: Mapping[str, Value], name: str) -> Algorithm:
    """Copy an algorithm and set parameters in every part that has parameters of these names.

    ``name`` names the algorithm in error messages.
    """
    for slot in SLOTS:
        part = getattr(base, slot)
        names = [field.name for field in parameters(part)]
        base = replace(base, **{slot: revise(part, {key: values[key] for key in values if key in names}, name)})
    return base


RELEASED: dict[str, Algorithm] = {
    name: with_parameters(card.algorithm, card.released, name) if isinstance(card.released, dict) else card.released
    for name, card in CARDS.items()
    if card.released
}
"""The algorithms that ``variant=released`` selects, by name."""
