"""Output of several runs, on the screen and as JSON, with a conclusion."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from fedflat.cli.shared.one_run import MAX_OTHER_METRICS, current_status, folder_of, print_row_warnings
from fedflat.cli.shared.screen import screen, shown_bytes, shown_metric, shown_seconds, table, with_unit
from fedflat.display import column_format, is_share, shown_target
from fedflat.experiment.stopping import ENDED_STATUSES
from fedflat.reporting.row import mixed_data
from fedflat.reporting.tables.summary import MEAN_LABEL, SeedStatistics, best_of, seed_statistics, shown_range
from fedflat.reporting.tables.targets import has_virtual_time
from fedflat.text import show_value

if TYPE_CHECKING:
    from rich.text import Text

    from fedflat.experiment.config import Config
    from fedflat.reporting.comparison import Comparison

MAX_LISTED = 5
"""Maximum number of diverged runs that the conclusion names."""


def comparison_document(comparison: Comparison, targets: Sequence[float] = (), missing: int = 0) -> dict[str, Any]:
    """Return a comparison as JSON-compatible values, with the rounds until the metric reaches each of ``targets``.

    ``missing`` is the number of runs of the comparison that have not begun.
    """
    rows = []
    for row, runs_of_row in zip(comparison.table(targets), comparison.rows(), strict=True):
        rounds_to = []
        for target in dict.fromkeys(targets):
            median, reached, total = row.pop(f"rounds to {target:g}")
            costs = {"bytes": row.pop(f"bytes to {target:g}")}
            seconds = row.pop(f"virtual seconds to {target:g}")
            if seconds is not None:
                costs["virtual_seconds"] = seconds
            rounds_to.append({"target": target, "median": median, "reached": reached, "runs": total, **costs})
        values: dict[str, Any] = {}
        for name, value in row.items():
            if not isinstance(value, SeedStatistics):
                values[name] = value
            elif value.count:  # JSON has no NaN
                values[name] = asdict(value)
        last = {name: asdict(seed_statistics(list(each.values()))) for name, each in runs_of_row.last_metrics.items()}
        rows.append({**values, "last_metrics": last, "rounds_to": rounds_to})
    runs = [
        {
            "folder": folder_of(record),
            "algorithm": record.config.algorithm,
            "seed": record.config.seed,
            "status": current_status(record),
            "reason": record.reason,
        }
        for record in comparison.records
    ]
    metric = {"metric": comparison.metric, "lower_is_better": comparison.lower_is_better}
    return {**metric, "rows": rows, "verdict": verdict(comparison, missing), "runs": runs}


def print_comparison(comparison: Comparison, targets: Sequence[float] = (), missing: int = 0) -> None:
    """Print the table of a comparison, its diverged and unfinished runs, and which row is best.

    ``missing`` is the number of runs of the comparison that have not begun.
    """
    console, rows = screen(), comparison.table(targets)
    counts = evaluation_counts(rows)
    most_seeds = max((row["seeds"] for row in rows), default=0)
    subtitle = "mean ± standard deviation over seeds" if most_seeds > 1 else "one seed"
    if counts:
        noun = "evaluation" if counts == {1} else "evaluations"
        subtitle += f"; the mean is over {shown_range(counts)} {noun}"
    if comparison.lower_is_better:
        subtitle += "; lower is better"
    subtitle += "; times include set-up, which takes longest in the first run"
    console.print()
    console.print(f"test {with_unit(comparison.metric)}: {subtitle}", style="dim")
    console.print(_comparison_table(comparison, rows, targets))
    console.print()
    for record in comparison.records:
        if record.status not in ("finished", "stopped"):
            details = f", {record.reason}" if record.reason else ""
            if record.status != "diverged":
                details = f" after {record.rounds} of {record.config.training.rounds} rounds{details}"
            message = f"{record.config.algorithm}, seed {record.config.seed}: {current_status(record)}{details}"
            console.print(message, style="red" if record.status == "diverged" else "yellow")
    print_row_warnings(comparison)
    console.print(verdict(comparison, missing), style="bold")


def _comparison_table(comparison: Comparison, rows: list[dict[str, Any]], targets: Sequence[float]) -> Any:
    """Return the table of a comparison with one row per algorithm; the best mean is highlighted.

    Means over different numbers of evaluations are not comparable: then no row is best, and each mean states its
    number n.

    Args:
        comparison: the runs.
        rows: the values of each row, from ``comparison.table``.
        targets: values of the metric; each adds a column with the number of rounds to reach it.
    """
    metric, same_counts = comparison.metric, len(evaluation_counts(rows)) == 1
    means = [row["mean_last"].mean for row in rows if row["mean_last"].count]
    best = best_of(means, comparison.lower_is_better) if means and same_counts else None
    shown = partial(_statistics_cell, metric=metric, number_format=_number_format(rows))
    columns: dict[str, Sequence[object]] = {"algorithm": [row["label"] for row in rows]}
    if any(row["settings"] for row in rows):
        columns["settings"] = [assignments_text(row["settings"]) for row in rows]
    texts = list(columns)
    columns["mean of last 10 %\nof evaluations"] = [
        shown(row["mean_last"], best=best, counts=() if same_counts else row.get("mean_counts", ())) for row in rows
    ]
    columns["last"] = [shown(row["last"]) for row in rows]
    if any("at_best_validation" in row for row in rows):
        columns["at best\nvalidation"] = [shown(row.get("at_best_validation")) for row in rows]
    columns["seeds"] = [_seeds_text(row) for row in rows]
    for target in targets:
        reached = [row[f"rounds to {target:g}"] for row in rows]
        columns[f"rounds\nto {shown_target(target, metric)}"] = [_rounds_to_target(*each) for each in reached]
        if has_virtual_time(comparison.records):
            seconds = [shown_seconds(row[f"virtual seconds to {target:g}"]) for row in rows]
            columns[f"virtual time\nto {shown_target(target, metric)}"] = seconds
    columns["time\nper run"] = [shown_seconds(row["seconds"]) for row in rows]
    most_bytes = max((row["bytes_up"] or 0 for row in rows), default=None)
    columns["sent up\nper run"] = [shown_bytes(row["bytes_up"], most_bytes) for row in rows]
    last_metrics = [row.last_metrics for row in comparison.rows()]
    names = dict.fromkeys(name for metrics in last_metrics for name in metrics if name not in (metric, "loss"))
    others: dict[str, Sequence[object]] = {
        f"last\n{with_unit(name)}": [_last_metric(metrics.get(name), name) for metrics in last_metrics]
        for name in list(names)[:MAX_OTHER_METRICS]
    }
    columns |= others
    cells = zip(*columns.values(), strict=True)
    return table(columns, cells, numeric=set(columns).difference(texts), optional=others)


def _seeds_text(row: dict[str, Any]) -> str:
    """Return the number of a row's seeds as text, with those of unfinished and diverged runs."""
    finished = f"{row['seeds'] - row['unfinished']} of {row['seeds']} finished"
    text = finished if row["unfinished"] else str(row["seeds"])
    return f"{text} ({row['diverged']} diverged)" if row["diverged"] else text


