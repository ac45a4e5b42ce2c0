"""The content of a report as plain values; page, tables and figures only render it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np

from fedflat.algorithms import Algorithm, algorithm
from fedflat.algorithms.algorithm import SLOTS
from fedflat.algorithms.composition import part_name
from fedflat.display import column_format, is_share
from fedflat.errors import UserError, one_of
from fedflat.experiment.stopping import ENDED_STATUSES, check_target
from fedflat.experiment.store.provenance import recorded_data
from fedflat.experiment.store.run_folder import Record
from fedflat.reporting.distinct import relative_paths, run_path
from fedflat.reporting.figures.style import evenly_spaced, sort_and_subsample_clients
from fedflat.reporting.page.gather import Gathered, Group, group_runs
from fedflat.reporting.page.notes import notes_of
from fedflat.reporting.page.views import views_of
from fedflat.reporting.row import LabelledRow, Row, mixed_data
from fedflat.reporting.tables.summary import (
    MEAN_LABEL,
    common_evaluations,
    compare_paired,
    holm_correction,
    rank_algorithms,
    seed_statistics,
    shown_range,
    summarise,
    values_by_seed,
)
from fedflat.reporting.tables.targets import VIRTUAL_SECONDS, costs_to_target, has_virtual_time
from fedflat.text import parameters, show, show_value

SUMMARY_LABELS = {
    "mean_last": MEAN_LABEL,
    "last": "last value",
    "best": "best test value",
    "at_best_validation": "value at best validation",
}
"""Summary values of a run, with their labels, which also follow "the"; the last one needs a validation split."""
AXES = {
    "round": "communication round",
    "backward_passes": "backward passes",
    "bytes": "bytes sent, up and down",
    "seconds": "seconds",
}
"""Horizontal axes of curves, with their labels."""
VIRTUAL_AXIS = {VIRTUAL_SECONDS: "virtual seconds"}
"""A further axis if all runs have virtual time."""
COSTS = ("backward_passes", "samples", "bytes_up", "bytes_down")
MIN_CURVE_POINTS, MAX_CURVE_POINTS, MAX_PAGE_POINTS = 40, 240, 24_000
"""Minimum and maximum number of points per curve, and the number on a page above which curves get fewer points."""
MAX_CLIENTS = 120
"""Maximum number of clients in a partition figure; more are subsampled evenly."""
PARTITION_FACTS = ("clients", "unseen", "sizes", "coverage", "duplicates", "classes_per_client", "heterogeneity")
"""Statistics of a partition that the report shows."""

Values = dict[str, Any]


def report_document(
    gathered: Gathered,
    targets: Sequence[float] = (),
    baseline: str | None = None,
    by: str = "mean_last",
    apart: bool = False,
) -> Values:
    """Compute the content of a report as plain values, with one section per dataset and partition.

    Args:
        gathered: the runs.
        targets: values of the metric; the report states how many rounds each run needs to reach them.
        baseline: label or algorithm of the row that others are compared with; default: the first row.
        by: summary value to compare: ``mean_last``, ``last``, ``best`` or ``at_best_validation``.
        apart: allow several datasets or partitions; otherwise they raise a ``UserError``.
    """
    if by not in SUMMARY_LABELS:
        raise one_of("summary value", by, SUMMARY_LABELS)
    groups = group_runs(gathered.records, apart)
    rows = sum(len(group.rows) for group in groups)
    points_per_curve = max(MIN_CURVE_POINTS, min(MAX_CURVE_POINTS, MAX_PAGE_POINTS // rows))
    sections = [_section_values(group, targets, baseline, by, points_per_curve) for group in groups]
    if baseline is not None and all(section["baseline"] is None for section in sections):
        raise one_of("baseline", baseline, [row["label"] for section in sections for row in section["rows"]])
    return {
        "by": by,
        "axes": AXES | (VIRTUAL_AXIS if all(section["timed"] for section in sections) else {}),
        "targets": list(targets),
        "runs": len(gathered.records),
        "left_out": [{"folder": folder, "why": why} for folder, why in gathered.left_out],
        "sections": sections,
    }


def _section_values(group: Group, targets: Sequence[float], baseline: str | None, by: str, max_points: int) -> Values:
    """Compute the content of a section of the report.

    Args:
        group: the runs with one dataset and partition.
        targets: values of the metric for rounds-to-target.
        baseline: label or algorithm of the row that others are compared with; default: the first row.
        by: summary value to compare: ``mean_last``, ``last``, ``best`` or ``at_best_validation``.
        max_points: maximum number of points of a curve.
    """
    metric, lower_is_better = group.metric, group.lower_is_better
    for target in targets:
        check_target(target, metric)
    rows = [_row_values(number, row, metric, lower_is_better, targets) for number, row in enumerate(group.rows)]
    has_validation = group.records[0].config.data.validation > 0  # the same for all runs of a group
    if by == "at_best_validation" and not has_validation:
        raise UserError(
            "at_best_validation needs runs with a validation split; set data.validation, for example to 0.1"
        )
    for row in rows:
        row["style"] = group.styles[row["label"]].number
    baseline_number = _baseline_number(rows, baseline)
    section: Values = {
        "name": group.name,
        "protocol": group.protocol,
        "metric": metric,
        "lower_is_better": lower_is_better,
        "summaries": {
            name: label for name, label in SUMMARY_LABELS.items() if has_validation or name != "at_best_validation"
        },
        "uneven": has_uneven_means(rows, by),  # if True, means are not compared
        "share": is_share(metric),
        "timed": has_virtual_time(group.records),
        "number_format": column_format(spread["mean"] for row in rows for spread in row["spread"].values() if spread),
        "rows": rows,
        "baseline": baseline_number,
        "seeds": sorted(group.partitions),
        "partition": partition_values(group.partitions),
        "differences": _differences(rows, baseline_number, by),
        "ranks": _ranks(rows, by, lower_is_better),
        "curves": [_curve_values(labelled.row, max_points) for labelled in group.rows],
        "metrics": _metric_names(group.records),
        "views": views_of(group),
        "runs": [_run_values(record) for record in group.records],
        "settings": relative_paths(group.records[0].config.to_yaml()),
        "parameters": _parameters(row["algorithm"] for row in rows),
        "mixed_data": mixed_data(group.records),
        "data_hashes": sorted(
            filter(None, {recorded_data(record.folder) for record in group.records if record.folder})
        ),
    }
    section["notes"] = notes_of(section)
    return section


def _parameters(texts: Iterable[str]) -> dict[str, str]:
    """Map algorithms to their parts with all parameters, defaults included.

    FedAvg, which has none, is left out.

    >>> _parameters(["fedavg", "fedlesam+ema", "mine"])["fedlesam+ema"]
    'lesam(rho=0.1, direction=client, indexing=vector) + ema(decay=0.99)'
    """
    described, unset = {}, Algorithm()
    for text in dict.fromkeys(texts):
        try:
            made = algorithm(text)
        except UserError:
            described[text] = "defaults unknown, because the plugin is not loaded (--plugin FILE.py)"
            continue
        parts = [part for slot in SLOTS if (part := getattr(made, slot)) != getattr(unset, slot)]
        described[text] = " + ".join(_with_parameters(part) for part in (*parts, *made.averages))
    return {text: parts for text, parts in described.items() if parts}


def _with_parameters(part: Any) -> str:
    values = {field.name: getattr(part, field.name) for field in parameters(part)}
    return show(part_name(part) or type(part).__name__, values).replace(",", ", ")


def _row_values(
    number: int, labelled: LabelledRow, metric: str, lower_is_better: bool, targets: Sequence[float]
) -> Values:
    """Compute summary values, rounds to targets and costs of a row: one model of an algorithm, over all seeds.

    Diverged and unfinished runs are listed and count for rounds to targets, but means exclude them.
    """
    label, row, settings = labelled  # the settings in which the row differs from others
    seeds = [record.config.seed for record in row.records]
    summaries = {
        record.config.seed: summary
        for record in row.averaged
        if (summary := summarise(record.history, row.model, metric, lower_is_better))
    }
    values = {  # by summary value, then by seed
        name: {seed: value for seed, each in summaries.items() if (value := getattr(each, name)) is not None}
        for name in SUMMARY_LABELS
    }
    last_entries = [record.history[-1] for record in row.averaged if record.history]
    return {
        "number": number,
        "label": label,
        "algorithm": row.algorithm,
        "model": row.model,
        "settings": {name: show_value(value) for name, value in settings.items()},
        "seeds": seeds,
        "diverged": [record.config.seed for record in row.records if record.status == "diverged"],
        "unfinished": [record.config.seed for record in row.records if record.status not in ENDED_STATUSES],
        "values": values,
        "worse_than_mean": row.is_worse_than_mean,
        "mixed_plugins": row.mixed_plugins,
        "last_metrics": row.last_metrics,
        "spread": {name: _spread(by_seed.values()) for name, by_seed in values.items()},
        "mean_counts": {seed: summary.mean_count for seed, summary in summaries.items()},
        "reached": [costs_to_target(row, metric, target, lower_is_better).document(target) for target in targets],
        "cost": {name: _mean([float(entry[name]) for entry in last_entries]) for name in COSTS},
        "seconds": _mean([record.seconds for record in row.averaged]),
        "rounds": max((int(record.history[-1]["round"]) for record in row.records if record.history), default=0),
    }


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def _spread(values: Iterable[float]) -> Values | None:
    """Return mean, standard deviation and number of the values as a dictionary; None if there are no values."""
    listed = list(values)
    return vars(seed_statistics(listed)) if listed else None


def _baseline_number(rows: Sequence[Values], name: str | None) -> int | None:
    """Return the number of the row whose label or algorithm is ``name``; None if there is no such row.

    Without a name, the baseline is the first of several rows; a single row has no baseline.
    """
    if name is None:
        return 0 if len(rows) > 1 else None
    return next((row["number"] for row in rows if name in (row["label"], row["algorithm"])), None)


def _differences(rows: Sequence[Values], baseline_number: int | None, by: str) -> list[Values]:
    """Compare every row with the baseline, paired by seed, with Holm-corrected p-values.

    A row without common seeds, or whose mean covers another number of evaluations (``uneven``), has the ``pair`` None.
    Without a baseline, the list is empty.
    """
    if baseline_number is None:
        return []
    baseline = rows[baseline_number]
    others = [row for row in rows if row is not baseline]
    uneven = [has_uneven_means([baseline, row], by) for row in others]
    pairs = [
        None if is_uneven else compare_paired(row["values"][by], baseline["values"][by])
        for row, is_uneven in zip(others, uneven, strict=True)
    ]
    holm = holm_correction([pair.p if pair else None for pair in pairs])
    return [
        {"row": row["number"], "label": row["label"], "pair": pair and vars(pair), "holm": p, "uneven": is_uneven}
        for row, is_uneven, pair, p in zip(others, uneven, pairs, holm, strict=True)
    ]


def has_uneven_means(rows: Sequence[Values], by: str) -> bool:
    """Whether rows are not comparable because their means cover different numbers of evaluations."""
    return by == "mean_last" and len({count for row in rows for count in row["mean_counts"].values()}) > 1


def shown_evaluations(rows: Sequence[Values], row: Values, by: str) -> str:
    """Format the number of evaluations in a row's mean as `` (n=5)`` if rows differ in it; otherwise empty."""
    if not row["mean_counts"] or not has_uneven_means(rows, by):
        return ""
    return f" (n={shown_range(row['mean_counts'].values())})"


