"""fedflat report: HTML page, tables and figures of runs."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import typer

from fedflat.cli.shared.flags import JSON, QUIET, RUNS_BELOW, TARGETS, no_default, optional
from fedflat.cli.shared.screen import key_values, print_json, screen
from fedflat.errors import UserError


def report(
    runs: list[Path] = RUNS_BELOW,
    out: Path = typer.Option(Path("report"), "--out", metavar="FOLDER", help="output folder"),
    title: str = typer.Option("", "--title", metavar="TEXT", help="the title of the page", show_default=False),
    target: list[float] = TARGETS,
    baseline: str | None = optional("--baseline", "row that others are compared with", "the first", metavar="ROW"),
    by: str = typer.Option(
        "mean_last", "--by", metavar="FIGURE", help="value for differences and ranks: mean_last, last or best"
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
        "display name of a row or algorithm, e.g. 'fednorm=FedNorm (ours)'; repeatable (default: as in its paper)",
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
    from fedflat.reporting.page.gather import gather, group_runs
    from fedflat.reporting.page.page import write_report

    gathered = gather(runs)
    if not (quiet or as_json):
        for _, reason in gathered.left_out:
            print(f"fedflat: left out: {reason}", file=sys.stderr)
    names = [name.strip() for name in columns.split(",") if name.strip()]
    for record in gathered.records if label or baseline else ():
        with suppress(UserError):  # e.g. the plugin no longer exists; its algorithms then need their exact spelling
            if record.folder is not None:
                record.folder.load_plugins()
    baseline = baseline and canonical_row(baseline)
    options: dict[str, Any] = {"baseline": baseline, "by": by, "apart": apart, "columns": names, "figures": figures}
    options["labels"] = read_labels(
        label, [row for group in group_runs(gathered.records, apart) for row, _, _ in group.rows] if label else ()
    )
    document, files = write_report(gathered, out, title=title, targets=target, **options)
    if as_json:
        sections = [{key: section[key] for key in JSON_ENTRIES} for section in document["sections"]]
        print_json({"files": files, "left_out": document["left_out"], "by": by, "sections": sections})
        return
    if not quiet:
        for section in document["sections"]:
            for note in section["notes"]:
                if note["kind"] == "bad":
                    screen(stderr=True).print(note["text"], style="red", markup=False)
    screen().print(key_values(files))


def read_labels(texts: list[str], rows: Sequence[str]) -> dict[str, str]:
    """Parse display names such as ``fednorm=FedNorm (ours)``.

    Args:
        texts: the display names, as ``ROW=NAME`` or ``ALGORITHM=NAME``.
        rows: the labels of all rows, which may contain ``=``.

    >>> read_labels(["fedavg, lr=0.02=FedAvg", "FedProx(mu=1)=Prox"], ["fedavg, lr=0.02", "fedprox(mu=1.0)"])
    {'fedavg, lr=0.02': 'FedAvg', 'fedprox(mu=1.0)': 'Prox'}
    """
    labels = {}
    for text in texts:
        ends = [match.start() for match in re.finditer(r"=(?![^(]*\))", text)]  # each "=" outside parentheses
        splits = [(canonical_row(text[:end].strip()), text[end + 1 :].strip()) for end in ends]
        if not splits or not all(splits[0]):
            raise UserError(f"cannot read --label '{text}'; expected ROW=NAME, e.g. 'fednorm=FedNorm (ours)'")
        row, name = next((split for split in reversed(splits) if split[0] in rows and split[1]), splits[0])
        labels[row] = name
    return labels


def canonical_row(text: str) -> str:
    """Write the algorithm at the start of a row's label as ``fedflat compare`` does; other texts stay unchanged."""
    from fedflat.algorithms import algorithm, canonical

    spelling, comma, settings = text.partition(", ")
    try:
        return canonical(algorithm(spelling)) + comma + settings
    except UserError:
        return text


JSON_ENTRIES = ("name", "metric", "rows", "differences", "ranks", "notes")
"""Section entries in the JSON output; curves and views are on the page only."""
