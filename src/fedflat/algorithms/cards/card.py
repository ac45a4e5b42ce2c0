"""The description of a published algorithm."""

from __future__ import annotations

from dataclasses import dataclass, field

from fedflat.algorithms.algorithm import Algorithm
from fedflat.text import Value


@dataclass(frozen=True)
class Card:
    """A published algorithm."""

    name: str
    """As its authors write it, e.g. ``"FedMoSWA"``."""
    title: str
    """A noun phrase that says what it is or does, e.g. ``"FedAvg with a proximal term"``."""
    algorithm: Algorithm
    paper: str
    """Short citations, separated by ``; ``."""
    values: str = ""
    """Parameter values reported in papers, as sentences without the last full stop."""
    differences: tuple[str, ...] = ()
    """Numbers of entries of ``DIFFERENCES``."""
    released: dict[str, Value] | Algorithm = field(default_factory=dict)
    """The published code where it differs from the paper: parameters that ``variant=released`` sets, or other parts."""
