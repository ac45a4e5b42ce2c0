"""fedflat report: runs as one page, as tables and as figures."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from fedflat.cli.shared.flags import JSON, QUIET, optional
from fedflat.cli.shared.screen import facts, print_json, screen

if TYPE_CHECKING:
    from fedflat.reporting.page.gather import Gathered


def report(
    runs: list[Path] = typer.Argument(metavar="RUNS...", help="runs, or folders in which runs lie"),
    out: Path = typer.Option(
        Path("report"), "--out", metavar="FOLDER", help="where the page, the tables and the figures go"
    ),
    title: str = typer.Option("", "--title", metavar="TEXT", help="the title of the page", show_default=False),
    target: list[float] = typer.Option(
        [],
        "--target",
        metavar="VALUE",
        help="also count the rounds until this accuracy (may be repeated)",
        show_default=False,
    ),
    baseline: str | None = optional("--baseline", "what all others are compared with", "the first", metavar="ROW"),
    by: str = typer.Option(
        "mean_last", "--by", metavar="FIGURE", help="differences and ranks by mean_last, last or best"
    ),
    apart: bool = typer.Option(
        False, "--apart", help="runs of different partitions: a section for each, nothing compared across"
    ),
    figures: bool = typer.Option(True, "--figures/--no-figures", help="also draw the figures as PDF"),
    as_json: bool = JSON,
    quiet: bool = QUIET,
) -> None:
    """Write a report on runs: one page that opens without a network, tables as CSV, Markdown and LaTeX, figures as PDF.

    Runs of the same seed are compared as pairs, so that all must have the same data and partition.

    Example: fedflat report runs/first --target 0.9 --baseline fedavg
    """
    from fedflat.reporting.page.document import report_document, require_something
    from fedflat.reporting.page.gather import gather

    gathered = gather(runs)
    if not (quiet or as_json):
        for _, why in gathered.left_out:
            print(f"fedflat: left out: {why}", file=sys.stderr)
    document = report_document(gathered, target, baseline, by, apart)
    require_something(document)
    files = _write(out, gathered, document, title, apart, figures)
    if as_json:
        sections = [{key: section[key] for key in SHOWN} for section in document["sections"]]
        print_json({"files": files, "left_out": document["left_out"], "by": by, "sections": sections})
        return
    for section in document["sections"]:
        for note in section["notes"]:
            if note["kind"] == "bad" and not quiet:
                screen(stderr=True).print(note["text"], style="red", markup=False)
    screen().print(facts(files))


SHOWN = ("name", "metric", "rows", "differences", "ranks", "notes")
"""What of a section the JSON has; curves and views are in the page."""


def _write(
    out: Path, gathered: Gathered, document: dict[str, Any], title: str, apart: bool, figures: bool
) -> dict[str, str]:
    """Every file of a report; says where they are."""
    from datetime import date

    from fedflat import __version__
    from fedflat.cli.shared.one_run import write_figure
    from fedflat.experiment.store.atomic_files import create_folder, write_whole
    from fedflat.reporting.page.gather import grouped
    from fedflat.reporting.page.page import report_page
    from fedflat.reporting.page.views import landscapes_of
    from fedflat.reporting.tables.files import difference_table, result_table, table_csv, values_csv

    create_folder(out)
    landscapes = [landscapes_of(group) for group in grouped(gathered.records, apart)]
    made = f"fedflat {__version__} on {date.today().isoformat()}"
    write_whole(out / "report.html", report_page(document, title, landscapes, made))
    write_whole(out / "values.csv", values_csv(document))
    several = len(document["sections"]) > 1
    for number, section in enumerate(document["sections"], 1):
        ending = f"-{number}" if several else ""
        write_whole(out / f"settings{ending}.yaml", section["repeat"]["settings"])
        tables = {
            "results": result_table(section, document["targets"]),
            "differences": difference_table(section, document["by"]),
        }
        for name, table in tables.items():
            if table is not None:
                write_whole(out / f"{name}{ending}.csv", table_csv(table))
                write_whole(out / f"{name}{ending}.md", table.markdown())
                write_whole(out / f"{name}{ending}.tex", table.latex())
        if figures:
            from fedflat.reporting.figures.paper_figures import figures_of

            for name, figure in figures_of(section, document["by"]).items():
                write_figure(figure, out / "figures" / f"{name}{ending}.pdf")
    found = {"page": out / "report.html", "tables": out / "results*.csv, .md, .tex", "every value": out / "values.csv"}
    return {name: str(path) for name, path in (found | ({"figures": out / "figures"} if figures else {})).items()}
