"""What runs of a sweep are ranked by: the last validation metric where there is a validation split, the last test metric otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any, Literal

from fedflat.experiment.analysis.reopen import primary_model
from fedflat.experiment.campaign.sweep import Done
from fedflat.experiment.store.record import Record

Part = Literal["validation", "test"]


def metric_of(record: Record) -> str:
    """The metric that stands for a run."""
    return record.metric


def last_score(record: Record, part: Part) -> float | None:
    """The metric of the model that stands for a run, in its last evaluation; None where it diverged or was never evaluated."""
    if not record.history or record.status == "diverged":
        return None
    found: float | None = record.history[-1].get(part, {}).get(primary_model(record), {}).get(metric_of(record))
    return found


@dataclass(frozen=True)
class Line:
    """A combination over all its seeds."""

    varied: dict[str, Any]
    """Without the seed."""
    seeds: int
    diverged: int
    validation: tuple[float, ...]
    test: tuple[float, ...]

    def scores(self, part: Part) -> tuple[float, ...]:
        """Its figures on one part, one for each seed that gave one."""
        return self.validation if part == "validation" else self.test


@dataclass(frozen=True)
class Ranking:
    """The combinations of a sweep, the best first."""

    by: Part
    metric: str
    lines: tuple[Line, ...]


def ranking(done: Sequence[Done]) -> Ranking:
    """Combinations by their mean over seeds."""
    records = [(one.run.varied, one.record) for one in done if one.record is not None]
    by: Part = "validation" if records and all(record.config.data.validation > 0 for _, record in records) else "test"
    metric = next((metric_of(record) for _, record in records if record.history), "accuracy")
    groups: dict[str, list[tuple[dict[str, Any], Record]]] = {}
    for varied, record in records:
        apart = {name: value for name, value in varied.items() if name != "seed"}
        groups.setdefault(repr(sorted(apart.items())), []).append((apart, record))
    lines = [_line(*zip(*some, strict=True)) for some in groups.values()]
    return Ranking(
        by, metric, tuple(sorted(lines, key=lambda line: (not line.scores(by), -fmean(line.scores(by) or (0.0,)))))
    )


def _line(varied: tuple[dict[str, Any], ...], records: tuple[Record, ...]) -> Line:
    validation, test = (
        [score for r in records if (score := last_score(r, part)) is not None] for part in ("validation", "test")
    )
    return Line(varied[0], len(records), sum(r.status == "diverged" for r in records), tuple(validation), tuple(test))


def mean_and_spread(values: Sequence[float]) -> tuple[float | None, float | None]:
    """The mean and, from two on, the standard deviation."""
    return fmean(values) if values else None, stdev(values) if len(values) > 1 else None
