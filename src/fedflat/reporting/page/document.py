"""The content of a report as plain values; page, tables and figures only render it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np

from fedflat.errors import UserError, one_of
from fedflat.experiment.stopping import ENDED_STATUSES, check_target
from fedflat.experiment.store.run_folder import Record
from fedflat.reporting.page.gather import Gathered, Group, grouped, where
from fedflat.reporting.page.notes import notes_of
from fedflat.reporting.page.views import views_of
from fedflat.reporting.result import Row
from fedflat.reporting.tables.summary import (
    RoundsToTarget,
    compare_paired,
    from_to,
    holm,
    mean_ranks,
    rounds_to,
    series,
    spread,
    summarise,
)
from fedflat.units import is_share, shown_metric

FIGURES = {"mean_last": "mean of the last 100 rounds", "last": "last", "best": "best (max over test)"}
"""Summary values of a run, with their labels."""
AXES = {
    "round": "communication round",
    "backward_passes": "backward passes",
    "bytes": "bytes sent, up and down",
    "seconds": "seconds",
}
COSTS = ("backward_passes", "samples", "bytes_up", "bytes_down")
MOST_POINTS, FEWEST_POINTS, POINTS_OF_A_PAGE = 240, 40, 24_000
MOST_CLIENTS = 120
"""Maximum number of clients in a partition figure; more are subsampled evenly."""

Values = dict[str, Any]


def report_document(
    gathered: Gathered,
    targets: Sequence[float] = (),
    baseline: str | None = None,
    by: str = "mean_last",
    apart: bool = False,
) -> Values:
    """The content of a report.

    Args:
        gathered: the runs.
        targets: metric values for rounds-to-target.
        baseline: row that others are compared with; default: the first.
        by: summary value to compare: ``mean_last``, ``last`` or ``best``.
        apart: allow several partitions, one section each.
    """
    if by not in FIGURES:
        raise one_of("figure", by, FIGURES)
    groups = grouped(gathered.records, apart)
    rows = sum(len(group.rows) for group in groups)
    points = max(FEWEST_POINTS, min(MOST_POINTS, POINTS_OF_A_PAGE // rows))
    sections = [_section(group, targets, baseline, by, points) for group in groups]
    if baseline is not None and all(section["baseline"] is None for section in sections):
        raise one_of("baseline", baseline, [row["label"] for section in sections for row in section["rows"]])
    return {
        "by": by,
        "figures": FIGURES,
        "axes": AXES,
        "targets": list(targets),
        "runs": len(gathered.records),
        "left_out": [{"folder": folder, "why": why} for folder, why in gathered.left_out],
        "sections": sections,
    }


def _section(group: Group, targets: Sequence[float], baseline: str | None, by: str, points: int) -> Values:
    metric = group.metric
    for target in targets:
        check_target(target, metric)
    rows = [_row(number, *row, metric, targets) for number, row in enumerate(group.rows)]
    chosen = _baseline(rows, baseline)
    section: Values = {
        "name": group.name,
        "metric": metric,
        "uneven": uneven(rows, by),
        "share": is_share(metric),
        "rows": rows,
        "baseline": chosen,
        "seeds": sorted(group.partitions),
        "partition": partition_values(group.partitions),
        "differences": _differences(rows, chosen, by),
        "ranks": _ranks(rows, by),
        "curves": [_curve(row, points) for _, row, _ in group.rows],
        "metrics": _metrics(group.records),
        "views": views_of(group),
        "runs": [_run(record) for record in group.records],
        "repeat": _repeat(group, targets),
    }
    section["notes"] = notes_of(section)
    return section


def _row(
    number: int, label: str, row: Row, settings: Mapping[str, str], metric: str, targets: Sequence[float]
) -> Values:
    alive = [record for record in row.records if record.status != "diverged"]
    found = {record.config.seed: summarise(record.history, row.model, metric) for record in alive}
    known = {seed: summary for seed, summary in found.items() if summary is not None}
    by_seed = {name: {seed: float(getattr(summary, name)) for seed, summary in known.items()} for name in FIGURES}
    ends = [record.history[-1] for record in alive if record.history]
    return {
        "number": number,
        "label": label,
        "algorithm": row.algorithm,
        "model": row.model,
        "settings": dict(settings),
        "seeds": [record.config.seed for record in row.records],
        "diverged": [record.config.seed for record in row.records if record.status == "diverged"],
        "unfinished": [record.config.seed for record in row.records if record.status not in ENDED_STATUSES],
        "values": by_seed,
        "spread": {name: vars(spread(list(values.values()))) if values else None for name, values in by_seed.items()},
        "mean_counts": {seed: summary.mean_count for seed, summary in known.items()},
        "reached": [_reached(row, metric, target) for target in targets],
        "cost": {name: fmean(float(end[name]) for end in ends) if ends else None for name in COSTS},
        "seconds": fmean(record.seconds for record in alive) if alive else None,
        "rounds": max((int(record.history[-1]["round"]) for record in row.records if record.history), default=0),
    }


def _reached(row: Row, metric: str, target: float) -> Values:
    runs = [record for record in row.records if record.history]
    rounds = tuple(rounds_to(record.history, row.model, metric, target) for record in runs)
    # A run that diverged without reaching the target is censored at the planned number of rounds.
    ends = tuple(
        record.config.training.rounds if record.status == "diverged" else int(record.history[-1]["round"])
        for record in runs
    )
    if not runs:
        return {"target": target, "text": "–", "median": None, "reached": 0, "runs": 0, "each": []}
    reached = RoundsToTarget(target, rounds, ends)
    each = [f"{end}+" if at is None else str(at) for at, end in zip(rounds, ends, strict=True)]
    return {
        "target": target,
        "text": reached.text,
        "median": reached.median,
        "reached": reached.count,
        "runs": len(runs),
        "each": each,
    }


def _baseline(rows: Sequence[Values], wanted: str | None) -> int | None:
    if wanted is None:
        return 0 if len(rows) > 1 else None
    return next((row["number"] for row in rows if wanted in (row["label"], row["algorithm"])), None)


def _differences(rows: Sequence[Values], baseline: int | None, by: str) -> list[Values]:
    """Paired differences of every row and the baseline, with Holm-corrected p-values."""
    if baseline is None:
        return []
    base = rows[baseline]
    others = [(row, uneven([base, row], by)) for row in rows if row["number"] != baseline]
    pairs = [(row, None if apart else compare_paired(row["values"][by], base["values"][by])) for row, apart in others]
    corrected = holm([None if pair is None else pair.p for _, pair in pairs])
    return [
        {
            "row": row["number"],
            "label": row["label"],
            "pair": None if pair is None else vars(pair),
            "holm": p,
            "uneven": apart,
        }
        for (row, pair), p, (_, apart) in zip(pairs, corrected, others, strict=True)
    ]


def uneven(rows: Sequence[Values], by: str) -> bool:
    """Whether rows are not comparable because their means cover different numbers of evaluations."""
    return by == "mean_last" and len({count for row in rows for count in row["mean_counts"].values()}) > 1


def evaluations(rows: Sequence[Values], row: Values, figure: str) -> str:
    """The number of evaluations of a row's mean as `` (n=5)`` if rows differ in it, else nothing."""
    return f" (n={from_to(row['mean_counts'].values())})" if uneven(rows, figure) and row["mean_counts"] else ""


