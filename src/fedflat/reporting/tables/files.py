"""Tables of a report as CSV and Markdown, and all summary values as CSV in full precision."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fedflat.display import (
    column_format,
    is_share,
    shown_count,
    shown_difference,
    shown_interval,
    shown_metric,
    shown_p,
    shown_seconds,
    shown_target,
)
from fedflat.errors import UserError, one_of
from fedflat.reporting.page.document import SUMMARY_LABELS, has_uneven_means, shown_evaluations
from fedflat.reporting.page.measurements import SEED_TABLE
from fedflat.reporting.row import MIXED_PLUGINS
from fedflat.reporting.tables.summary import MEAN_LABEL, SeedStatistics, are_equal, shown_range

Values = Mapping[str, Any]
DIFFERENCE_HEADS = ("row", "difference", "95 % bootstrap", "95 % Student", "pairs", "test", "p", "p after Holm")

ALL_EQUAL = "all equal"
"""Replaces the interval of differences without any spread."""
EQUAL_EXPLANATION = "all seeds have the same difference, so there is no interval and no t test"


@dataclass(frozen=True)
class TextTable:
    """A table of formatted cells with a caption; the first column holds text, the others numbers."""

    caption: str
    heads: Mapping[str, str]
    """Heading of each column, by the column's name."""
    rows: tuple[tuple[str, ...], ...]
    emphasis: Mapping[tuple[int, str], str] = field(default_factory=dict)
    """``best`` or ``second`` for the (row, column name) of cells that LaTeX emphasises."""
    notes: Mapping[str, str] = field(default_factory=dict)
    """Sentences that explain columns, by the column's name; they follow the caption."""

    @property
    def full_caption(self) -> str:
        """The caption with the notes on the columns of the table."""
        return " ".join([self.caption, *(note for name, note in self.notes.items() if name in self.heads)])

    def select(self, columns: Sequence[str]) -> TextTable:
        """Return the table with its first column and the named ``columns``, in this order."""
        names = list(self.heads)
        kept = [names[0], *columns]
        rows = tuple(tuple(row[names.index(name)] for name in kept) for row in self.rows)
        return replace(self, heads={name: self.heads[name] for name in kept}, rows=rows)

    def csv(self) -> str:
        """The formatted table as CSV."""
        return csv_text([self.heads.values(), *self.rows])

    def markdown(self) -> str:
        """Return the table as Markdown, after its caption."""
        alignment = ["---", *["---:"] * (len(self.heads) - 1)]
        text = f"{self.full_caption}\n\n"
        for line in (self.heads.values(), alignment, *self.rows):
            text += "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n"
        return text


def result_columns(
    targets: Sequence[float], timed: bool, metric: str = "", summaries: Mapping[str, str] = SUMMARY_LABELS
) -> dict[str, str]:
    """Return the headings of the results table's columns after the first, by name.

    Args:
        targets: values of the metric.
        timed: whether to include the virtual time and the traffic until each target.
        metric: name of the metric, which determines how headings show targets.
        summaries: summary values to include, with their headings.
    """
    target_heads = {}
    for target in targets:
        shown = shown_target(target, metric)
        target_heads[f"rounds_to_{target:g}"] = f"rounds to {shown}"
        if timed:
            target_heads[f"seconds_to_{target:g}"] = f"virtual seconds to {shown}"
            target_heads[f"mb_to_{target:g}"] = f"MB to {shown}"
    costs = {"backward_passes": "backward passes", "mb_up": "MB up", "time": "time"}
    return {**summaries, "seeds": "seeds", **target_heads, **costs}


def check_columns(columns: Sequence[str], targets: Sequence[float]) -> None:
    """Raise a ``UserError`` if the results table with these ``targets`` does not have all of the ``columns``."""
    known = result_columns(targets, timed=True)
    for name in columns:
        if name not in known and name.startswith(("rounds_to_", "seconds_to_", "mb_to_")):
            target = name.partition("_to_")[2] or "VALUE"
            raise UserError(
                f"the column {name} needs its target: add --target {target} (in Python: targets=[{target}])"
            )
        if name not in known:
            raise one_of("column", name, known)


