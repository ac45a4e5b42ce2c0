"""fedflat report: HTML page, tables and figures of runs."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Sequence
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import typer

from fedflat.cli.shared.flags import JSON, QUIET, RUNS_BELOW, TARGETS, no_default, optional
from fedflat.cli.shared.screen import key_values, print_json, screen
from fedflat.errors import UserError, one_of
from fedflat.registry import load_unchanged


def report(
    runs: list[Path] = RUNS_BELOW,
    out: Path = typer.Option(Path("report"), "--out", metavar="FOLDER", help="output folder"),
    title: str = typer.Option("", "--title", metavar="TEXT", help="the title of the page", show_default=False),
    target: list[float] = TARGETS,
    baseline: str | None = optional("--baseline", "row that others are compared with", "the first", metavar="ROW"),
    by: str = typer.Option(
        "mean_last",
        "--by",
        metavar="VALUE",
        help="value for differences and ranks: mean_last, last, best or at_best_validation",
    ),
    apart: bool = typer.Option(
        False, "--apart", help="allow several partitions, one section each, without comparing across"
    ),
    columns: str = no_default(
        "--columns",
        "columns of the results tables, joined by commas, e.g. mean_last,best (default in LaTeX: mean_last,last); "
        "a LaTeX page fits about five",
        "",
        metavar="NAMES",
    ),
    label: list[str] = no_default(
        "--label",
        "display name of a row, e.g. 'fedavg+wima=WiMA', or of all rows of an algorithm (including "
        "plugins), e.g. 'fednorm=FedNorm (ours)'; repeatable (default: as in its paper)",
        [],
        metavar="ROW=NAME",
    ),
    figures: bool = typer.Option(True, "--figures/--no-figures", help="also write figures as PDF"),
    as_json: bool = JSON,
    quiet: bool = QUIET,
) -> None:
    """Write a report: a self-contained HTML page, tables (CSV, Markdown, LaTeX) and figures (PDF).

    Runs are paired by seed, so all must share dataset and partition.

    Example: fedflat report runs/first --target 0.9 --baseline fedavg
    """
    from fedflat.experiment.store.files import require_no_file
    from fedflat.reporting.page.gather import gather, group_runs
    from fedflat.reporting.page.page import write_report

    require_no_file(out)  # before the slow work
    gathered = gather(runs)
    if not (quiet or as_json):
        for _, reason in gathered.left_out:
            print(f"fedflat: left out: {reason}", file=sys.stderr)
    rows = [row for group in group_runs(gathered.records, apart) for row in group.rows]
    folders = [record.folder for record in gathered.records if record.folder is not None]
    plugins = [plugin for folder in folders for plugin in folder.plugins().items()]
    if baseline:
        valid = dict.fromkeys(name for row in rows for name in (row.label, row.row.algorithm))
        _, baseline = find_row("baseline", [baseline], valid, plugins)
    labels = read_labels(label, [row.label for row in rows], plugins)
    names = [name.strip() for name in columns.split(",") if name.strip()]
    options: dict[str, Any] = {"by": by, "apart": apart, "columns": names, "labels": labels, "figures": figures}
    document, files = write_report(gathered, out, title=title, targets=target, baseline=baseline or None, **options)
    if as_json:
        sections = [{key: section[key] for key in JSON_ENTRIES} for section in document["sections"]]
        print_json({"files": files, "left_out": document["left_out"], "by": by, "sections": sections})
        return
    notes = [note for section in document["sections"] for note in section["notes"] if note["kind"] == "bad"]
    for note in [] if quiet else notes:
        screen(stderr=True).print(note["text"], style="red")
    screen().print(key_values(files))


def read_labels(texts: list[str], rows: Sequence[str], plugins: Sequence[tuple[str, str]] = ()) -> dict[str, str]:
    """Parse display names such as ``fednorm=FedNorm (ours)``.

    Args:
        texts: the display names, as ``ROW=NAME`` or ``ALGORITHM=NAME``.
        rows: the labels of all rows, which may contain ``=``.
        plugins: path and sha256 of the runs' plugins.

    >>> read_labels(["fedavg, lr=0.02=FedAvg", "FedProx(mu=1)=Prox"], ["fedavg, lr=0.02", "fedprox(mu=1.0)"])
    {'fedavg, lr=0.02': 'FedAvg', 'fedprox(mu=1.0)': 'Prox'}
    """
    from fedflat.reporting.page.display_names import leading_algorithm

    labels = {}
    valid = dict.fromkeys([*rows, *map(leading_algorithm, rows)])
    for text in texts:
        ends = [match.start() for match in re.finditer(r"=(?![^(]*\))", text)]  # each "=" outside parentheses
        splits = {text[:end].strip(): text[end + 1 :].strip() for end in reversed(ends)}  # the longest row first
        # A row does not end with the name of a setting, as in "fedavg, lr".
        names = {row: name for row, name in splits.items() if row and name and not re.search(r", \w+$", row)}
        if not names:
            raise UserError(f"cannot read --label '{text}'; expected ROW=NAME, e.g. 'fednorm=FedNorm (ours)'")
        spelling, row = find_row("row", list(names), valid, plugins)
        labels[row] = names[spelling]
    return labels


def find_row(
    kind: str, spellings: Sequence[str], rows: Collection[str], plugins: Sequence[tuple[str, str]]
) -> tuple[str, str]:
    """Find the first of several texts that names a row, in any spelling of its algorithm.

    Plugins are loaded only if no text can be parsed without them, and only those that have not changed since the runs.

    Args:
        kind: what the texts name, for messages.
        spellings: the texts.
        rows: the valid names.
        plugins: path and sha256 of the runs' plugins.

    Returns:
        The text, and the name of the row.
    """
    not_loaded: list[str] = []
    for _ in range(2):  # without and with the plugins
        parsed = {spelling: spelling if spelling in rows else _canonical_row(spelling) for spelling in spellings}
        for spelling, row in parsed.items():
            if row is not None and row in rows:
                return spelling, row
        if any(parsed.values()):
            break
        not_loaded = load_unchanged(plugins)
    nearest = max(spellings, key=lambda text: max(SequenceMatcher(None, text, row).ratio() for row in rows))
    error = one_of(kind, nearest, rows)
    if not_loaded:
        reasons = "; ".join(dict.fromkeys(not_loaded))
        error = UserError(
            f"{error} (only exact names are recognised, because plugins of the runs were not loaded: {reasons}; "
            "pass them with --plugin)"
        )
    raise error


def _canonical_row(text: str) -> str | None:
    """Write the algorithm at the start of a row's label as ``fedflat compare`` does; None if it cannot be parsed."""
    from fedflat.algorithms import algorithm, canonical

    spelling, comma, settings = text.partition(", ")
    try:
        return canonical(algorithm(spelling)) + comma + settings
    except UserError:
        return None


JSON_ENTRIES = ("name", "metric", "rows", "differences", "ranks", "notes")
"""Section entries in the JSON output; curves and views are on the page only."""