def _ranks(rows: Sequence[Values], by: str) -> Values | None:
    if uneven(rows, by):
        return None
    values = {row["label"]: row["values"][by] | dict.fromkeys(row["diverged"], -math.inf) for row in rows}
    ranks = mean_ranks({label: by_seed for label, by_seed in values.items() if by_seed})
    if ranks is None:
        return None
    numbers = {row["label"]: row["number"] for row in rows}
    lines = [
        {"row": numbers[name], "label": name, "mean": mean, "each": ranks.each[name]}
        for name, mean in ranks.mean.items()
    ]
    return {"seeds": ranks.seeds, "lines": lines, "friedman": ranks.friedman, "critical": ranks.critical}


def _metrics(records: Sequence[Record]) -> list[str]:
    """The evaluated metrics, the primary one first."""
    found = dict.fromkeys(
        name
        for record in records
        for evaluation in record.history[-1:]
        for model in evaluation["test"].values()
        for name in model
    )
    primary = {record.metric for record in records}
    return sorted(found, key=lambda name: (name == "loss", name not in primary))


def _curve(row: Row, max_points: int) -> Values:
    """Mean and standard deviation over seeds of every metric, subsampled to at most ``max_points`` points.

    Diverged runs would truncate the mean of all others, so they are used only if all runs diverged.
    """
    runs = [record for record in row.records if record.history and record.status != "diverged"]
    runs = runs or [record for record in row.records if record.history]
    histories = [_with_costs(record) for record in runs]
    metrics = dict.fromkeys(name for history in histories for name in history[-1]["test"].get(row.model, {}))
    curve: Values = {"over": {}, "metrics": {}}
    for metric in metrics:
        seeds = [series(history, row.model, metric) for history in histories]
        count = min(map(len, seeds), default=0)
        if not count:
            continue
        shown = np.unique(np.linspace(0, count - 1, min(count, max_points)).round().astype(int))
        values = np.array([[value for _, value in points[:count]] for points in seeds])[:, shown]
        std = values.std(0, ddof=1) if len(values) > 1 else np.zeros(len(shown))
        curve["metrics"][metric] = {"mean": _short(values.mean(0)), "std": _short(std)}
        if not curve["over"]:
            for axis in AXES:
                positions = [[x for x, _ in series(history, row.model, metric, axis)][:count] for history in histories]
                curve["over"][axis] = _short(np.array(positions).mean(0)[shown])
    return curve


