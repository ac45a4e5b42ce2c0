"""Everything that a report says, as plain values: the page, the tables and the figures only write it down."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np

from fedflat.errors import UserError, one_of
from fedflat.experiment.stopping import OVER, check_target
from fedflat.experiment.store.record import Record
from fedflat.reporting.page.gather import Gathered, Group, grouped, where
from fedflat.reporting.page.notes import notes_of
from fedflat.reporting.page.views import views_of
from fedflat.reporting.result import Row
from fedflat.reporting.tables.statistics import Reached, compare_paired, holm, mean_ranks
from fedflat.reporting.tables.summary import from_to, rounds_to, series, spread, summarise
from fedflat.units import is_share

FIGURES = {"mean_last": "mean of the last 100 rounds", "last": "last", "best": "best (max over test)"}
"""The figures of a run, each always by its name."""
AXES = {
    "round": "communication round",
    "backward_passes": "backward passes",
    "bytes": "bytes sent, up and down",
    "seconds": "seconds",
}
COSTS = ("backward_passes", "samples", "bytes_up", "bytes_down")
MOST_POINTS, FEWEST_POINTS, POINTS_OF_A_PAGE = 240, 40, 24_000
MOST_CLIENTS = 120
"""Clients in the picture of a partition; of more, evenly spaced ones."""

Values = dict[str, Any]


def report_document(
    gathered: Gathered,
    targets: Sequence[float] = (),
    baseline: str | None = None,
    by: str = "mean_last",
    apart: bool = False,
) -> Values:
    """What a report says of these runs: a section for every partition, with its rows, differences, ranks, curves,
    views and notes.
    """
    if by not in FIGURES:
        raise one_of("figure", by, FIGURES)
    groups = grouped(gathered.records, apart)
    rows = sum(len(group.rows) for group in groups)
    points = max(FEWEST_POINTS, min(MOST_POINTS, POINTS_OF_A_PAGE // rows))
    sections = [_section(group, targets, baseline, by, points) for group in groups]
    if baseline is not None and all(section["baseline"] is None for section in sections):
        raise one_of("row to compare with", baseline, [row["label"] for section in sections for row in section["rows"]])
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
    by_seed = {name: {seed: float(getattr(one, name)) for seed, one in known.items()} for name in FIGURES}
    ends = [record.history[-1] for record in alive if record.history]
    return {
        "number": number,
        "label": label,
        "algorithm": row.algorithm,
        "model": row.model,
        "settings": dict(settings),
        "seeds": [record.config.seed for record in row.records],
        "diverged": [record.config.seed for record in row.records if record.status == "diverged"],
        "unfinished": [record.config.seed for record in row.records if record.status not in OVER],
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
    # A run that diverged after it had reached the target did reach it; one that had not never will, and its last
    # round says too little.
    ends = tuple(
        record.config.training.rounds if record.status == "diverged" else int(record.history[-1]["round"])
        for record in runs
    )
    if not runs:
        return {"target": target, "text": "–", "median": None, "reached": 0, "runs": 0, "each": []}
    found = Reached(target, rounds, ends)
    each = [f"{end}+" if at is None else str(at) for at, end in zip(rounds, ends, strict=True)]
    return {
        "target": target,
        "text": found.text,
        "median": found.median,
        "reached": found.count,
        "runs": len(runs),
        "each": each,
    }


def _baseline(rows: Sequence[Values], wanted: str | None) -> int | None:
    if wanted is None:
        return 0 if len(rows) > 1 else None
    return next((row["number"] for row in rows if wanted in (row["label"], row["algorithm"])), None)


def _differences(rows: Sequence[Values], baseline: int | None, by: str) -> list[Values]:
    """Every row less the baseline, over common seeds, with p values corrected for how many there are."""
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
    """Whether rows are not comparable by a figure: means over different numbers of evaluations, as where an average
    begins late.
    """
    return by == "mean_last" and len({count for row in rows for count in row["mean_counts"].values()}) > 1


def evaluations(rows: Sequence[Values], row: Values, figure: str) -> str:
    """How many evaluations a row's mean is over, where rows differ in that: `` (n=5)``; otherwise nothing."""
    return f" (n={from_to(row['mean_counts'].values())})" if uneven(rows, figure) and row["mean_counts"] else ""


