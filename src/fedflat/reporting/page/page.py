"""The report as one self-contained HTML page, and its files: page, tables and figures."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import date
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedflat import __version__
from fedflat.display import (
    column_format,
    counted,
    is_share,
    shown_bytes,
    shown_count,
    shown_difference,
    shown_metric,
    shown_p,
    shown_seconds,
    shown_target,
)
from fedflat.engines.problem.task import is_error
from fedflat.errors import UserError
from fedflat.experiment.store.files import create_folder, write_atomically
from fedflat.reporting.figures.files import write_figure
from fedflat.reporting.figures.style import MARKERS, LineStyle
from fedflat.reporting.page.display_names import display_name, names_row, with_display_names
from fedflat.reporting.page.document import has_uneven_means, report_document, require_evaluations, shown_evaluations
from fedflat.reporting.page.gather import Gathered, group_runs
from fedflat.reporting.page.repeat import repeat_commands, report_options
from fedflat.reporting.page.views import landscapes_of
from fedflat.reporting.tables.files import (
    DIFFERENCE_HEADS,
    EQUAL_EXPLANATION,
    check_columns,
    difference_interval,
    difference_table,
    flatness_table,
    result_table,
    values_csv,
)
from fedflat.reporting.tables.latex import DIFFERENCE_COLUMNS, RESULT_COLUMNS, first_columns, latex_table
from fedflat.reporting.tables.summary import best_of, class_texts, shown_range, shown_sizes

if TYPE_CHECKING:
    from jinja2 import Template
    from markupsafe import Markup

    from fedflat.flatness.landscapes.grid import Landscape

Values = Mapping[str, Any]
GLYPHS = dict(zip(MARKERS, "●■◆▲▼✚✖★", strict=True))
"""Characters that look like matplotlib's markers, by the name of the marker."""
PLOTTED = ("metric", "curves", "differences", "ranks", "views")
"""Keys of a section whose values are passed unchanged to the page's script, which plots them."""


def report_page(
    document: Values,
    title: str = "",
    landscapes: Sequence[Mapping[str, Landscape]] = (),
    made: str = "",
    commands: Sequence[Sequence[str]] = (),
) -> str:
    """Render the page of a report as self-contained HTML.

    Args:
        document: the content, from ``report_document``.
        title: title of the page; default: from the content.
        landscapes: for each section, its landscapes by name; they add the Plotly library to the page. Default: none.
        made: version and date for the footer.
        commands: for each section, the commands that repeat it. Default: none.
    """
    sections = document["sections"]
    landscape_parts = []
    for section, by_name in zip(sections, landscapes or [{}] * len(sections), strict=True):
        styles = {row["label"]: LineStyle(row["style"]) for row in section["rows"]}
        landscape_parts.append(_landscape_html(by_name, styles))
    return _template().render(  # the arguments below ``made`` are functions and constants that the template uses
        document=document,
        title=title or _title(sections),
        subtitle=_subtitle(document),
        css=_template_file("page.css"),
        js=_template_file("charts.js") + _template_file("page.js").replace('"use strict";\n', "", 1),
        data=_plotted_json(document),
        landscapes=landscape_parts,
        library=_plotly() if any(landscape_parts) else "",
        made=made,
        commands=commands or [()] * len(sections),
        parts=_parts,
        facts=_facts,
        partition_facts=_partition_facts,
        result_heads=lambda section: _result_heads(section, document["targets"]),
        difference_heads=DIFFERENCE_HEADS,
        best=_best_mean,
        evaluations=shown_evaluations,
        breakable=breakable,
        metric=shown_metric,
        signed=shown_difference,
        interval=difference_interval,
        best_rounds=_best_rounds,
        equal_explanation=EQUAL_EXPLANATION,
        p=shown_p,
        bytes=shown_bytes,
        largest=_largest_cost,
        column_format=lambda rows, name: column_format(row[name] for row in rows),
        seconds=shown_seconds,
        count=shown_count,
        settings_file=lambda number: f"settings{_suffix(document, number)}.yaml",
        glyph=lambda number: GLYPHS[LineStyle(number).marker],
        short=lambda number, number_format: "–" if number is None else format(number, number_format),
    )


