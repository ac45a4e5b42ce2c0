"""Figures of the papers: the commands that draw them from runs, and bars of measured numbers."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from fedflat.papers.library import find_table
from fedflat.papers.outcome import CellOutcome
from fedflat.papers.plan import ReproductionPlan

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PLACEHOLDER = re.compile(r"\{(\w+)(?: ([^}]+))?\}")
FEWEST_IN_PLANE = 3
"""Number of models that define a plane."""
SMALL_OPTIONS = {
    "flatness plane": "--points 11 --examples 100",
    "flatness landscape": "--points 11 --examples 100",
    "flatness spectrum": "--examples 20 --subsets 1 --eigenvalues 5",
    "flatness clients": "--examples 20",
}
"""Options at small scale, in place of a figure's own values: on a downloaded dataset, commands would take minutes."""


def picture_commands(plan: ReproductionPlan, out: Path) -> list[str]:
    """Return the shell commands that draw a figure from the runs of the chosen cells; empty for tables.

    In the figure's file, ``{models}`` stands for all models, ``{models PATTERN}`` for those of matching cells,
    ``{run CELL}`` for the run of a cell, ``{runs}`` for the runs of all seeds, and ``{out}`` for the folder of the
    runs. A command with ``{each}`` is repeated for every run. Except for ``{runs}``, the first seed is used. Commands
    on cells that were not chosen are left out. At small scale, commands also get ``SMALL_OPTIONS``.
    """
    first_runs: dict[str, str] = {}  # folder of the run with the first seed, by cell
    models: dict[str, list[str]] = {}  # evaluated models as ``folder:name``, by cell
    for cell in plan.cells:
        for runs in plan.runs_of(cell):
            if runs:
                first_runs.setdefault(cell.name, quote(str(runs[0].folder)))
                models.setdefault(cell.name, []).append(quote(f"{runs[0].folder}:{cell.evaluated}"))

    def matching_models(pattern: str) -> str:
        """Return the models of the cells that match a pattern."""
        matching = [model for name, each in models.items() if fnmatchcase(name, pattern) for model in each]
        return " ".join(dict.fromkeys(matching))

    def fill(command: str, each: str = "") -> str:
        """Replace the placeholders of a command; empty if one has no value, or if a plane has too few models.

        ``each`` is the run that ``{each}`` stands for.
        """
        values: dict[str, Callable[[str], str]] = {
            "out": lambda _: quote(str(out)),
            "figure": lambda _: plan.table.name,
            "each": lambda _: each,
            "run": lambda cell: first_runs.get(cell, ""),
            "runs": lambda _: " ".join(quote(str(run.folder)) for run in plan.runs),
            "models": lambda pattern: matching_models(pattern or "*"),
        }
        filled_values = [values[name](argument) for name, argument in _PLACEHOLDER.findall(command)]
        filled = _PLACEHOLDER.sub(lambda match: values[match[1]](match[2] or ""), command)
        is_plane = "flatness plane" in command
        models_in_command = sum(":" in word for word in filled.split())  # a model is written ``folder:name``
        has_too_few = is_plane and models_in_command < FEWEST_IN_PLANE
        return filled if all(filled_values) and not has_too_few else ""

    commands: list[str] = []
    for command in plan.table.file.picture:
        repeated = dict.fromkeys(first_runs.values()) if "{each}" in command else [""]
        commands += [fill(command, each) for each in repeated]
    options = SMALL_OPTIONS if plan.deviations.small else {}
    added = {command: [flags for name, flags in options.items() if name in command] for command in commands if command}
    return [_with_options(command, " ".join(flags)) for command, flags in added.items()]


def _with_options(command: str, options: str) -> str:
    """Set options of a command, in place of the values that it gives them.

    >>> _with_options("flatness plane a:server --points 21 --out a", "--points 11 --examples 100")
    'flatness plane a:server --points 11 --out a --examples 100'
    """
    for option, value in re.findall(r"(--\S+) (\S+)", options):
        command, replaced = re.subn(rf"(?<!\S){option} \S+", f"{option} {value}", command)
        if not replaced:
            command = f"{command} {option} {value}"
    return command


def bar_chart(outcomes: Sequence[CellOutcome]) -> Figure:
    """Draw the measured numbers of a table's cells: one group of bars per column, one bar per row."""
    from fedflat.reporting.figures.bars import grouped_bars

    table = find_table(outcomes[0].cell.table)
    places = list(table.cells)
    columns = ["\n".join(labels) for labels in table.columns]
    rows: dict[str, dict[str, tuple[float, float | None]]] = {}
    for outcome in outcomes:
        if outcome.mean is not None:
            row, column = divmod(places.index(outcome.cell.name), len(columns))
            rows.setdefault(table.rows[row][1], {})[columns[column]] = outcome.mean, outcome.spread
    measured = [column for column in columns if any(column in values for values in rows.values())]
    return grouped_bars(measured, rows, f"measured, {outcomes[0].cell.unit}")