def _ranks(rows: Sequence[Values], by: str, lower_is_better: bool) -> Values | None:
    """Rank the rows at their common seeds by the summary value ``by``; None if they are not comparable.

    Diverged runs are marked by an infinite value, which ranks last.
    """
    if has_uneven_means(rows, by):
        return None
    values = {row["label"]: row["values"][by] | dict.fromkeys(row["diverged"], -math.inf) for row in rows}
    ranks = rank_algorithms({label: by_seed for label, by_seed in values.items() if by_seed}, lower_is_better)
    if ranks is None:
        return None
    numbers = {row["label"]: row["number"] for row in rows}
    lines = [
        {"row": numbers[label], "label": label, "mean": mean, "each": ranks.each[label]}
        for label, mean in ranks.mean.items()
    ]
    return {"seeds": ranks.seeds, "lines": lines, "friedman": ranks.friedman, "critical": ranks.critical}


def _metric_names(records: Sequence[Record]) -> list[str]:
    """Return the names of the metrics in the last evaluations: primary ones first, the loss last."""
    names: dict[str, None] = {}  # a dictionary, because it preserves the order
    for record in records:
        for evaluation in record.history[-1:]:  # empty for a run without evaluations
            for metrics in evaluation["test"].values():
                names |= dict.fromkeys(metrics)
    primary = {record.metric for record in records}
    return sorted(names, key=lambda name: (name == "loss", name not in primary))


