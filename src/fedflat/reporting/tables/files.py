"""Tables of a report as CSV (full precision), Markdown and LaTeX (booktabs)."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedflat.reporting.page.document import (
    SUMMARY_LABELS,
    shown_difference,
    shown_evaluations,
    shown_interval,
    shown_p,
)
from fedflat.units import is_share, shown_count, shown_metric, shown_seconds

Values = Mapping[str, Any]
DIFFERENCE_HEADS = ("row", "difference", "95 % bootstrap", "95 % Student", "pairs", "test", "p", "p after Holm")
_LATEX_ESCAPES = str.maketrans(
    {character: f"\\{character}" for character in "&%$#_{}"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    | {"±": r"$\pm$", "−": "$-$", "–": "--", "<": "$<$"}
)


@dataclass(frozen=True)
class TextTable:
    """Formatted cells with a caption; the first column is text, the others are numeric."""

    caption: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def csv(self) -> str:
        """The formatted table as CSV."""
        return csv_text([self.heads, *self.rows])

    def markdown(self) -> str:
        """The table in Markdown."""
        alignment = ["---", *["---:"] * (len(self.heads) - 1)]
        text = f"{self.caption}\n\n"
        for line in (self.heads, alignment, *self.rows):
            text += "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n"
        return text

    def latex(self) -> str:
        """The table in LaTeX; needs ``\\usepackage{booktabs}``."""
        columns = "l" + "r" * (len(self.heads) - 1)
        lines = [
            r"\begin{table}[t]",
            r"\centering",
            rf"\caption{{{latex_text(self.caption)}}}",
            rf"\begin{{tabular}}{{{columns}}}",
            r"\toprule",
            _latex_row(self.heads),
            r"\midrule",
            *map(_latex_row, self.rows),
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
        ]
        return "\n".join(lines) + "\n"


def _latex_row(cells: Iterable[str]) -> str:
    return " & ".join(map(latex_text, cells)) + r" \\"


def latex_text(text: str) -> str:
    """Escape text for LaTeX.

    >>> latex_text("fedavg+wima(window=20) 83.1 ± 0.2 %")
    'fedavg+wima(window=20) 83.1 $\\\\pm$ 0.2 \\\\%'
    """
    return text.translate(_LATEX_ESCAPES)


def result_table(section: Values, targets: Sequence[float]) -> TextTable:
    """Make the results table of a section: one line per row, with summary values, rounds to targets and costs."""
    metric = section["metric"]
    target_heads = [f"rounds to {target:g}" for target in targets]
    heads = ("row", *SUMMARY_LABELS.values(), "seeds", *target_heads, "backward passes", "MB up", "time")
    rows = []
    for row in section["rows"]:
        values = [
            _shown_spread(row["spread"][name], metric) + shown_evaluations(section["rows"], row, name)
            for name in SUMMARY_LABELS
        ]
        seeds = f"{len(row['seeds'])}" + (f" ({len(row['diverged'])} diverged)" if row["diverged"] else "")
        rounds = [_shown_rounds(target) for target in row["reached"]]
        passes, bytes_up = shown_count(row["cost"]["backward_passes"]), row["cost"]["bytes_up"]
        megabytes = "–" if bytes_up is None else f"{bytes_up / 1e6:.4g}"
        rows.append((row["label"], *values, seeds, *rounds, passes, megabytes, shown_seconds(row["seconds"])))
    unit = " in per cent" if is_share(metric) else ""
    caption = f"Test {metric}{unit} on {section['name']}: mean ± standard deviation over seeds."
    return TextTable(caption, heads, tuple(rows))


def _shown_spread(spread: Values | None, metric: str) -> str:
    """Format mean and standard deviation over seeds; the latter only for several seeds."""
    if spread is None:
        return "–"
    mean = shown_metric(spread["mean"], metric)
    return f"{mean} ± {shown_metric(spread['std'], metric)}" if spread["count"] > 1 else mean


def _shown_rounds(target: Values) -> str:
    """Format the rounds to a target, with the share of runs that reached it unless all did."""
    text: str = target["text"]
    return text if target["reached"] == target["runs"] else f"{text} ({target['reached']}/{target['runs']})"


def difference_table(section: Values, by: str) -> TextTable | None:
    """Make the table of a section's differences, compared by ``by``; None if nothing is compared."""
    if not section["differences"]:
        return None
    metric = section["metric"]
    rows = []
    for difference in section["differences"]:
        label, pair = difference["label"], difference["pair"]
        if pair is None:
            rows.append((label, "–", "–", "–", "0", "none", "–", "–"))
            continue
        intervals = [shown_interval(pair[name], metric) for name in ("interval", "t_interval")]
        test = (str(len(pair["seeds"])), pair["test"], shown_p(pair["p"]), shown_p(difference["holm"]))
        rows.append((label, shown_difference(pair["mean"], metric), *intervals, *test))
    baseline = section["rows"][section["baseline"]]["label"]
    unit = " in percentage points" if is_share(metric) else ""
    caption = f"Differences from {baseline} in the {SUMMARY_LABELS[by]}, paired by seed{unit}."
    return TextTable(caption, DIFFERENCE_HEADS, tuple(rows))


def values_csv(document: Values) -> str:
    """Write every value of every row and seed in full precision as CSV, one line each."""
    lines: list[tuple[object, ...]] = [("section", "row", "algorithm", "model", "seed", "figure", "value")]
    for section in document["sections"]:
        for row in section["rows"]:
            key = (section["name"], row["label"], row["algorithm"], row["model"])
            for name, values in row["values"].items():
                lines += [(*key, seed, SUMMARY_LABELS[name], value) for seed, value in values.items()]
            lines += [(*key, seed, "diverged", "") for seed in row["diverged"]]
    return csv_text(lines)


def csv_text(lines: Iterable[Iterable[object]]) -> str:
    """Write lines of cells, the first of them the heading, as CSV."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(lines)
    return text.getvalue()
