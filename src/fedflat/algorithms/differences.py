"""Differences between papers and their published code, and which one fedflat follows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import yaml


@dataclass(frozen=True)
class Difference:
    """One difference between a paper and published code."""

    number: str
    """Its number in the documentation, D1, D2, ..."""
    where: str
    """Paper, file and lines."""
    fault: str
    """What differs."""
    here: str
    """What fedflat does, and the parameter that selects the other form."""


_FILE = Path(__file__).with_suffix(".yaml")
DIFFERENCES: dict[str, Difference] = {
    number: Difference(number, **entry) for number, entry in yaml.safe_load(_FILE.read_text(encoding="utf-8")).items()
}
"""Differences by number."""