def _ranks(rows: Sequence[Values], by: str) -> Values | None:
    if uneven(rows, by):
        return None
    values = {row["label"]: row["values"][by] | dict.fromkeys(row["diverged"], -math.inf) for row in rows}
    found = mean_ranks({label: some for label, some in values.items() if some})
    if found is None:
        return None
    numbers = {row["label"]: row["number"] for row in rows}
    lines = [
        {"row": numbers[name], "label": name, "mean": mean, "each": found.each[name]}
        for name, mean in found.mean.items()
    ]
    return {"seeds": found.seeds, "lines": lines, "friedman": found.friedman, "critical": found.critical}


def _metrics(records: Sequence[Record]) -> list[str]:
    """The metrics that were evaluated, the one that stands for the runs first."""
    found = dict.fromkeys(
        name
        for record in records
        for evaluation in record.history[-1:]
        for model in evaluation["test"].values()
        for name in model
    )
    primary = {record.metric for record in records}
    return sorted(found, key=lambda name: (name == "loss", name not in primary))


def _curve(row: Row, most: int) -> Values:
    """Mean and standard deviation over seeds of every metric, and what they are drawn over; of too many points,
    evenly spaced ones.

    A run that diverged would end the mean of all others where it ended, so it counts only where all did.
    """
    runs = [record for record in row.records if record.history and record.status != "diverged"]
    runs = runs or [record for record in row.records if record.history]
    histories = [_with_costs(record) for record in runs]
    names = dict.fromkeys(name for history in histories for name in history[-1]["test"].get(row.model, {}))
    curve: Values = {"over": {}, "metrics": {}}
    for metric in names:
        seeds = [series(history, row.model, metric) for history in histories]
        count = min(map(len, seeds), default=0)
        if not count:
            continue
        kept = np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(int))
        values = np.array([[value for _, value in points[:count]] for points in seeds])[:, kept]
        std = values.std(0, ddof=1) if len(values) > 1 else np.zeros(len(kept))
        curve["metrics"][metric] = {"mean": _short(values.mean(0)), "std": _short(std)}
        if not curve["over"]:
            for axis in AXES:
                places = [[x for x, _ in series(history, row.model, metric, axis)][:count] for history in histories]
                curve["over"][axis] = _short(np.array(places).mean(0)[kept])
    return curve


def _with_costs(record: Record) -> list[Values]:
    """A history that also knows all bytes sent, and the seconds since the beginning."""
    assert record.folder is not None
    seconds = {line["round"]: float(line["seconds"]) for line in record.folder.timing()}
    latest, found = 0.0, []
    for entry in record.history:
        latest = seconds.get(entry["round"], latest)
        found.append({**entry, "bytes": entry["bytes_up"] + entry["bytes_down"], "seconds": latest})
    return found


def _short(values: Any) -> list[float | None]:
    """Numbers to five digits, which no picture can tell from more; nothing where they are not finite."""
    return [float(f"{value:.5g}") if math.isfinite(value) else None for value in values]


def partition_values(partitions: Mapping[int, Values]) -> Values:
    """The partition of the first seed as it is drawn and told, with the hashes of all."""
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
    """A command that runs it all again where only algorithms and seeds differ, and the settings behind it."""
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
    """Refuse a report of runs that have not been evaluated yet."""
    if not any(row["spread"]["last"] or row["diverged"] for section in document["sections"] for row in section["rows"]):
        raise UserError(
            "none of these runs has been evaluated yet, so there is nothing to report; wait for their first evaluation"
        )
