"""Tables of a report as CSV (full precision), Markdown and LaTeX (booktabs)."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedflat.reporting.page.document import FIGURES, evaluations, interval, shown_p, signed
from fedflat.units import is_share, shown_count, shown_metric, shown_seconds

Values = Mapping[str, Any]
_SPECIAL = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"} | {
    c: f"\\{c}" for c in "&%$#_{}"
}


@dataclass(frozen=True)
class TextTable:
    """Formatted cells with a caption; the first column is text, the others are numeric."""

    caption: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def markdown(self) -> str:
        """The table in Markdown."""
        lines = [self.heads, ("---", *["---:"] * (len(self.heads) - 1)), *self.rows]
        escaped = ([cell.replace("|", "\\|") for cell in line] for line in lines)
        return f"{self.caption}\n\n" + "".join(f"| {' | '.join(line)} |\n" for line in escaped)

    def latex(self) -> str:
        """The table in LaTeX; needs ``\\usepackage{booktabs}``."""
        columns = "l" + "r" * (len(self.heads) - 1)
        lines = [
            r"\begin{table}[t]",
            r"\centering",
            rf"\caption{{{latex_text(self.caption)}}}",
            rf"\begin{{tabular}}{{{columns}}}",
            r"\toprule",
        ]
        lines += [
            _line(self.heads),
            r"\midrule",
            *map(_line, self.rows),
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
        ]
        return "\n".join(lines) + "\n"


def _line(cells: Iterable[str]) -> str:
    return " & ".join(map(latex_text, cells)) + r" \\"


def latex_text(text: str) -> str:
    """Text escaped for LaTeX.

    >>> latex_text("fedavg+wima(window=20) 83.1 ± 0.2 %")
    'fedavg+wima(window=20) 83.1 $\\\\pm$ 0.2 \\\\%'
    """
    special = "".join(_SPECIAL.get(letter, letter) for letter in text)
    for letter, command in {"±": r"$\pm$", "−": "$-$", "–": "--", "<": "$<$"}.items():
        special = special.replace(letter, command)
    return special


def result_table(section: Values, targets: Sequence[float]) -> TextTable:
    """The results table of a section."""
    metric = section["metric"]
    unit = " in per cent" if is_share(metric) else ""
    heads = (
        "row",
        *FIGURES.values(),
        "seeds",
        *(f"rounds to {target:g}" for target in targets),
        "backward passes",
        "MB up",
        "time",
    )
    rows = []
    for row in section["rows"]:
        spreads = [_spread(row["spread"][name], metric) + evaluations(section["rows"], row, name) for name in FIGURES]
        seeds = f"{len(row['seeds'])}" + (f" ({len(row['diverged'])} diverged)" if row["diverged"] else "")
        reached = [
            one["text"] + ("" if one["reached"] == one["runs"] else f" ({one['reached']}/{one['runs']})")
            for one in row["reached"]
        ]
        up = "–" if row["cost"]["bytes_up"] is None else f"{row['cost']['bytes_up'] / 1e6:.4g}"
        passes = shown_count(row["cost"]["backward_passes"])
        rows.append((row["label"], *spreads, seeds, *reached, passes, up, shown_seconds(row["seconds"])))
    caption = f"Test {metric}{unit} on {section['name']}: mean ± standard deviation over seeds."
    return TextTable(caption, heads, tuple(rows))


def difference_table(section: Values, by: str) -> TextTable | None:
    """The paired differences of a section; None if nothing is compared."""
    if not section["differences"]:
        return None
    metric = section["metric"]
    heads = ("row", "difference", "95 % bootstrap", "95 % Student", "pairs", "test", "p", "p after Holm")
    rows = []
    for one in section["differences"]:
        pair = one["pair"]
        if pair is None:
            rows.append((one["label"], "–", "–", "–", "0", "none", "–", "–"))
            continue
        bounds = [interval(pair[name], metric) for name in ("interval", "t_interval")]
        tested = (str(len(pair["seeds"])), pair["test"], shown_p(pair["p"]), shown_p(one["holm"]))
        rows.append((one["label"], signed(pair["mean"], metric), *bounds, *tested))
    base = section["rows"][section["baseline"]]["label"]
    unit = " in percentage points" if is_share(metric) else ""
    return TextTable(f"Differences from {base} in the {FIGURES[by]}, paired by seed{unit}.", heads, tuple(rows))


def values_csv(document: Values) -> str:
    """Every value of every row and seed in full precision, one line each."""
    lines: list[tuple[object, ...]] = [("section", "row", "algorithm", "model", "seed", "figure", "value")]
    for section in document["sections"]:
        for row in section["rows"]:
            key = (section["name"], row["label"], row["algorithm"], row["model"])
            lines += [
                (*key, seed, FIGURES[name], value)
                for name, values in row["values"].items()
                for seed, value in values.items()
            ]
            lines += [(*key, seed, "diverged", "") for seed in row["diverged"]]
    return _csv(lines)


def table_csv(table: TextTable) -> str:
    """The formatted table as CSV."""
    return _csv([table.heads, *table.rows])


def _csv(lines: Iterable[Iterable[object]]) -> str:
    written = io.StringIO()
    csv.writer(written, lineterminator="\n").writerows(lines)
    return written.getvalue()


def _spread(spread: Values | None, metric: str) -> str:
    if spread is None:
        return "–"
    return shown_metric(spread["mean"], metric) + (
        f" ± {shown_metric(spread['std'], metric)}" if spread["count"] > 1 else ""
    )