def result_table(section: Values, targets: Sequence[float], every_column: bool = False) -> TextTable:
    """Return the results table of a report's section, with summary values, rounds to targets and costs of each row.

    With ``every_column``, the columns that need virtual time or a validation split are included in any case.
    """
    timed, summaries = section["timed"] or every_column, SUMMARY_LABELS if every_column else section["summaries"]
    megabytes = [None if row["cost"]["bytes_up"] is None else row["cost"]["bytes_up"] / 1e6 for row in section["rows"]]
    megabytes_format = column_format(megabytes, digits=3)
    rows = []
    for row, megabytes_up in zip(section["rows"], megabytes, strict=True):
        values = [
            _shown_spread(row["spread"][name], section) + shown_evaluations(section["rows"], row, name)
            for name in summaries
        ]
        seeds = str(len(row["seeds"]))
        seeds += "".join(f" ({len(row[kind])} {kind})" for kind in ("diverged", "unfinished") if row[kind])
        rounds = [cell for reached in row["reached"] for cell in _target_cells(reached, timed)]
        passes, sent = shown_count(row["cost"]["backward_passes"]), shown_metric(megabytes_up, "MB", megabytes_format)
        rows.append((row["label"], *values, seeds, *rounds, passes, sent, shown_seconds(row["seconds"])))
    counts = [count for row in section["rows"] for count in row["mean_counts"].values()]
    n = f" (n={shown_range(counts)})" if counts else ""
    notes = {
        "mean_last": f"Last 10 %: {MEAN_LABEL}{n}.",
        "best": "Best: best value over the test evaluations.",
        "at_best_validation": "At best validation: test value at the evaluation with the best validation value.",
    }
    for target in targets:
        shown = shown_target(target, section["metric"])
        notes[f"rounds_to_{target:g}"] = f"Rounds to {shown}: median over seeds; N+ means not reached by round N."
    heads = {"row": "row", **result_columns(targets, timed, section["metric"], summaries)}
    return TextTable(_result_caption(section), heads, tuple(rows), _emphasis(section), notes)


def _result_caption(section: Values) -> str:
    """Return a caption with the metric, data, protocol, number of seeds, excluded runs and rows with mixed plugins."""
    rows, metric = section["rows"], section["metric"]
    unit = " in per cent" if is_share(metric) else ""
    seeds = shown_range(len(row["seeds"]) for row in rows)
    spread = "one seed" if seeds == "1" else f"mean ± standard deviation over {seeds} seeds"
    direction = "; lower is better" if section["lower_is_better"] else ""
    caption = f"Test {metric}{unit} on {section['name']} ({section['protocol']}): {spread}{direction}."
    for kind in ("diverged", "unfinished"):
        excluded = [f"{row['label']} {len(row[kind])} of {len(row['seeds'])}" for row in rows if row[kind]]
        if excluded:
            caption += f" {kind.capitalize()} runs are excluded: {', '.join(excluded)}."
    mixed = [f"{row['label']} ({', '.join(row['mixed_plugins'])})" for row in rows if row["mixed_plugins"]]
    return f"{caption} {MIXED_PLUGINS}: {', '.join(mixed)}." if mixed else caption


def _emphasis(section: Values) -> dict[tuple[int, str], str]:
    """Decide which cells a table prints in bold or underlined: in each column the best and the second-best.

    This applies to means and to the median rounds to targets. Values that are equal after rounding share their place.
    A column whose means cannot be compared has no emphasis.

    Returns:
        ``best`` or ``second`` for each emphasised cell, by (row number, column name).
    """
    rows, sign = section["rows"], 1 if section["lower_is_better"] else -1
    if len(rows) < 2:
        return {}
    columns: dict[str, dict[int, tuple[float, str]]] = {}  # by name and row number: a value, lower is better, and text
    for name in section["summaries"]:
        means = {row["number"]: row["spread"][name]["mean"] for row in rows if row["spread"][name]}
        if len(means) > 1 and not has_uneven_means(rows, name):
            columns[name] = {
                number: (sign * mean, shown_metric(mean, section["metric"], section["number_format"]))
                for number, mean in means.items()
            }
    for row in rows:
        for target in row["reached"]:
            if target["median"] is not None:
                column = columns.setdefault(f"rounds_to_{target['target']:g}", {})
                column[row["number"]] = (target["median"], target["text"])
    emphasis: dict[tuple[int, str], str] = {}
    for name, column in columns.items():
        distinct_texts = dict.fromkeys(text for _, text in sorted(column.values()))
        places = dict(zip(distinct_texts, ("best", "second"), strict=False))
        emphasis |= {(number, name): places[text] for number, (_, text) in column.items() if text in places}
    return emphasis


def _shown_spread(spread: Values | None, section: Values) -> str:
    """Format a mean with its standard deviation over seeds, e.g. ``61.2 ± 0.4``, in the format of the section.

    For a single seed, the mean stands alone. ``spread`` is None if no run has the value, which gives a dash.
    """
    return "–" if spread is None else SeedStatistics(**spread).shown(section["metric"], section["number_format"])