@cache
def _template() -> Template:
    """Load the page's template; a misspelt variable is an error."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(_template_file("page.html"))


@cache
def _template_file(name: str) -> str:
    return (files("fedflat.reporting.page") / "templates" / name).read_text(encoding="utf-8")


def _plotted_json(document: Values) -> str:
    """Write the plotted values as JSON; "<" is escaped, so that a label cannot close the script element."""
    sections = []
    for section in document["sections"]:
        values = {name: section[name] for name in PLOTTED}
        values["rows"] = [{name: row[name] for name in ("number", "label", "style")} for row in section["rows"]]
        values["partition"] = {"class_counts": section["partition"]["class_counts"]}
        values["shares"] = [name for name in section["metrics"] if is_share(name)]
        lower_is_better = {name: is_error(name) for name in section["metrics"]}
        lower_is_better[section["metric"]] = section["lower_is_better"]
        values["falling"] = [name for name, is_falling in lower_is_better.items() if is_falling]
        sections.append(values)
    values = {"sections": sections, "targets": document["targets"]}
    return json.dumps(values, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _landscape_html(landscapes: Mapping[str, Landscape], styles: Mapping[str, LineStyle]) -> dict[str, Any] | None:
    """Render the landscapes of the training loss as HTML, with a note on their scale; None if there are none.

    The page embeds the Plotly library once, for all sections. ``styles`` holds colours and markers by name.
    """
    from fedflat.reporting.figures.landscape_page import landscape_parts
    from fedflat.reporting.figures.landscape_panels import panels_of

    panels = panels_of(landscapes)
    if not panels:
        return None
    about, rows = landscape_parts(panels, "train_loss", library=False, styles=styles)
    return {"about": about, "rows": rows}


def _plotly() -> str:
    """Return the source code of the Plotly library."""
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())


def breakable(label: str) -> Markup:
    """Insert line-break opportunities between the parts of a label.

    >>> breakable("fedavg+wima(window=10)")
    Markup('fedavg+<wbr>wima<wbr>(window=10)')
    """
    from markupsafe import Markup, escape

    return Markup(re.sub(r"([+,])", r"\1<wbr>", str(escape(label))).replace("(", "<wbr>("))


def _title(sections: Sequence[Values]) -> str:
    """Return the default title of a report with these sections."""
    names = [section["name"] for section in sections]
    if len(names) > 1:
        return f"Comparison on {len(names)} partitions"
    rows = sections[0]["rows"]
    kind = "algorithms" if _rows_are_algorithms(rows) else "models"
    return f"{rows[0]['label']} on {names[0]}" if len(rows) == 1 else f"{len(rows)} {kind} compared on {names[0]}"


def _rows_are_algorithms(rows: Sequence[Values]) -> bool:
    """Whether rows differ only in their algorithms, neither in settings nor in the evaluated average."""
    return all(row["model"] == "server" and not row["settings"] for row in rows)


def _subtitle(document: Values) -> str:
    """Return a line on how many runs and rows the page shows, and what a row is."""
    rows = [row for section in document["sections"] for row in section["rows"]]
    if len(document["sections"]) == 1 and _rows_are_algorithms(rows):
        seeds = counted(len(document["sections"][0]["seeds"]), "seed")
        return f"{counted(len(rows), 'algorithm')}, {seeds}."
    return f"{counted(document['runs'], 'run')}, {counted(len(rows), 'row')}. Rows: algorithm + evaluated average."


def _parts(section: Values, has_landscapes: bool) -> list[tuple[str, str]]:
    """Return anchor and heading of the available parts of a section, for the table of contents."""
    parts = {
        "notes": ("Caveats", True),
        "results": ("Results", True),
        "differences": ("Differences", section["differences"]),
        "ranks": ("Ranks", section["ranks"]),
        "curves": ("Over rounds and cost", section["metrics"]),
        "partition": ("The partition", True),
        "log": ("Flatness over rounds", section["views"]["log"]),
        "spectra": ("Spectra", section["views"]["spectra"]),
        "measures": ("Flatness tables", section["views"]["tables"]),
        "landscapes": ("Landscapes", has_landscapes),
        "clients": ("Clients and forgetting", section["views"]["clients"]),
        "repeat": ("How to reproduce it", True),
    }
    return [(anchor, heading) for anchor, (heading, is_available) in parts.items() if is_available]


def _facts(section: Values) -> dict[str, str]:
    """Return facts on the runs of a section, by name: rounds, number of runs, settings that differ, and metric."""
    runs = section["runs"]
    facts = {"rounds": shown_range(run["of"] for run in runs), "runs": str(len(runs))}
    differing = sorted({name for row in section["rows"] for name in row["settings"]})
    if differing:
        facts["settings that differ"] = ", ".join(differing)
    direction = " (lower is better)" if section["lower_is_better"] else ""
    return facts | {"metric": f"test {section['metric']}{direction}"}


def _partition_facts(partition: Values) -> dict[str, str]:
    """Return facts on a partition, by name, such as examples per client and the hash for each of up to ten seeds."""
    sizes, hashes = partition["sizes"], list(partition["hashes"].items())[:10]
    repeated = shown_count(partition["duplicates"])
    has_classes = len(partition["class_counts"][0]) > 1  # regression has a single column
    facts = {
        "examples per client": shown_sizes(sizes),
        **(class_texts(partition) if has_classes else {}),
        "coverage": f"{100 * partition['coverage']:.1f} % of the training examples, {repeated} used more than once",
    }
    if partition["unseen"]:
        facts["clients held out from training"] = shown_count(partition["unseen"])
    return facts | {"hash": ", ".join(f"seed {seed}: {digest[:12]}" for seed, digest in hashes)}


def _result_heads(section: Values, targets: Sequence[float]) -> list[str]:
    """Return the column headings of the results table."""
    shown = [shown_target(target, section["metric"]) for target in targets]
    kinds = ("rounds", "virtual time", "sent") if section["timed"] else ("rounds",)
    reached = [f"{kind} to {target}" for target in shown for kind in kinds]
    return ["row", *section["summaries"].values(), "seeds", *reached, "backward passes", "sent up", "sent down", "time"]


def _best_mean(section: Values, name: str) -> float | None:
    """Return the best mean over seeds of the summary value ``name``; None unless several rows can be compared."""
    means = [row["spread"][name]["mean"] for row in section["rows"] if row["spread"][name]]
    if len(means) < 2 or has_uneven_means(section["rows"], name):
        return None
    return best_of(means, section["lower_is_better"])


def _best_rounds(section: Values, index: int) -> float | None:
    """Return the fewest median rounds to the target with this index; None unless there are several rows."""
    medians = [row["reached"][index]["median"] for row in section["rows"]]
    return min((rounds for rounds in medians if rounds is not None), default=None) if len(medians) > 1 else None


def _largest_cost(section: Values, name: str) -> float | None:
    """Return the largest cost of this name in the rows, which determines the unit of its column."""
    return max((row["cost"][name] for row in section["rows"] if row["cost"][name]), default=None)


def _suffix(document: Values, number: int) -> str:
    """Return the end of the names of a section's files, which is empty if there is only one section."""
    return f"-{number}" if len(document["sections"]) > 1 else ""


