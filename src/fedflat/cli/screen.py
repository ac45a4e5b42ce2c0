"""How things look on the screen: consoles, tables, numbers, JSON."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from fedflat.units import is_share

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

PIPED_WIDTH = 200
"""Columns where there is no terminal to ask: wide enough that no table is folded."""


def screen(stderr: bool = False) -> Console:
    """A console on what stdout (or stderr) is at this moment."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    wide = None if stream.isatty() or "COLUMNS" in os.environ else PIPED_WIDTH
    return Console(file=stream, width=wide, highlight=False)


def print_json(value: object) -> None:
    """One JSON document on stdout."""
    print(json.dumps(value, indent=2, ensure_ascii=False, default=str))


def table(columns: Iterable[str], rows: Iterable[Iterable[object]], numbers: Iterable[str] = ()) -> Table:
    """A table in the house style; columns named in ``numbers`` are set flush right."""
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
    """Names and values, one pair a line."""
    from rich.table import Table

    made = Table.grid(padding=(0, 2))
    made.add_column(style="dim", no_wrap=True)
    made.add_column(overflow="fold")
    for name, value in pairs.items():
        made.add_row(name, cell(value))
    return made


def cell(value: object) -> Any:
    """A value as a cell: what is not there is a dash, and text is shown as it stands."""
    from rich.text import Text

    if value is None or value == "":
        return Text("–", style="dim")
    return value if isinstance(value, Text) else Text(str(value))


# --- numbers ---------------------------------------------------------------------------------------------------------------------


def shown_metric(value: float | None, metric: str) -> str:
    """A metric's value: accuracies and other shares in per cent, anything else to four digits.

    >>> shown_metric(0.91234, "accuracy"), shown_metric(1.5, "loss")
    ('91.23', '1.5')
    """
    if value is None:
        return "–"
    return f"{100 * value:.2f}" if is_share(metric) else f"{value:.4g}"


def with_unit(metric: str) -> str:
    """A metric's name, with its unit."""
    return f"{metric} %" if is_share(metric) else metric


def shown_bytes(count: float | None) -> str:
    """A number of bytes.

    >>> shown_bytes(123), shown_bytes(45_600_000)
    ('123 B', '45.6 MB')
    """
    if count is None:
        return "–"
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.1f} TB"


def shown_seconds(seconds: float | None) -> str:
    """A duration.

    >>> shown_seconds(3.14), shown_seconds(75), shown_seconds(3720)
    ('3.1 s', '1 min 15 s', '1 h 2 min')
    """
    if seconds is None:
        return "–"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def shown_count(count: float | None) -> str:
    """A whole number, grouped by thousands.

    >>> shown_count(1234567)
    '1,234,567'
    """
    return "–" if count is None else f"{count:,.0f}"