def _last_metric(values: Mapping[int, float] | None, metric: str) -> Text | None:
    """Return the last value of a further metric as a table cell, given its value of each seed."""
    if not values:
        return None
    statistics = seed_statistics(list(values.values()))
    return _statistics_cell(statistics, metric, column_format([statistics.mean]))


def verdict(comparison: Comparison, missing: int = 0) -> str:
    """Return a sentence on which row is best and by how much, and one on diverged runs, which means exclude.

    Args:
        comparison: the runs.
        missing: number of further runs that have not begun.
    """
    diverged = [record.config for record in comparison.records if record.status == "diverged"]
    conclusion = _conclusion(comparison, missing)
    if not diverged or len(diverged) == len(comparison.records):
        return conclusion
    names = ", ".join(f"{config.algorithm} seed {config.seed}" for config in diverged[:MAX_LISTED])
    more = f" and {len(diverged) - MAX_LISTED} more" if len(diverged) > MAX_LISTED else ""
    return f"{conclusion} Means exclude diverged runs ({names}{more}), which favours their algorithms."


def _conclusion(comparison: Comparison, missing: int) -> str:
    """Return a sentence on which row has the best mean of the last evaluations, or on why rows are not ranked.

    ``missing`` is the number of further runs that have not begun.
    """
    rows = comparison.table()
    sign = 1 if comparison.lower_is_better else -1
    ranked = [row for row in rows if row["mean_last"].count]  # without rows whose runs all diverged or are unfinished
    ranked.sort(key=lambda row: sign * row["mean_last"].mean)
    return _obstacle(comparison, rows, ranked, missing) or _best_row(comparison, rows, ranked)


