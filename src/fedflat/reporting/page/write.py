"""The files of a report: an HTML page, tables and figures."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

from fedflat import __version__
from fedflat.experiment.store.atomic_files import create_folder, write_whole
from fedflat.reporting.figures.files import write_figure
from fedflat.reporting.page.document import report_document, require_something
from fedflat.reporting.page.gather import Gathered, grouped
from fedflat.reporting.page.page import report_page
from fedflat.reporting.page.views import landscapes_of
from fedflat.reporting.tables.files import difference_table, result_table, table_csv, values_csv


def write_report(
    gathered: Gathered,
    out: Path,
    *,
    title: str = "",
    targets: Sequence[float] = (),
    baseline: str | None = None,
    by: str = "mean_last",
    apart: bool = False,
    figures: bool = True,
) -> tuple[dict[str, Any], dict[str, str]]:
    """Write a report on runs.

    Args:
        gathered: the runs, from ``gather``.
        out: the folder to write to.
        title: title of the page.
        targets: also report the rounds until each of these values of the metric.
        baseline: row that the others are compared with; default: the first.
        by: compare by ``mean_last``, ``last`` or ``best``.
        apart: allow runs with different partitions, in separate sections.
        figures: also draw figures, as PDF.

    Returns:
        The report's content, and the paths of its files by kind.
    """
    document = report_document(gathered, list(targets), baseline, by, apart)
    require_something(document)
    create_folder(out)
    landscapes = [landscapes_of(group) for group in grouped(gathered.records, apart)]
    made = f"fedflat {__version__} on {date.today().isoformat()}"
    write_whole(out / "report.html", report_page(document, title, landscapes, made))
    write_whole(out / "values.csv", values_csv(document))
    for number, section in enumerate(document["sections"], 1):
        ending = f"-{number}" if len(document["sections"]) > 1 else ""
        write_whole(out / f"settings{ending}.yaml", section["repeat"]["settings"])
        tables = {"results": result_table(section, document["targets"]), "differences": difference_table(section, by)}
        for name, table in tables.items():
            if table is not None:
                write_whole(out / f"{name}{ending}.csv", table_csv(table))
                write_whole(out / f"{name}{ending}.md", table.markdown())
                write_whole(out / f"{name}{ending}.tex", table.latex())
        if figures:
            from fedflat.reporting.figures.paper_figures import figures_of

            for name, figure in figures_of(section, by).items():
                write_figure(figure, out / "figures" / f"{name}{ending}.pdf")
    files = {"page": out / "report.html", "tables": out / "results*.csv, .md, .tex", "every value": out / "values.csv"}
    if figures:
        files["figures"] = out / "figures"
    return document, {name: str(path) for name, path in files.items()}
