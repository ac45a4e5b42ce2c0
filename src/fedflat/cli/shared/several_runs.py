"""Output of several runs, on the screen and as JSON, with a conclusion."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from fedflat.cli.shared.one_run import MAX_OTHER_METRICS, current_status, folder_of, print_row_warnings
from fedflat.cli.shared.screen import screen, shown_bytes, shown_metric, shown_seconds, table, with_unit
from fedflat.display import column_format, is_share, shown_target
from fedflat.experiment.stopping import ENDED_STATUSES
from fedflat.reporting.row import mixed_data
from fedflat.reporting.tables.summary import MEAN_LABEL, best_of, seed_statistics, shown_range
from fedflat.reporting.tables.targets import has_virtual_time
from fedflat.text import show_value

if TYPE_CHECKING:
    from rich.text import Text

    from fedflat.experiment.config import Config
    from fedflat.reporting.comparison import Comparison
    from fedflat.reporting.tables.summary import SeedStatistics

MAX_LISTED = 5
"""Maximum number of diverged runs that the conclusion names."""
SEED_STATISTICS = ("last", "mean_last", "best", "at_best_validation")
"""Entries of a comparison's rows that are means over seeds; missing if no run of the row converged."""


def comparison_document(comparison: Comparison, targets: Sequence[float] = (), missing: int = 0) -> dict[str, Any]:
    """Return a comparison as JSON-compatible values, with the rounds until the metric reaches each of ``targets``.

    ``missing`` is the number of runs of the comparison that have not begun.
    """
    rows, targets = [], list(dict.fromkeys(targets))
    for row, runs_of_row in zip(comparison.table(targets), comparison.rows(), strict=True):
        rounds_to = []
        for target in targets:
            median, reached, total = row.pop(f"rounds to {target:g}")
            costs = {"bytes": row.pop(f"bytes to {target:g}")}
            seconds = row.pop(f"virtual seconds to {target:g}")
            if seconds is not None:
                costs["virtual_seconds"] = seconds
            rounds_to.append({"target": target, "median": median, "reached": reached, "runs": total, **costs})
        for name in SEED_STATISTICS:
            if name in row:  # missing if no run of the row converged
                row[name] = asdict(row[name])
        last = {
            name: asdict(seed_statistics(list(values.values()))) for name, values in runs_of_row.last_metrics.items()
        }
        rows.append({**row, "last_metrics": last, "rounds_to": rounds_to})
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
    console, metric, targets = screen(), comparison.metric, list(dict.fromkeys(targets))
    rows = comparison.table(targets)
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
    console.print(f"test {with_unit(metric)}: {subtitle}", style="dim")
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
    settings, metric, number_format = comparison.differing_settings(), comparison.metric, _number_format(rows)
    has_settings, same_counts = any(settings), len(evaluation_counts(rows)) == 1
    means = [row["mean_last"].mean for row in rows if "mean_last" in row]
    best = best_of(means, comparison.lower_is_better) if means and same_counts else None
    timed = has_virtual_time(comparison.records)
    kinds = ("rounds", "virtual time") if timed else ("rounds",)
    target_columns = [f"{kind}\nto {shown_target(target, metric)}" for target in targets for kind in kinds]
    costs = ["time\nper run", "sent up\nper run"]
    selected = ["at best\nvalidation"] if any("at_best_validation" in row for row in rows) else []
    numeric = ["mean of last 10 %\nof evaluations", "last", *selected, "seeds", *target_columns, *costs]
    last_metrics = [row.last_metrics for row in comparison.rows()]
    other_names = dict.fromkeys(name for metrics in last_metrics for name in metrics if name not in (metric, "loss"))
    others = {name: f"last\n{with_unit(name)}" for name in list(other_names)[:MAX_OTHER_METRICS]}
    most_bytes = max((row["bytes_up"] or 0 for row in rows), default=None)
    cells: list[list[object]] = []
    for row, row_settings, metrics in zip(rows, settings, last_metrics, strict=True):
        mean, last, seeds = row.get("mean_last"), row.get("last"), str(row["seeds"])
        if row["unfinished"]:
            seeds = f"{row['seeds'] - row['unfinished']} of {seeds} finished"
        is_best = mean is not None and mean.mean == best
        count = "" if mean is None or same_counts else f" (n={shown_range(row['mean_counts'])})"
        rounds_to = []
        for target in targets:
            rounds_to.append(_rounds_to_target(*row[f"rounds to {target:g}"]))
            if timed:
                rounds_to.append(shown_seconds(row[f"virtual seconds to {target:g}"]))
        cells.append(
            [
                row["label"],
                *([assignments_text(row_settings)] if has_settings else []),
                _statistics_cell(mean, metric, number_format, is_best, count),
                _statistics_cell(last, metric, number_format),
                *(_statistics_cell(row.get("at_best_validation"), metric, number_format) for _ in selected),
                f"{seeds} ({row['diverged']} diverged)" if row["diverged"] else seeds,
                *rounds_to,
                shown_seconds(row["seconds"]),
                shown_bytes(row["bytes_up"], most_bytes),
                *(_last_metric(metrics.get(name, {}), name) for name in others),
            ]
        )
    columns = ["algorithm", "settings", *numeric] if has_settings else ["algorithm", *numeric]
    columns += others.values()
    return table(columns, cells, numeric=[*numeric, *others.values()], optional=others.values())