def _target_cells(target: Values, timed: bool) -> list[str]:
    """Format the rounds to a target, such as ``60 (2/3)`` if only two of three runs reached it.

    With ``timed``, virtual seconds and megabytes follow.
    """
    text: str = target["text"]
    rounds = text if target["reached"] == target["runs"] else f"{text} ({target['reached']}/{target['runs']})"
    if not timed:
        return [rounds]
    seconds, megabytes = target["seconds"], None if target["bytes"] is None else target["bytes"] / 1e6
    return [rounds, *("–" if value is None else f"{value:.4g}" for value in (seconds, megabytes))]


def difference_table(section: Values, by: str) -> TextTable | None:
    """Return the table of differences from the baseline in the summary value ``by``; None if nothing is compared."""
    if not section["differences"]:
        return None
    metric, number_format = section["metric"], section["number_format"]
    rows = []
    for difference in section["differences"]:
        label, pair = difference["label"], difference["pair"]
        if pair is None:  # no seeds in common, or not comparable
            rows.append((label, "–", "–", "–", "0", "none", "–", "–"))
            continue
        intervals = [difference_interval(pair, name, section) for name in ("interval", "t_interval")]
        test = (str(len(pair["seeds"])), pair["test"], shown_p(pair["p"]), shown_p(difference["holm"]))
        rows.append((label, shown_difference(pair["mean"], metric, number_format), *intervals, *test))
    baseline = section["rows"][section["baseline"]]["label"]
    unit = " in percentage points" if is_share(metric) else ""
    direction = "; negative values are improvements" if section["lower_is_better"] else ""
    caption = f"Differences from {baseline} in the {SUMMARY_LABELS[by]}, paired by seed{unit}{direction}."
    notes = {
        "95 % bootstrap": "Bootstrap: percentile interval.",
        "95 % Student": "Student: t interval.",
        "p after Holm": "Holm: p-values corrected for the number of tested rows.",
    }
    if any(ALL_EQUAL in row for row in rows):
        notes["difference"] = f"{ALL_EQUAL.capitalize()}: {EQUAL_EXPLANATION}."
    return TextTable(caption, dict(zip(DIFFERENCE_HEADS, DIFFERENCE_HEADS, strict=True)), tuple(rows), notes=notes)


def flatness_table(section: Values) -> TextTable | None:
    """Return the table of flatness values, as means over seeds; None if no model of a row was measured."""
    table = next((table for table in section["views"]["tables"] if table["title"] == SEED_TABLE), None)
    if table is None:
        return None
    descriptions = {row["described"] for row in table["rows"]}
    rows = []
    for row in table["rows"]:
        label = row["label"] if len(descriptions) == 1 else f"{row['label']} ({row['described']})"
        cells = []
        for mean, std in zip(row["numbers"], row["spreads"], strict=True):
            value = "–" if mean is None else re.sub("^-", "−", f"{mean:.3g}")
            cells.append(value if std is None else f"{value} ± {std:.2g}")
        rows.append((label, *cells))
    model = f" ({descriptions.pop()})" if len(descriptions) == 1 else ""
    caption = f"Flatness{model} on {section['name']} ({section['protocol']}). {table['note']}"
    return TextTable(caption, {"row": "row", **{head: head for head in table["heads"][2:]}}, tuple(rows))


def difference_interval(pair: Values, name: str, section: Values) -> str:
    """Format the ``interval`` or ``t_interval`` of a paired difference, which has no width if all seeds agree."""
    if are_equal(pair["differences"]):
        return ALL_EQUAL
    return shown_interval(pair[name], section["metric"], section["number_format"])


def values_csv(document: Values) -> str:
    """Return the summary values and last other metrics of every row and seed as CSV, in full precision."""
    lines: list[tuple[object, ...]] = [("section", "row", "algorithm", "model", "seed", "figure", "value")]
    for section in document["sections"]:
        for row in section["rows"]:
            key = (section["name"], row["label"], row["algorithm"], row["model"])
            for name, values in row["values"].items():
                lines += [(*key, seed, SUMMARY_LABELS[name], value) for seed, value in values.items()]
            for name, values in row["last_metrics"].items():
                if name != section["metric"]:
                    lines += [(*key, seed, f"last {name}", value) for seed, value in values.items()]
            lines += [(*key, seed, "diverged", "") for seed in row["diverged"]]
    return csv_text(lines)


def csv_text(lines: Iterable[Iterable[object]]) -> str:
    """Return lines of cells as CSV text; the first line is the heading."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(lines)
    return text.getvalue()
