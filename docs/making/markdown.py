"""Markdown from Python values and docstrings, and tables read back from Markdown pages."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1]
SECTIONS = {"Args:": "Arguments", "Returns:": "Returns", "Raises:": "Raises", "Yields:": "Yields"}
"""Sections of Google-style docstrings, and their headings."""


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """The lines of a table, followed by an empty line; empty without rows.

    >>> table(("a", "b"), [(1, "x|y")])
    ['| a | b |', '|---|---|', '| 1 | x\\\\|y |', '']
    """
    lines = [_row(cells) for cells in rows]
    return [_row(columns), "|" + "---|" * len(columns), *lines, ""] if lines else []


def _row(cells: Sequence[object]) -> str:
    shown = ("" if cell is None else str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells)
    return "| " + " | ".join(shown) + " |"


def code(text: object) -> str:
    """``text`` as inline code; empty for None and the empty string."""
    return f"`{text}`" if text not in (None, "") else ""


def block(lines: Iterable[str], language: str = "") -> list[str]:
    """A code block, followed by an empty line."""
    return [f"```{language}", *lines, "```", ""]


def about(thing: Any) -> str:
    """A docstring as Markdown, with sections as lists and examples and equations as code blocks.

    >>> def double(x):
    ...     '''Twice ``x``.
    ...
    ...     Args:
    ...         x: a number.
    ...     '''
    >>> print(about(double))
    Twice `x`.
    <BLANKLINE>
    Arguments:
    <BLANKLINE>
    - `x`: a number.
    """
    return "\n\n".join(map(_paragraph, _paragraphs(thing)))


def summary(thing: Any) -> str:
    """A docstring in one line, without sections, examples and equations."""
    paragraphs = (p for p in _paragraphs(thing) if not p.startswith((">>>", "    ")) and not _section(p))
    return " ".join(" ".join(paragraphs).replace("``", "`").split())


def _paragraphs(thing: Any) -> list[str]:
    return re.split(r"\n\s*\n", inspect.getdoc(thing) or "")


def _section(paragraph: str) -> str | None:
    return SECTIONS.get(paragraph.partition("\n")[0])


def _paragraph(text: str) -> str:
    if text.startswith(">>>"):
        return f"```pycon\n{text}\n```"
    if text.startswith("    "):
        return f"```\n{inspect.cleandoc(text)}\n```"
    heading, text = _section(text), text.replace("``", "`")
    if heading is None:
        return text
    entries = re.split(r"\n(?=\S)", inspect.cleandoc("\n" + text.partition("\n")[2]))
    items = [re.sub(r"^([\w*., ]+): ", r"`\1`: ", " ".join(entry.split())) for entry in entries]
    return f"{heading}:\n\n" + "\n".join(f"- {item}" for item in items)


def rows_of(page: str, heading: str) -> dict[str, list[str]]:
    """The rows of the first table below a heading, by their first cell without backticks.

    Relative links are rewritten for pages one folder deeper. A missing heading or table raises a ``ValueError``.
    """
    text = (DOCS / page).read_text(encoding="utf-8")
    if f"\n{heading}\n" not in text:
        raise ValueError(f"docs/{page} has no heading '{heading}', whose table the generated pages repeat")
    rows: dict[str, list[str]] = {}
    for line in text.split(f"\n{heading}\n", 1)[1].splitlines():
        if line.startswith("|"):
            line = re.sub(r"\]\((?!https?:|#)", "](../", line)
            cells = [cell.strip() for cell in line.strip("|").split(" | ")]
            rows[cells[0].strip("` ")] = cells
        elif rows:
            break
    if not rows:
        raise ValueError(f"docs/{page} has no table below '{heading}', which the generated pages repeat")
    return dict(list(rows.items())[2:])


def joined(*parts: Iterable[str]) -> str:
    """A page from lists of lines, ending in one newline."""
    return "\n".join(line for part in parts for line in part).rstrip("\n") + "\n"