def _table_files(document: Values, columns: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Format all tables as CSV, Markdown and LaTeX.

    Args:
        document: the content of the report.
        columns: columns of the results table. By default, LaTeX tables have the few that fit into a paper's text
            column, and the other formats have all.

    Returns:
        The text of each file by name, and a message for each LaTeX table that is too wide.
    """
    files: dict[str, str] = {}
    too_wide = []
    for number, section in enumerate(document["sections"], 1):
        results = result_table(section, document["targets"], every_column=bool(columns))
        differences = difference_table(section, document["by"])
        # By file name: the table, and the columns that it has in LaTeX.
        tables = {"results": (results.select(columns) if columns else results, columns or RESULT_COLUMNS)}
        if differences is not None:
            tables["differences"] = (differences, DIFFERENCE_COLUMNS)
        if (flatness := flatness_table(section)) is not None:
            tables["flatness"] = (flatness, first_columns(flatness))
        for name, (table, latex_columns) in tables.items():
            file = f"{name}{_suffix(document, number)}"
            files |= {f"{file}.csv": table.csv(), f"{file}.md": table.markdown()}
            try:
                files[f"{file}.tex"] = latex_table(table.select(latex_columns), f"tab:{file}")
            except UserError as error:
                too_wide.append(f"{file}.tex was not written: {error}")
    return files, too_wide


def write_report(
    gathered: Gathered,
    out: Path,
    *,
    title: str = "",
    targets: Sequence[float] = (),
    baseline: str | None = None,
    by: str = "mean_last",
    apart: bool = False,
    columns: Sequence[str] = (),
    labels: Mapping[str, str] | None = None,
    figures: bool = True,
) -> tuple[dict[str, Any], dict[str, str]]:
    """Write a report on runs: an HTML page, tables, settings and figures.

    Args:
        gathered: the runs, from ``gather``.
        out: the folder to write to.
        title: title of the page; default: from the content.
        targets: values of the metric; the report states how many rounds each run needs to reach them.
        baseline: label or algorithm of the row that the others are compared with; default: the first row.
        by: summary value to compare: ``mean_last``, ``last``, ``best`` or ``at_best_validation``.
        apart: allow runs with different datasets or partitions, in separate sections.
        columns: columns of the results tables; default: all, or in LaTeX those that fit into a paper's text column.
        labels: display names by row or algorithm; default: as in the algorithm's paper.
        figures: whether to draw figures, as PDF.

    Returns:
        The report's content with rows labelled by their algorithms, and the paths of its files by kind.

    Raises:
        UserError: a LaTeX table is too wide for a page; all other files have been written.
    """
    check_columns(columns, targets)
    document = report_document(gathered, list(targets), baseline, by, apart)
    require_evaluations(document)
    labels = labels or {}
    shown_document, names = with_display_names(document, labels)
    tables, too_wide = _table_files(shown_document, columns)
    create_folder(out)
    write_atomically(out / "values.csv", values_csv(document))
    for name, text in tables.items():
        write_atomically(out / name, text)
    groups = group_runs(gathered.records, apart)
    landscapes = [
        {display_name(name, names, labels): landscape for name, landscape in landscapes_of(group).items()}
        for group in groups
    ]
    commands, suffixes = [], [_suffix(document, number) for number in range(1, len(groups) + 1)]
    for suffix, group, section in zip(suffixes, groups, document["sections"], strict=True):
        rows = [row.label for row in group.rows]
        section_labels = {name: label for name, label in labels.items() if names_row(name, rows)}
        section_baseline = baseline if section["baseline"] is not None else None
        options = report_options(title, targets, section_baseline, by, columns, section_labels, figures)
        commands.append(repeat_commands(group, out / f"settings{suffix}.yaml", f"repeated{suffix}", options))
    version = f"fedflat {__version__} on {date.today().isoformat()}"
    write_atomically(out / "report.html", report_page(shown_document, title, landscapes, version, commands=commands))
    for suffix, section, by_name in zip(suffixes, shown_document["sections"], landscapes, strict=True):
        write_atomically(out / f"settings{suffix}.yaml", section["settings"])
        if figures:
            from fedflat.reporting.figures.paper_figures import figures_of

            for name, figure in figures_of(section, by, by_name, targets).items():
                write_figure(figure, out / "figures" / f"{name}{suffix}.pdf")
    files = {"page": out / "report.html", "tables": out / "*.csv, *.md, *.tex", "every value": out / "values.csv"}
    if figures:
        files["figures"] = out / "figures"
    if too_wide:
        raise UserError(f"{'; '.join(too_wide)} (all other files are in {out})")
    return document, {name: str(path) for name, path in files.items()}
