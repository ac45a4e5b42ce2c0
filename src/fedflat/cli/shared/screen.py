"""Consoles, tables, numbers and JSON output."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from fedflat.cli.shared.screen_table import ScreenTable, columns_of
from fedflat.units import counted as counted
from fedflat.units import shown_bytes as shown_bytes
from fedflat.units import shown_count as shown_count
from fedflat.units import shown_metric as shown_metric
from fedflat.units import shown_seconds as shown_seconds
from fedflat.units import with_unit as with_unit

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

PIPED_WIDTH = 200
"""Console width when piped, wide enough that no table wraps."""


def screen(stderr: bool = False) -> Console:
    """Return a rich console on the current stdout or stderr; piped output has a fixed width unless COLUMNS is set."""
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


def table(
    columns: Iterable[str],
    rows: Iterable[Iterable[object]],
    numeric: Iterable[str] = (),
    *,
    whole: Iterable[str] = (),
    optional: Iterable[str] = (),
) -> ScreenTable:
    """Return a table that fits the screen without breaking words.

    Args:
        columns: titles of the columns.
        rows: one value per column and row.
        numeric: titles of the columns that are right-aligned.
        whole: titles of the columns whose cells stay on one line.
        optional: titles of the columns that are left out if the table does not fit otherwise.
    """
    table_columns = columns_of(columns, ([cell(value) for value in row] for row in rows))
    table_columns[0].style = "cyan"
    numeric, whole, optional = set(numeric), set(whole), set(optional)
    for column in table_columns:
        column.is_numeric, column.is_whole = column.title in numeric, column.title in whole
        column.is_optional = column.title in optional
    return ScreenTable(table_columns)


def key_values(pairs: Mapping[str, object]) -> ScreenTable:
    """Return a table of two columns without titles: a name and its value per line."""
    from rich.text import Text

    names, values = columns_of(("", ""), ((Text(name), cell(value)) for name, value in pairs.items()))
    names.is_whole, names.style = True, "dim"
    return ScreenTable([names, values], has_titles=False)


def cell(value: object) -> Text:
    """Return a value as a table cell; None and empty text become a dash."""
    from rich.text import Text

    if value is None or value == "":
        return Text("–", style="dim")
    return value if isinstance(value, Text) else Text(str(value))


def shown_hash(digest: str | None) -> str | None:
    """Return the beginning of a hash, which is enough to compare two by eye; None stays None.

    >>> shown_hash("0123456789abcdef0123456789abcdef")
    '0123456789abcdef...'
    """
    return None if digest is None else f"{digest[:16]}..."