def _obstacle(comparison: Comparison, rows: list[dict[str, Any]], ranked: list[dict[str, Any]], missing: int) -> str:
    """Return a sentence on why rows are not ranked, e.g. because runs have not finished; empty if they are."""
    statuses = [current_status(record) for record in comparison.records]
    if not rows:
        return "No run has been evaluated yet."
    if not ranked and any(row["unfinished"] for row in rows):
        return "No run has finished yet."
    if set(statuses) == {"diverged"}:
        return "Every run diverged; there is no best algorithm."
    unfinished = missing + sum(status not in ENDED_STATUSES for status in statuses)
    if unfinished:
        resume = "continue them with fedflat resume, or repeat fedflat compare"
        if unfinished == missing:
            resume = "repeat fedflat compare"
        advice = "wait for them" if "running" in statuses else resume
        runs = f"{unfinished} of {missing + len(statuses)} runs have not finished"
        return f"{runs}, so no algorithm is called best; {advice}."
    if mixed_data(comparison.records):
        return "These runs began with different versions of their data, so they are not ranked."
    if any(row["settings"] for row in rows):
        return "These runs differ in more than algorithm and seed, so they are not ranked."
    seeds = {row.label: sorted(record.config.seed for record in row.records) for row in comparison.rows()}
    if len(set(map(tuple, seeds.values()))) > 1:
        listed = "; ".join(f"{label}: {', '.join(map(str, numbers))}" for label, numbers in seeds.items())
        return f"The rows have different seeds ({listed}), so they are not ranked."
    if not ranked:
        return f"No finished run has a value of {comparison.metric}."
    if len(evaluation_counts(rows)) > 1:
        counts = ", ".join(f"{row['label']} {shown_range(row['mean_counts'])}" for row in ranked)
        return f"The means cover different numbers of evaluations ({counts}), so rows are not ranked."
    return ""


def _best_row(comparison: Comparison, rows: list[dict[str, Any]], ranked: list[dict[str, Any]]) -> str:
    """Return a sentence on which row has the best mean, and its lead over the second best.

    Rows with the same best mean are called equal. If the first row, usually the baseline, is not one of these, the
    lead over it follows.
    """
    best, first, number_format = ranked[0], rows[0], _number_format(rows)
    statistics = best["mean_last"]
    value = statistics.shown(comparison.metric, number_format) + (" %" if is_share(comparison.metric) else "")
    if statistics.count < best["seeds"]:
        value += f", {statistics.count} of {best['seeds']} seeds"
    if len(rows) == 1:
        return f"{best['label']} has a {MEAN_LABEL} of {value}; there is nothing to compare it with."
    *others, last = [row["label"] for row in ranked if row["mean_last"].mean == statistics.mean]
    winner = f"{', '.join(others)} and {last} tie for best" if others else f"{last} is best"
    winner += f" by the {MEAN_LABEL} ({value})"
    compared = ranked[: len(others) + 2]  # the best rows and the next one
    if len(others) + 1 == len(ranked):
        return f"{winner}{'' if len(ranked) == len(rows) else '; all others diverged'}."
    lead = _lead(best, compared[-1], comparison, number_format)
    if not first["mean_last"].count:
        lead += f"; {first['label']} diverged"
    elif first not in compared:
        lead += f"; {_points(best, first, comparison, number_format)}"
    return f"{winner}: {lead}."


