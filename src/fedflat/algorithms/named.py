"""Algorithms by name: the published ones, and those that a user registers."""

from __future__ import annotations

from fedflat.algorithms.algorithm import Algorithm
from fedflat.algorithms.cards import CARDS
from fedflat.registry import Registry
from fedflat.text import Value

NAMED: Registry[Algorithm] = Registry("algorithm", see="fedflat algorithms")
"""Algorithms by name: those of ``CARDS``, and registered ones."""
for _name, _card in CARDS.items():
    NAMED.register(_name, _card.algorithm)

RELEASED: dict[str, dict[str, Value]] = {name: card.released for name, card in CARDS.items() if card.released}
"""The parameters that ``variant=released`` sets, by algorithm."""