def _last_metric(values: Mapping[int, float], metric: str) -> Text | None:
    """Return the last value of a further metric as a table cell, given its value of each seed."""
    statistics = seed_statistics(list(values.values())) if values else None
    return _statistics_cell(statistics, metric, column_format([statistics.mean if statistics else None]))


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
    """Return a sentence on which row has the best mean of the last evaluations, and its lead over the second best.

    Rows with the same best mean are called equal. If the first row, usually the baseline, is not one of these,
    the lead over it follows. Rows are not ranked if they are not comparable, or if some runs (including ``missing``
    ones that have not begun) have not finished.
    """
    rows, metric, lower_is_better = comparison.table(), comparison.metric, comparison.lower_is_better
    ranked = [row for row in rows if "mean_last" in row]  # without rows whose runs all diverged or are unfinished
    ranked.sort(key=lambda row: row["mean_last"].mean if lower_is_better else -row["mean_last"].mean)
    if not rows:
        return "No run has been evaluated yet."
    statuses = [current_status(record) for record in comparison.records]
    if not ranked and any(row["unfinished"] for row in rows):
        return "No run has finished yet."
    if set(statuses) == {"diverged"}:
        return "Every run diverged; there is no best algorithm."
    unfinished = missing + sum(status not in ENDED_STATUSES for status in statuses)
    if unfinished:
        advice = "wait for them"
        if "running" not in statuses:
            advice = "continue them with fedflat resume, or repeat fedflat compare"
        runs = f"{unfinished} of {missing + len(statuses)} runs have not finished"
        return f"{runs}, so no algorithm is called best; {advice}."
    if mixed_data(comparison.records):
        return "These runs began with different versions of their data, so they are not ranked."
    if any(comparison.differing_settings()):
        return "These runs differ in more than algorithm and seed, so they are not ranked."
    seeds = {row.label: tuple(sorted(record.config.seed for record in row.records)) for row in comparison.rows()}
    if len(set(seeds.values())) > 1:
        listed = "; ".join(f"{label}: {', '.join(map(str, numbers))}" for label, numbers in seeds.items())
        return f"The rows have different seeds ({listed}), so they are not ranked."
    if not ranked:
        return f"No finished run has a value of {metric}."
    if len(evaluation_counts(rows)) > 1:
        counts = ", ".join(f"{row['label']} {shown_range(row['mean_counts'])}" for row in ranked)
        return f"The means cover different numbers of evaluations ({counts}), so rows are not ranked."
    best, first = ranked[0], rows[0]
    statistics = best["mean_last"]
    value = statistics.shown(metric, _number_format(rows)) + (" %" if is_share(metric) else "")
    if statistics.count < best["seeds"]:
        value += f", {statistics.count} of {best['seeds']} seeds"
    tied = [row for row in ranked if row["mean_last"].mean == statistics.mean]
    best_row = f"{best['label']} is best by the {MEAN_LABEL} ({value})"
    if len(tied) > 1:
        *labels, last = [row["label"] for row in tied]
        best_row = f"{', '.join(labels)} and {last} tie for best by the {MEAN_LABEL} ({value})"
    if len(rows) == 1:
        return f"{best['label']} has a {MEAN_LABEL} of {value}; there is nothing to compare it with."
    if len(tied) == len(ranked):
        return f"{best_row}{'' if len(ranked) == len(rows) else '; all others diverged'}."
    number_format = _number_format(rows)
    compared = ranked[: len(tied) + 1]
    lead = _lead(best, compared[-1], comparison, number_format)
    if "mean_last" not in first:
        lead += f"; {first['label']} diverged"
    elif first not in compared:
        lead += f"; {_points(best, first, comparison, number_format)}"
    return f"{best_row}: {lead}."


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
    return column_format(row[name].mean for row in rows for name in ("mean_last", "last") if name in row)


def _statistics_cell(
    statistics: SeedStatistics | None, metric: str, number_format: str, is_best: bool = False, count: str = ""
) -> Text | None:
    """Return mean and standard deviation over seeds as a table cell, or None if no run converged.

    Args:
        statistics: the mean and its standard deviation.
        metric: name of the metric.
        number_format: format of its numbers.
        is_best: highlight the mean.
        count: text after the value, such as `` (n=5)``.
    """
    from rich.text import Text

    if statistics is None:
        return None
    mean, space, deviation = statistics.shown(metric, number_format).partition(" ")
    return Text.assemble((mean, "bold green" if is_best else ""), (f"{space}{deviation}{count}", "dim"))


def _rounds_to_target(median: float | None, reached: int, runs: int) -> str:
    """Return the median number of rounds to a target as text, with the numbers of runs that reached it and of all."""
    return f"{'–' if median is None else f'{median:g}'} ({reached}/{runs})"