def _curve_values(row: Row, max_points: int) -> Values:
    """Compute the curves of a row: mean and standard deviation over seeds of every metric, and the x values.

    ``over`` holds the x values by axis (rounds and costs). Curves are subsampled to at most ``max_points`` points and
    end with the shortest run. A mean is None where the metric of a run was not finite.
    """
    seeds = common_evaluations(map(_with_costs, row.drawn), row.model)
    curve: Values = {"over": {}, "metrics": {}}
    if not seeds:
        return curve
    shown = evenly_spaced(len(seeds[0]), max_points)
    for axis in AXES | (VIRTUAL_AXIS if has_virtual_time(row.records) else {}):
        positions = np.array([[entry[axis] for entry in entries] for entries in seeds])
        curve["over"][axis] = _shortened(positions.mean(0)[shown])
    for metric in dict.fromkeys(name for entries in seeds for name in entries[-1]["test"][row.model]):
        values = values_by_seed(seeds, row.model, metric)[:, shown]
        if np.isfinite(values).any():
            std = values.std(0, ddof=1) if len(values) > 1 else np.zeros(len(shown))
            curve["metrics"][metric] = {"mean": _shortened(values.mean(0)), "std": _shortened(std)}
    return curve


def _with_costs(record: Record) -> list[Values]:
    """Return the entries of a run's history, each with the bytes sent and seconds elapsed since the start.

    An entry whose round was not timed has the seconds of the previous one.
    """
    assert record.folder is not None
    seconds = {line["round"]: float(line["seconds"]) for line in record.folder.timing()}
    elapsed, entries = 0.0, []
    for entry in record.history:
        elapsed = seconds.get(entry["round"], elapsed)
        entries.append({**entry, "bytes": entry["bytes_up"] + entry["bytes_down"], "seconds": elapsed})
    return entries