def evaluation_counts(rows: Sequence[dict[str, Any]]) -> set[int]:
    """Return the distinct numbers of evaluations behind the means."""
    return {count for row in rows for count in row.get("mean_counts", [])}


def _lead(best: dict[str, Any], second: dict[str, Any], comparison: Comparison, number_format: str) -> str:
    """Describe the lead of the best row over ``second``, and whether it exceeds the sum of both standard deviations.

    For example: ``+3.52 points over fedavg; within seed variation (2.10 + 1.80)``.
    """
    ours, theirs, points = best["mean_last"], second["mean_last"], _points(best, second, comparison, number_format)
    if ours.std is None or theirs.std is None:
        return f"{points} (one seed shows no variation; use --seeds 3)"
    deviations = " + ".join(shown_metric(row.std, comparison.metric, number_format) for row in (ours, theirs))
    exceeds = abs(ours.mean - theirs.mean) > ours.std + theirs.std
    return f"{points}; {'exceeds' if exceeds else 'within'} seed variation ({deviations})"


def _points(best: dict[str, Any], other: dict[str, Any], comparison: Comparison, number_format: str) -> str:
    """Format the lead of the best row over another one, e.g. ``+3.52 points over fedavg``."""
    lead = abs(best["mean_last"].mean - other["mean_last"].mean)
    sign, relation = ("−", "relative to") if comparison.lower_is_better else ("+", "over")
    unit = "points " if is_share(comparison.metric) else ""
    return f"{sign}{shown_metric(lead, comparison.metric, number_format)} {unit}{relation} {other['label']}"


def assignments_text(settings: dict[str, Any]) -> str:
    """Return settings as ``name=value``, separated by commas."""
    return ", ".join(f"{name}={show_value(value)}" for name, value in settings.items())


def report_command(folder: Path, configs: Iterable[Config]) -> str:
    """Return the command that reports the runs in a folder.

    Args:
        folder: the folder of a sweep or search.
        configs: configs of its runs; if their partitions differ, the report needs ``--apart``.
    """
    from fedflat.reporting.page.gather import partition_settings

    apart = " --apart" if len({partition_settings(config) for config in configs}) > 1 else ""
    return f"fedflat report {quote(str(folder))}{apart}"


def _number_format(rows: Sequence[dict[str, Any]]) -> str:
    """Return the format of all means and standard deviations of a comparison."""
    return column_format(row[name].mean for row in rows for name in ("mean_last", "last") if row[name].count)


def _statistics_cell(
    statistics: SeedStatistics | None,
    metric: str,
    number_format: str,
    best: float | None = None,
    counts: Sequence[int] = (),
) -> Text | None:
    """Return mean and standard deviation over seeds as a table cell, or None if no run converged.

    A mean equal to ``best`` is highlighted. It is followed by the numbers of evaluations that it covers, ``counts``.
    """
    from rich.text import Text

    if statistics is None or not statistics.count:
        return None
    mean, space, deviation = statistics.shown(metric, number_format).partition(" ")
    count = f" (n={shown_range(counts)})" if counts else ""
    style = "bold green" if statistics.mean == best else ""
    return Text.assemble((mean, style), (f"{space}{deviation}{count}", "dim"))


def _rounds_to_target(median: float | None, reached: int, runs: int) -> str:
    """Return the median number of rounds to a target as text, with the numbers of runs that reached it and of all."""
    return f"{'–' if median is None else f'{median:g}'} ({reached}/{runs})"
