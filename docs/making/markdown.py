"""Markdown from plain values, and what stands in Markdown as plain values."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1]
EXAMPLE = re.compile(r"^>>> ", re.MULTILINE)


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """A table, followed by an empty line; nothing where there are no rows.

    >>> table(("a", "b"), [(1, "x|y")])
    ['| a | b |', '|---|---|', '| 1 | x\\\\|y |', '']
    """
    lines = [_line(row) for row in rows]
    return [_line(columns), "|" + "---|" * len(columns), *lines, ""] if lines else []


def _line(cells: Sequence[object]) -> str:
    shown = ("" if cell is None else str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells)
    return "| " + " | ".join(shown) + " |"


def code(text: object) -> str:
    """A piece of code in a line; nothing where there is none."""
    return f"`{text}`" if text not in (None, "") else ""


def block(lines: Iterable[str], language: str = "") -> list[str]:
    """Lines of code as a block, followed by an empty line."""
    return [f"```{language}", *lines, "```", ""]


def about(thing: Any) -> str:
    """A docstring as Markdown: code in single backticks, examples as a block."""
    text = inspect.getdoc(thing) or ""
    parts = re.split(r"\n\s*\n", text)
    shown = [
        f"```pycon\n{part}\n```" if EXAMPLE.match(part.lstrip()) else _indented(part.replace("``", "`"))
        for part in parts
    ]
    return "\n\n".join(shown)


def _indented(part: str) -> str:
    """A paragraph that is indented throughout is an equation, and stays one."""
    return f"```\n{inspect.cleandoc(part)}\n```" if part.startswith("    ") else part


def rows_of(page: str, heading: str) -> dict[str, list[str]]:
    """The rows of the first table below a heading of a page, by their first cell without its backticks and parameters.

    Their links lead from a page one folder down, where they are shown.
    """
    text = (DOCS / page).read_text(encoding="utf-8")
    below = text.split(f"\n{heading}\n", 1)[1]
    found: dict[str, list[str]] = {}
    for line in below.splitlines():
        if not line.startswith("|"):
            if found:
                break
            continue
        line = re.sub(r"\]\((?!https?:|#)", "](../", line)
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        found[cells[0].strip("` ")] = cells
    return dict(list(found.items())[2:])


def joined(*parts: Iterable[str]) -> str:
    """A page from its parts, each a list of lines, with one newline in the end."""
    return "\n".join(line for part in parts for line in part).rstrip("\n") + "\n"
