"""Tables and outcomes as plain values, Markdown and CSV."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Any

from fedflat.papers.cells import Cell
from fedflat.papers.library import Paper, PaperTable
from fedflat.papers.numbers import NOT_PRINTED
from fedflat.papers.outcome import CellOutcome
from fedflat.papers.plan import SMALL_SCALE

OUTCOME_COLUMNS = ("cell", "published", "measured", "seeds", "difference", "tolerance", "verdict", "remark")
SMALL_COLUMNS = ("cell", "published", "measured", "seeds", "stand-ins", "seconds", "remark")
"""Columns of outcomes at full scale and, without verdicts, at small scale."""


def paper_document(paper: Paper) -> dict[str, Any]:
    """Return a paper as JSON-compatible values, with a list of its tables."""
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
    """Return a table as JSON-compatible values.

    ``states`` lists numbers that the paper's running text states about the table, ``notes`` our remarks on it, and
    ``cells`` the published numbers with the configs of the runs that reproduce them.
    """
    file = table.file
    return {
        "name": table.full_name,
        "caption": file.caption,
        "protocols": {name: protocol.model_dump(by_alias=True) for name, protocol in table.protocols.items()},
        "states": [statement.model_dump() for statement in file.states],
        "notes": [note.model_dump() for note in file.notes],
        "cells": [_cell_values(cell) for cell in table.cells.values()],
    }


def _cell_values(cell: Cell) -> dict[str, Any]:
    """Return a cell as JSON-compatible values; ``published`` is None if the paper leaves the cell empty."""
    published = cell.published
    return {
        "name": cell.name,
        "published": published.text if published else None,
        "value": published.value if published else None,
        "plus_minus": published.plus_minus if published else None,
        "unit": cell.unit,
        "number": cell.statistic.text,
        "evaluated": cell.evaluated,
        "weights": cell.weights,
        "needs": cell.needs,
        "configs": [config.model_dump(mode="json") for config in cell.configs],
    }


def printed_rows(table: PaperTable) -> list[list[str]]:
    """Return the rows of a table as printed: the name of the row, then its numbers as text."""
    rows = []
    for group, method in table.rows:
        cells = [table.cell_at(group, method, labels) for labels in table.columns]
        rows.append([f"{group} {method}".strip(), *map(_printed, cells)])
    return rows


def _printed(cell: Cell) -> str:
    return cell.published.text if cell.published else NOT_PRINTED


def table_markdown(table: PaperTable) -> str:
    """Write the table as printed, in Markdown."""
    heads = ["", *(" ".join(labels) for labels in table.columns)]
    return f"**{table.full_name}** {table.file.caption}\n\n{markdown(heads, printed_rows(table))}"


def small_rows(outcomes: Sequence[CellOutcome]) -> list[list[str]]:
    """Return one row per cell at small scale, with the columns ``SMALL_COLUMNS``."""
    rows = []
    for outcome in outcomes:
        # "small scale" holds for every row, so it is not repeated in each.
        remark = "" if outcome.remark == SMALL_SCALE else outcome.remark
        cell, published, measured, seeds, *_ = outcome_row(outcome)
        stand_ins = "; ".join(outcome.stand_ins)
        rows.append([cell, published, measured, seeds, stand_ins, f"{outcome.seconds:.1f}", remark])
    return rows


def outcomes_document(outcomes: Sequence[CellOutcome]) -> list[dict[str, Any]]:
    """Return outcomes as JSON-compatible values."""
    return [
        {
            "cell": outcome.cell.name,
            "published": outcome.cell.published.text if outcome.cell.published else None,
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
    """Write a table in Markdown.

    >>> print(markdown(["", "a"], [["x", "1"]]))
    |  | a |
    |---|---|
    | x | 1 |
    """
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in [heads, *rows]]
    lines.insert(1, "|" + "---|" * len(heads))
    return "\n".join(lines)


def shown_number(value: float | None, unit: str, signed: bool = False) -> str:
    """Format a number with the digits that suit its unit; None becomes an empty text.

    >>> shown_number(61.874, "%"), shown_number(0.76644, "share"), shown_number(574.0, "rounds")
    ('61.87', '0.7664', '574')
    """
    if value is None:
        return ""
    digits = {"share": 4, "rounds": 0}.get(unit, 2)
    return f"{value:+.{digits}f}" if signed else f"{value:.{digits}f}"


def shown_values(values: Sequence[float], unit: str) -> str:
    """Return the mean of values, with their standard deviation if there are several; empty without values."""
    if not values:
        return ""
    mean = shown_number(fmean(values), unit)
    return f"{mean} ± {shown_number(stdev(values), unit)}" if len(values) > 1 else mean


def outcome_row(outcome: CellOutcome) -> list[str]:
    """Return the outcome of a cell as texts, in the columns ``OUTCOME_COLUMNS``.

    A target that no seed reached in 1000 rounds is shown as ``1000+``.
    """
    unit = outcome.cell.unit
    measured = shown_values(outcome.values, unit)
    if outcome.unreached_in is not None:
        measured = f"{outcome.unreached_in}+"
    return [
        outcome.cell.name,
        _printed(outcome.cell),
        measured,
        str(len(outcome.values)),
        shown_number(outcome.difference, unit, signed=True),
        shown_number(outcome.tolerance, unit),
        outcome.verdict,
        outcome.remark,
    ]
