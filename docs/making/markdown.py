"""Markdown from Python values and docstrings."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1]
ARGUMENTS = "Arguments"
EXAMPLE = "Example:"
SECTIONS = {"Args:": ARGUMENTS} | {f"{name}:": name for name in ("Attributes", "Returns", "Raises", "Yields")}
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


def symbols_as_code(text: str) -> str:
    """A list with the symbol at the start of each item ``- symbol: meaning`` as inline code; other text unchanged.

    >>> symbols_as_code("- d_k: direction")
    '- `d_k`: direction'
    """
    return re.sub(r"^- ([^:`]+): ", r"- `\1`: ", text, flags=re.MULTILINE)


def about(thing: Any) -> str:
    """A docstring as Markdown, with arguments as a table and examples and equations as code blocks.

    >>> def double(x: float = 1.0):
    ...     '''Twice ``x``.
    ...
    ...     Args:
    ...         x: a number.
    ...
    ...     Returns:
    ...         A number: the double.
    ...     '''
    >>> print(about(double))
    Twice `x`.
    <BLANKLINE>
    | argument | type | default | meaning |
    |---|---|---|---|
    | `x` | `float` | `1.0` | a number. |
    <BLANKLINE>
    Returns: A number: the double.
    """
    return "\n\n".join(_paragraph(paragraph, thing) for paragraph in _paragraphs(thing))


def arguments(thing: Any) -> list[str]:
    """The table of the arguments that a docstring describes, followed by an empty line; empty without any."""
    found = (p for p in _paragraphs(thing) if _section(p) == ARGUMENTS)
    return [line for paragraph in found for line in _argument_table(_entries(paragraph), thing)]


def summary(thing: Any) -> str:
    """A docstring in one line, without sections, examples and equations."""
    paragraphs = (p for p in _paragraphs(thing) if not p.startswith((">>>", "    ", EXAMPLE)) and not _section(p))
    return " ".join(" ".join(paragraphs).replace("``", "`").split())


def _paragraphs(thing: Any) -> list[str]:
    return re.split(r"\n\s*\n", inspect.getdoc(thing) or "")


def _section(paragraph: str) -> str | None:
    return SECTIONS.get(paragraph.partition("\n")[0])


def _paragraph(text: str, thing: Any) -> str:
    if text.startswith(">>>"):
        return f"```pycon\n{text}\n```"
    if text.startswith(EXAMPLE):
        code = inspect.cleandoc(text.removeprefix(EXAMPLE))
        language = "pycon" if code.startswith(">>>") else "py"
        return f"{EXAMPLE}\n\n```{language}\n{code.strip('`')}\n```"
    if text.startswith("    "):
        return f"```equations\n{inspect.cleandoc(text)}\n```"
    heading, text = _section(text), text.replace("``", "`")
    if heading is None:
        return symbols_as_code(text)
    entries = _entries(text)
    if heading == ARGUMENTS:
        return "\n".join(_argument_table(entries, thing)).rstrip()
    if heading in ("Returns", "Yields"):
        return f"{heading}: {' '.join(entries)}"
    return f"{heading}:\n\n" + "\n".join("- " + re.sub(r"^([\w., ]+): ", r"`\1`: ", entry) for entry in entries)


def _entries(section: str) -> list[str]:
    """The entries of a section of a docstring, one line each; the lines of an entry after its first are indented."""
    entries = re.split(r"\n(?=\S)", inspect.cleandoc("\n" + section.replace("``", "`").partition("\n")[2]))
    return [" ".join(entry.split()) for entry in entries]


def _argument_table(entries: list[str], thing: Any) -> list[str]:
    """The table of arguments ``name: meaning``, with types and defaults from the signature of ``thing``."""
    parameters = inspect.signature(thing).parameters
    rows = []
    for entry in entries:
        names, _, meaning = entry.partition(": ")
        for name in names.split(", "):
            p = parameters.get(name.lstrip("*"))
            kind = "" if p is None or p.annotation is p.empty else type_text(p.annotation)
            default = "" if p is None or p.default is p.empty else default_text(p.default)
            rows.append((code(name), code(kind), code(default), meaning))
    return table(("argument", "type", "default", "meaning"), rows)


def type_text(annotation: Any) -> str:
    """A type annotation as source code, without the names of modules."""
    shown = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return re.sub(r"\b(?:fedflat|torch|collections|pathlib|typing|numpy)\.(?:[a-z_]+\.)*(?=[A-Z])", "", shown)


def default_text(value: Any) -> str:
    """A default value as source code; ``...`` if it is long."""
    shown = repr(value)
    return getattr(value, "__name__", "...") if "0x" in shown or len(shown) > 60 else shown


def joined(*parts: Iterable[str]) -> str:
    """A page from lists of lines, ending in one newline."""
    return "\n".join(line for part in parts for line in part).rstrip("\n") + "\n"
