"""Consoles, tables, numbers and JSON output."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from fedflat.units import counted as counted
from fedflat.units import shown_bytes as shown_bytes
from fedflat.units import shown_count as shown_count
from fedflat.units import shown_metric as shown_metric
from fedflat.units import shown_seconds as shown_seconds
from fedflat.units import with_unit as with_unit

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text

PIPED_WIDTH = 200
"""Console width when piped, wide enough that no table wraps."""


def screen(stderr: bool = False) -> Console:
    """Return a rich console on the current stdout or stderr."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() or "COLUMNS" in os.environ else PIPED_WIDTH
    return Console(file=stream, width=width, highlight=False)


def print_json(value: object) -> None:
    """Print one JSON document to stdout."""
    print(json.dumps(value, indent=2, ensure_ascii=False, default=str))


def print_section(title: str, content: RenderableType) -> None:
    """Print a blank line, a bold title and the content below it."""
    console = screen()
    console.print()
    console.print(title, style="bold", markup=False)
    console.print(content)


def table(columns: Iterable[str], rows: Iterable[Iterable[object]], numeric: Iterable[str] = ()) -> Table:
    """Return a table whose ``numeric`` columns are right-aligned."""
    from rich import box
    from rich.table import Table

    grid = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    right_aligned = set(numeric)
    for position, name in enumerate(columns):
        style = "cyan" if position == 0 else ""
        grid.add_column(name, justify="right" if name in right_aligned else "left", style=style, overflow="fold")
    for row in rows:
        grid.add_row(*(cell(value) for value in row))
    return grid


def key_values(pairs: Mapping[str, object]) -> Table:
    """Return a table without header that has one name and its value per line."""
    from rich.table import Table

    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in pairs.items():
        grid.add_row(name, cell(value))
    return grid


def cell(value: object) -> Text:
    """Return a value as a table cell; None and empty text become a dash."""
    from rich.text import Text

    if value is None or value == "":
        return Text("–", style="dim")
    return value if isinstance(value, Text) else Text(str(value))