def _with_costs(record: Record) -> list[Values]:
    """A history with total bytes and elapsed seconds."""
    assert record.folder is not None
    seconds = {line["round"]: float(line["seconds"]) for line in record.folder.timing()}
    latest, entries = 0.0, []
    for entry in record.history:
        latest = seconds.get(entry["round"], latest)
        entries.append({**entry, "bytes": entry["bytes_up"] + entry["bytes_down"], "seconds": latest})
    return entries


def _short(values: Any) -> list[float | None]:
    """Values rounded to five significant digits; None where not finite."""
    return [float(f"{value:.5g}") if math.isfinite(value) else None for value in values]


def partition_values(partitions: Mapping[int, Values]) -> Values:
    """The partition of the first seed as drawn and described, with the hashes of all seeds."""
    seed, partition = next(iter(partitions.items()))
    counts = np.asarray(partition["histogram"])
    share = counts.max(1) / np.maximum(counts.sum(1), 1)
    ordered = counts[np.lexsort((-share, counts.argmax(1)))]
    shown = ordered[np.linspace(0, len(ordered) - 1, min(len(ordered), MOST_CLIENTS)).round().astype(int)]
    facts = {
        name: partition[name]
        for name in ("clients", "unseen", "sizes", "coverage", "duplicates", "classes_per_client", "heterogeneity")
    }
    return facts | {
        "seed": seed,
        "shown": shown.tolist(),
        "hashes": {number: one["hash"] for number, one in partitions.items()},
    }


def _run(record: Record) -> Values:
    end = record.history[-1] if record.history else {}
    return {
        "folder": where(record),
        "algorithm": record.config.algorithm,
        "seed": record.config.seed,
        "status": record.status,
        "reason": record.reason,
        "rounds": int(record.folder.status()["rounds"])
        if record.status == "diverged" and record.folder
        else end.get("round", 0),
        "of": record.config.training.rounds,
        "seconds": record.seconds,
    }


def _repeat(group: Group, targets: Sequence[float]) -> Values:
    """The command that repeats the comparison, if only algorithms and seeds differ, and its settings."""
    algorithms = list(dict.fromkeys(record.config.algorithm for record in group.records))
    seeds = sorted({record.config.seed for record in group.records})
    alike = not any(settings for _, _, settings in group.rows)
    wanted = "".join(f" --target {target:g}" for target in targets)
    quoted = " ".join(f"'{name}'" if "(" in name else name for name in algorithms)
    counted = seeds == list(range(len(seeds)))
    which = len(seeds) if counted else f"{seeds[0]}," if len(seeds) == 1 else ",".join(map(str, seeds))
    command = f"fedflat compare {quoted} --config settings.yaml --seeds {which}{wanted}" if alike else None
    return {
        "command": command,
        "settings": group.records[0].config.to_yaml(),
        "folders": [where(record) for record in group.records],
    }


def require_something(document: Values) -> None:
    """Reject a report on runs without any evaluation."""
    if not any(row["spread"]["last"] or row["diverged"] for section in document["sections"] for row in section["rows"]):
        raise UserError("none of these runs has been evaluated yet; wait for their first evaluation")


def signed(value: float, metric: str) -> str:
    """A difference with its sign.

    >>> signed(0.0123, "accuracy"), signed(-0.5, "loss")
    ('+1.23', '−0.5')
    """
    return ("+" if value > 0 else "") + shown_metric(value, metric).replace("-", "−")


def interval(bounds: Sequence[float] | None, metric: str) -> str:
    """An interval as text.

    >>> interval((-0.01, 0.02), "accuracy")
    '−1.00 to +2.00'
    """
    return "–" if bounds is None else f"{signed(bounds[0], metric)} to {signed(bounds[1], metric)}"


def shown_p(p: float | None) -> str:
    """A p-value, never shown as zero.

    >>> shown_p(0.0123), shown_p(0.00001), shown_p(None)
    ('0.012', '< 0.001', '–')
    """
    if p is None:
        return "–"
    return "< 0.001" if p < 0.001 else f"{p:.2g}" if p < 0.1 else f"{p:.2f}"