def _shortened(values: Any) -> list[float | None]:
    """Round values to five significant digits; None where not finite."""
    return [float(f"{value:.5g}") if math.isfinite(value) else None for value in values]


def partition_values(partitions: Mapping[int, Values]) -> Values:
    """Describe the partition of the first seed, with class counts for a figure and the hashes of all seeds.

    ``partitions`` holds the statistics of each seed's partition.
    """
    seed, partition = next(iter(partitions.items()))
    values = {name: partition[name] for name in PARTITION_FACTS}
    values["seed"] = seed
    values["class_counts"] = sort_and_subsample_clients(np.asarray(partition["histogram"]), MAX_CLIENTS).tolist()
    values["hashes"] = {number: partition["hash"] for number, partition in partitions.items()}
    return values


def _run_values(record: Record) -> Values:
    """Return the values of a run for the report's list of runs, such as its status and completed rounds."""
    rounds = record.history[-1]["round"] if record.history else 0
    if record.status == "diverged" and record.folder:
        rounds = int(record.folder.status()["rounds"])  # the round of divergence is not evaluated
    return {
        "folder": run_path(record),
        "algorithm": record.config.algorithm,
        "seed": record.config.seed,
        "status": record.status,
        "reason": record.reason,
        "rounds": rounds,
        "of": record.config.training.rounds,
        "seconds": record.seconds,
    }


def require_evaluations(document: Values) -> None:
    """Raise a ``UserError`` if no run of a report has been evaluated; a diverged run counts as evaluated."""
    sections = document["sections"]
    if not any(section["metrics"] or any(row["diverged"] for row in section["rows"]) for section in sections):
        raise UserError("none of these runs has been evaluated yet; wait for their first evaluation")
