"""Consoles, tables, numbers and JSON output."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from fedflat.units import shown_bytes as shown_bytes
from fedflat.units import shown_count as shown_count
from fedflat.units import shown_metric as shown_metric
from fedflat.units import shown_seconds as shown_seconds
from fedflat.units import with_unit as with_unit

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

PIPED_WIDTH = 200
"""Console width when piped, wide enough that no table wraps."""


def screen(stderr: bool = False) -> Console:
    """A console on the current stdout or stderr."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    wide = None if stream.isatty() or "COLUMNS" in os.environ else PIPED_WIDTH
    return Console(file=stream, width=wide, highlight=False)


def print_json(value: object) -> None:
    """Print one JSON document to stdout."""
    print(json.dumps(value, indent=2, ensure_ascii=False, default=str))


def table(columns: Iterable[str], rows: Iterable[Iterable[object]], numbers: Iterable[str] = ()) -> Table:
    """A table; columns in ``numbers`` are right-aligned."""
    from rich import box
    from rich.table import Table

    made = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    right = set(numbers)
    for position, name in enumerate(columns):
        justify: Literal["left", "right"] = "right" if name in right else "left"
        made.add_column(name, justify=justify, style="" if position else "cyan", overflow="fold")
    for row in rows:
        made.add_row(*(cell(value) for value in row))
    return made


def facts(pairs: Mapping[str, object]) -> Table:
    """Name-value pairs, one per line."""
    from rich.table import Table

    made = Table.grid(padding=(0, 2))
    made.add_column(style="dim", no_wrap=True)
    made.add_column(overflow="fold")
    for name, value in pairs.items():
        made.add_row(name, cell(value))
    return made


def cell(value: object) -> Any:
    """A value as a table cell; None becomes a dash."""
    from rich.text import Text

    if value is None or value == "":
        return Text("–", style="dim")
    return value if isinstance(value, Text) else Text(str(value))
