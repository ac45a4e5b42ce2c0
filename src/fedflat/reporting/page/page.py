"""The report as one self-contained HTML page."""

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
from fedflat.experiment.store.files import create_folder, write_whole
from fedflat.reporting.figures.files import write_figure
from fedflat.reporting.page.document import (
    FIGURES,
    evaluations,
    interval,
    report_document,
    require_something,
    shown_p,
    signed,
    uneven,
)
from fedflat.reporting.page.gather import Gathered, grouped
from fedflat.reporting.page.views import landscapes_of
from fedflat.reporting.tables.files import difference_table, result_table, table_csv, values_csv
from fedflat.units import is_share, shown_bytes, shown_count, shown_metric, shown_seconds

if TYPE_CHECKING:
    from jinja2 import Template
    from markupsafe import Markup

    from fedflat.flatness.landscapes.grid import Landscape

Values = Mapping[str, Any]
IN_SCRIPTS = ("metric", "rows", "curves", "differences", "ranks", "partition", "views")
"""Values that the page's script plots."""


def report_page(
    document: Values,
    title: str = "",
    landscapes: Sequence[Mapping[str, Landscape]] = (),
    made: str = "",
    value: str = "train_loss",
) -> str:
    """The page of a report; ``landscapes`` holds each section's landscapes, which embed Plotly."""
    sections = document["sections"]
    turned = _landscapes(landscapes, value) or [None] * len(sections)
    library = _library() if any(turned) else ""
    return _template().render(
        document=document,
        title=title or _title(sections),
        subtitle=_subtitle(document),
        css=_text("page.css"),
        js=_text("charts.js") + _text("page.js").replace('"use strict";\n', "", 1),
        data=_for_scripts(document),
        landscapes=turned,
        library=library,
        made=made,
        parts=lambda section: _parts(section, turned[sections.index(section)] is not None),
        facts=_facts,
        partition_facts=_partition_facts,
        result_heads=lambda section: _result_heads(section, document["targets"]),
        top=_top,
        evaluations=evaluations,
        breakable=breakable,
        metric=shown_metric,
        signed=signed,
        interval=interval,
        p=shown_p,
        bytes=shown_bytes,
        seconds=shown_seconds,
        count=shown_count,
        short=lambda number: "–" if number is None else f"{number:.4g}",
    )


@cache
def _template() -> Template:
    from jinja2 import Environment, StrictUndefined

    return Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True).from_string(
        _text("page.html")
    )


@cache
def _text(name: str) -> str:
    return (files("fedflat.reporting.page") / "templates" / name).read_text(encoding="utf-8")


def _for_scripts(document: Values) -> str:
    """The plotted values as JSON that cannot close its script element."""
    sections = [
        {name: section[name] for name in IN_SCRIPTS}
        | {"rows": [{"number": row["number"], "label": row["label"]} for row in section["rows"]]}
        | {
            "partition": {"shown": section["partition"]["shown"]},
            "shares": [name for name in section["metrics"] if is_share(name)],
        }
        for section in document["sections"]
    ]
    return json.dumps({"sections": sections}, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _landscapes(landscapes: Sequence[Mapping[str, Landscape]], value: str) -> list[dict[str, Any] | None]:
    from fedflat.reporting.figures.landscape_page import landscape_parts
    from fedflat.reporting.figures.landscapes import Panel

    found: list[dict[str, Any] | None] = []
    for some in landscapes:
        panels = [Panel(name, landscape) for name, landscape in some.items() if value in landscape.values]
        if not panels:
            found.append(None)
            continue
        about, parts = landscape_parts(panels, value, library=False)
        found.append({"about": about, "parts": parts})
    return found


def _library() -> str:
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())


def breakable(label: str) -> Markup:
    """A label with line-break opportunities between its parts.

    >>> breakable("fedavg+wima(window=10)")
    Markup('fedavg+<wbr>wima<wbr>(window=10)')
    """
    from markupsafe import Markup, escape

    return Markup(re.sub(r"([+,])", r"\1<wbr>", str(escape(label))).replace("(", "<wbr>("))


def _title(sections: Sequence[Values]) -> str:
    names = [section["name"] for section in sections]
    if len(names) > 1:
        return f"Comparison on {len(names)} partitions"
    labels = [row["label"] for row in sections[0]["rows"]]
    return f"{labels[0]} on {names[0]}" if len(labels) == 1 else f"{len(labels)} models compared on {names[0]}"


def _subtitle(document: Values) -> str:
    runs, rows = document["runs"], sum(len(section["rows"]) for section in document["sections"])
    return f"{runs} run{'s' * (runs != 1)}, {rows} row{'s' * (rows != 1)}. Rows: algorithm + evaluated average."


def _parts(section: Values, landscapes: bool) -> list[tuple[str, str]]:
    """The available parts of a section, for the table of contents."""
    wanted = {
        "notes": ("Before you believe it", True),
        "results": ("Results", True),
        "differences": ("Differences", section["differences"]),
        "ranks": ("Ranks", section["ranks"]),
        "curves": ("Over rounds and cost", section["metrics"]),
        "partition": ("The partition", True),
        "log": ("Flatness over rounds", section["views"]["log"]),
        "spectra": ("Spectra", section["views"]["spectra"]),
        "landscapes": ("Landscapes", landscapes),
        "clients": ("Clients and forgetting", section["views"]["clients"]),
        "repeat": ("How to repeat it", True),
    }
    return [(name, words) for name, (words, there) in wanted.items() if there]


def _facts(section: Values) -> list[tuple[str, str]]:
    runs, rows = section["runs"], section["rows"]
    rounds = sorted({run["of"] for run in runs})
    found = [
        ("rounds", str(rounds[0]) if len(rounds) == 1 else f"{rounds[0]} to {rounds[-1]}"),
        ("runs", str(len(runs))),
    ]
    differing = sorted({name for row in rows for name in row["settings"]})
    if differing:
        found.append(("settings that differ", ", ".join(differing)))
    return [*found, ("metric", f"test {section['metric']}")]


def _partition_facts(partition: Values) -> list[tuple[str, str]]:
    sizes = partition["sizes"]
    hashes = ", ".join(f"seed {seed}: {digest[:12]}" for seed, digest in list(partition["hashes"].items())[:10])
    return [
        ("examples per client", f"{sizes['min']} to {sizes['max']}, median {sizes['median']:g}"),
        ("classes per client", f"{partition['classes_per_client']:.2f} on average"),
        (
            "heterogeneity",
            f"{partition['heterogeneity']:.3f} (mean total variation distance from all data; 0 is i.i.d.)",
        ),
        (
            "coverage",
            f"{100 * partition['coverage']:.1f} % of the training examples, "
            f"{shown_count(partition['duplicates'])} used more than once",
        ),
        *([("unseen clients", shown_count(partition["unseen"]))] if partition["unseen"] else []),
        ("hash", hashes),
    ]


def _result_heads(section: Values, targets: Sequence[float]) -> list[str]:
    reached = [f"rounds to {100 * target:g} %" if section["share"] else f"rounds to {target:g}" for target in targets]
    return ["row", *FIGURES.values(), "seeds", *reached, "backward passes", "sent up", "sent down", "time"]


def _top(section: Values, figure: str) -> float | None:
    """The best mean of a summary value, if there are several comparable rows."""
    means = [row["spread"][figure]["mean"] for row in section["rows"] if row["spread"][figure]]
    return None if len(means) < 2 or uneven(section["rows"], figure) else max(means)


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
