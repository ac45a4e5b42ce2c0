"""Tables and outcomes as plain values, Markdown and CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from itertools import islice
from typing import Any

from fedflat.papers.library import Paper, Table
from fedflat.papers.numbers import NOT_PRINTED
from fedflat.papers.outcome import Outcome
from fedflat.papers.plan import SMALL_SCALE

OUTCOME = ("cell", "published", "measured", "seeds", "difference", "tolerance", "verdict", "remark")
SMALL = ("cell", "published", "measured", "seeds", "stand-ins", "seconds", "remark")
"""At small scale nothing is judged."""


def paper_document(paper: Paper) -> dict[str, Any]:
    """A paper as plain values, with the list of its tables."""
    file = paper.file
    tables = [
        {"name": table.full_name, "caption": table.file.caption, "cells": len(table.cells)}
        for table in paper.tables.values()
    ]
    about = {"name": paper.name, "title": file.title, "authors": file.authors, "venue": file.venue, "year": file.year}
    return {
        **about,
        "protocols": {name: one.model_dump(by_alias=True) for name, one in file.protocols.items()},
        "tables": tables,
    }


def table_document(table: Table) -> dict[str, Any]:
    """A table as plain values, cell by cell with everything that is known of it."""
    cells = [
        {
            "name": cell.name,
            "published": cell.published and cell.published.text,
            "value": cell.published and cell.published.value,
            "plus_minus": cell.published and cell.published.plus_minus,
            "unit": cell.unit,
            "number": cell.number.text,
            "evaluated": cell.evaluated,
            "weights": cell.weights,
            "needs": cell.needs,
            "configs": [config.model_dump(mode="json") for config in cell.configs],
        }
        for cell in table.cells.values()
    ]
    file = table.file
    return {
        "name": table.full_name,
        "caption": file.caption,
        "protocols": {name: one.model_dump(by_alias=True) for name, one in table.protocols.items()},
        "states": [one.model_dump() for one in file.states],
        "notes": [one.model_dump() for one in file.notes],
        "cells": cells,
    }


def printed_rows(table: Table) -> list[list[str]]:
    """The table as printed: a row's name, then its numbers."""
    texts = (cell.published.text if cell.published else NOT_PRINTED for cell in table.cells.values())
    return [[f"{group} {method}".strip(), *islice(texts, len(table.columns))] for group, method in table.rows]


def table_markdown(table: Table) -> str:
    """The table as printed, in Markdown."""
    heads = ["", *(" ".join(labels) for labels in table.columns)]
    return f"**{table.full_name}** {table.file.caption}\n\n{markdown(heads, printed_rows(table))}"


def outcome_rows(found: Sequence[Outcome]) -> list[list[str]]:
    """Published, measured, difference, verdict."""
    return [_row(outcome) for outcome in found]


def small_rows(found: Sequence[Outcome]) -> list[list[str]]:
    """Published, measured, and what stands for what."""
    return [
        [*_row(one)[:4], "; ".join(one.instead), f"{one.seconds:.1f}", "" if one.says == SMALL_SCALE else one.says]
        for one in found
    ]


def outcomes_document(found: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Outcomes as plain values."""
    return [
        {
            "cell": one.cell.name,
            "published": one.cell.published and one.cell.published.text,
            "unit": one.cell.unit,
            "values": list(one.values),
            "measured": one.mean,
            "spread": one.spread,
            "difference": one.difference,
            "tolerance": one.tolerance,
            "verdict": one.verdict,
            "remark": one.says,
            "stand_ins": list(one.instead),
        }
        for one in found
    ]


def markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown.

    >>> print(markdown(["", "a"], [["x", "1"]]))
    |  | a |
    |---|---|
    | x | 1 |
    """
    lines = [heads, *rows]
    written = ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]
    return "\n".join([written[0], "|" + "---|" * len(heads), *written[1:]])


def comma_separated(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table as CSV."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([heads, *rows])
    return text.getvalue()


def shown(value: float | None, unit: str, signed: bool = False) -> str:
    """A number with as many digits as its unit deserves.

    >>> shown(61.874, "%"), shown(0.76644, "share"), shown(574.0, "rounds"), shown(-1.2, "%", signed=True)
    ('61.87', '0.7664', '574', '-1.20')
    """
    if value is None:
        return ""
    digits = {"share": 4, "rounds": 0}.get(unit, 2)
    return f"{value:+.{digits}f}" if signed else f"{value:.{digits}f}"


def _row(one: Outcome) -> list[str]:
    unit, published = one.cell.unit, one.cell.published
    spread = f" ± {shown(one.spread, unit)}" if one.spread is not None else ""
    measured = f"{shown(one.mean, unit)}{spread}" if one.unreached is None else f"{one.unreached}+"
    return [
        one.cell.name,
        published.text if published else NOT_PRINTED,
        measured,
        str(len(one.values)),
        shown(one.difference, unit, signed=True),
        shown(one.tolerance, unit),
        one.verdict,
        one.says,
    ]
