"""Tables and outcomes as plain values, Markdown and CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from itertools import islice
from typing import Any

from fedflat.papers.library import Paper, PaperTable
from fedflat.papers.numbers import NOT_PRINTED
from fedflat.papers.outcome import CellOutcome
from fedflat.papers.plan import SMALL_SCALE

OUTCOME = ("cell", "published", "measured", "seeds", "difference", "tolerance", "verdict", "remark")
SMALL = ("cell", "published", "measured", "seeds", "stand-ins", "seconds", "remark")
"""Columns at small scale, where there is no verdict."""


def paper_document(paper: Paper) -> dict[str, Any]:
    """A paper as plain values, with a list of its tables."""
    file = paper.file
    return {
        "name": paper.name,
        "title": file.title,
        "authors": file.authors,
        "venue": file.venue,
        "year": file.year,
        "protocols": {name: protocol.model_dump(by_alias=True) for name, protocol in file.protocols.items()},
        "tables": [
            {"name": table.full_name, "caption": table.file.caption, "cells": len(table.cells)}
            for table in paper.tables.values()
        ],
    }


def table_document(table: PaperTable) -> dict[str, Any]:
    """A table as plain values, with the configs of every cell."""
    cells = [
        {
            "name": cell.name,
            "published": cell.published and cell.published.text,
            "value": cell.published and cell.published.value,
            "plus_minus": cell.published and cell.published.plus_minus,
            "unit": cell.unit,
            "number": cell.statistic.text,
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
        "protocols": {name: protocol.model_dump(by_alias=True) for name, protocol in table.protocols.items()},
        "states": [statement.model_dump() for statement in file.states],
        "notes": [note.model_dump() for note in file.notes],
        "cells": cells,
    }


def printed_rows(table: PaperTable) -> list[list[str]]:
    """The table as printed: the name of a row, then its numbers."""
    texts = (cell.published.text if cell.published else NOT_PRINTED for cell in table.cells.values())
    return [[f"{group} {method}".strip(), *islice(texts, len(table.columns))] for group, method in table.rows]


def table_markdown(table: PaperTable) -> str:
    """The table as printed, in Markdown."""
    heads = ["", *(" ".join(labels) for labels in table.columns)]
    return f"**{table.full_name}** {table.file.caption}\n\n{markdown(heads, printed_rows(table))}"


def outcome_rows(outcomes: Sequence[CellOutcome]) -> list[list[str]]:
    """One row per cell, with the columns ``OUTCOME``."""
    return [_row(outcome) for outcome in outcomes]


def small_rows(outcomes: Sequence[CellOutcome]) -> list[list[str]]:
    """One row per cell, with the columns ``SMALL``."""
    return [
        [
            *_row(outcome)[:4],
            "; ".join(outcome.stand_ins),
            f"{outcome.seconds:.1f}",
            "" if outcome.remark == SMALL_SCALE else outcome.remark,
        ]
        for outcome in outcomes
    ]


def outcomes_document(outcomes: Sequence[CellOutcome]) -> list[dict[str, Any]]:
    """Outcomes as plain values."""
    return [
        {
            "cell": outcome.cell.name,
            "published": outcome.cell.published and outcome.cell.published.text,
            "unit": outcome.cell.unit,
            "values": list(outcome.values),
            "measured": outcome.mean,
            "spread": outcome.spread,
            "difference": outcome.difference,
            "tolerance": outcome.tolerance,
            "verdict": outcome.verdict,
            "remark": outcome.remark,
            "stand_ins": list(outcome.stand_ins),
        }
        for outcome in outcomes
    ]


def markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown.

    >>> print(markdown(["", "a"], [["x", "1"]]))
    |  | a |
    |---|---|
    | x | 1 |
    """
    written = ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in [heads, *rows]]
    return "\n".join([written[0], "|" + "---|" * len(heads), *written[1:]])


def comma_separated(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table as CSV."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([heads, *rows])
    return text.getvalue()


def shown(value: float | None, unit: str, signed: bool = False) -> str:
    """A number with the digits that suit its unit.

    >>> shown(61.874, "%"), shown(0.76644, "share"), shown(574.0, "rounds"), shown(-1.2, "%", signed=True)
    ('61.87', '0.7664', '574', '-1.20')
    """
    if value is None:
        return ""
    digits = {"share": 4, "rounds": 0}.get(unit, 2)
    return f"{value:+.{digits}f}" if signed else f"{value:.{digits}f}"


def _row(outcome: CellOutcome) -> list[str]:
    unit, published = outcome.cell.unit, outcome.cell.published
    spread = f" ± {shown(outcome.spread, unit)}" if outcome.spread is not None else ""
    measured = f"{shown(outcome.mean, unit)}{spread}" if outcome.unreached is None else f"{outcome.unreached}+"
    return [
        outcome.cell.name,
        published.text if published else NOT_PRINTED,
        measured,
        str(len(outcome.values)),
        shown(outcome.difference, unit, signed=True),
        shown(outcome.tolerance, unit),
        outcome.verdict,
        outcome.remark,
    ]
