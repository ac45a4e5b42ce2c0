"""Flatness measurements of one row's model over several seeds."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any, NamedTuple

from fedflat.display import shown_count

if TYPE_CHECKING:
    from fedflat.experiment.store.run_folder import Record
    from fedflat.reporting.page.gather import Group

Values = dict[str, Any]
MINOR = ("lambda_max / lambda_5", "lambda_min")
"""Values in the last columns, because a LaTeX table has room for few."""
Column = tuple[str, int | None]
"""A column of the table: a value, and the number of examples that it was measured on."""


class Origin(NamedTuple):
    """What was measured, without the seed."""

    row: str
    """Label of the model's row in the report."""
    described: str
    """The model, its round and the data, e.g. ``server model, round 60``."""
    examples: int | None
    """Number of examples of one subset."""


class Measured(NamedTuple):
    """Values of a model at one seed, by name."""

    origin: Origin
    seed: int
    values: Mapping[str, float | None]


def measured_at_seed(
    group: Group,
    record: Record,
    document: Values,
    model: Values,
    examples: int | None,
    values: Mapping[str, float | None],
) -> Measured | None:
    """Return a measurement of a model with its origin and seed; None for other models, e.g. weights files.

    Folders may have moved since the measurement, so the model's run is found by its path relative to the first one.

    Args:
        group: the runs of a section of the report.
        record: the run in whose folder the measurement is stored: that of the first measured model.
        document: the measurement, with all its models.
        model: one of them.
        examples: number of examples of one subset.
        values: the measured values of the model by name.
    """
    about = re.fullmatch(r"(.+) model, seed (\d+), (round \d+)", model.get("described", ""))
    if about is None or record.folder is None:
        return None
    name, seed, rounds = about[1], int(about[2]), about[3]
    first, path = (each["model"].rpartition(":")[0] for each in (next(iter(document["models"].values())), model))
    folder = Path(os.path.normpath(record.folder.path.resolve() / os.path.relpath(path, first)))
    data = "" if document.get("on") == "train" else f", {document.get('on')} data"
    for label, row, _ in group.rows:
        for run in row.averaged:
            is_same = run.folder is not None and run.folder.path.resolve() == folder and run.config.seed == seed
            if is_same and row.model == name:
                return Measured(Origin(label, f"{name} model, {rounds}{data}", examples), seed, values)
    return None


def seed_means(measured: Iterable[Measured]) -> tuple[list[str], list[Values]]:
    """Average every value over seeds; the first measurement of a seed counts. Complete columns come first.

    Values that were measured with different sets of seeds are in separate rows.

    Returns:
        The names of the columns, and the rows: label, description, numbers (of seeds, then the means) and spreads
        (standard deviations over seeds).
    """
    counts: Counter[Column] = Counter()  # measurements of each column
    by_row: dict[tuple[str, str], dict[Column, dict[int, float]]] = {}
    for (label, described, examples), seed, values in measured:
        for name, value in values.items():
            if value is not None:
                counts[name, examples] += 1
                by_seed = by_row.setdefault((label, described), {}).setdefault((name, examples), {})
                by_seed.setdefault(seed, value)
    columns = sorted(counts, key=lambda column: (column[0] in MINOR, -counts[column]))
    names = [name for name, _ in columns]
    heads = [
        name if names.count(name) == 1 else f"{name} ({shown_count(examples)} examples)" for name, examples in columns
    ]
    rows = []
    for (label, described), cells in by_row.items():
        for seeds in dict.fromkeys(tuple(sorted(by_seed)) for by_seed in cells.values()):
            of_seeds = [cells.get(column, {}) for column in columns]
            values_of_seeds = [list(each.values()) if tuple(sorted(each)) == seeds else [] for each in of_seeds]
            numbers = [fmean(each) if each else None for each in values_of_seeds]
            spreads = [stdev(each) if len(each) > 1 else None for each in values_of_seeds]
            about = {"label": label, "described": described}
            rows.append(about | {"numbers": [len(seeds), *numbers], "spreads": [None, *spreads]})
    return heads, rows
