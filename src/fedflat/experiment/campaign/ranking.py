"""Rank the combinations of a sweep by the last validation metric, or by the test metric without a validation split."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any, Literal

from fedflat.experiment.analysis.reopen import primary_model
from fedflat.experiment.store.run_folder import Record

Split = Literal["validation", "test"]


def last_score(record: Record, split: Split) -> float | None:
    """The primary model's metric in the last evaluation; None if the run diverged or was never evaluated."""
    if not record.history or record.status == "diverged":
        return None
    score: float | None = record.history[-1].get(split, {}).get(primary_model(record), {}).get(record.metric)
    return score


@dataclass(frozen=True)
class RankedCombination:
    """A combination of settings over all its seeds."""

    varied: dict[str, Any]
    """The settings that identify it, without the seed."""
    seeds: int
    diverged: int
    """Number of seeds that diverged."""
    validation: tuple[float, ...]
    """Scores on the validation split, one per seed that has one."""
    test: tuple[float, ...]

    def scores(self, split: Split) -> tuple[float, ...]:
        """The scores on one split."""
        return self.validation if split == "validation" else self.test


@dataclass(frozen=True)
class Ranking:
    """The combinations of a sweep, best first."""

    by: Split
    metric: str
    lines: tuple[RankedCombination, ...]


def ranking(runs: Iterable[tuple[dict[str, Any], Record]]) -> Ranking:
    """Rank combinations by their mean score over seeds.

    Args:
        runs: the varied settings of every finished run, with its record.
    """
    runs = list(runs)
    by: Split = "validation" if runs and all(record.config.data.validation > 0 for _, record in runs) else "test"
    metric = next((record.metric for _, record in runs if record.history), "accuracy")
    groups: dict[str, list[tuple[dict[str, Any], Record]]] = {}
    for varied, record in runs:
        without_seed = {name: value for name, value in varied.items() if name != "seed"}
        groups.setdefault(repr(sorted(without_seed.items())), []).append((without_seed, record))
    lines = [_ranked(group[0][0], [record for _, record in group]) for group in groups.values()]
    lines.sort(key=lambda line: (not line.scores(by), -fmean(line.scores(by) or (0.0,))))
    return Ranking(by, metric, tuple(lines))


def _ranked(varied: dict[str, Any], records: Sequence[Record]) -> RankedCombination:
    def scores(split: Split) -> tuple[float, ...]:
        return tuple(score for record in records if (score := last_score(record, split)) is not None)

    diverged = sum(record.status == "diverged" for record in records)
    return RankedCombination(varied, len(records), diverged, scores("validation"), scores("test"))


def mean_and_spread(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Mean and standard deviation; None where there are too few values."""
    return fmean(values) if values else None, stdev(values) if len(values) > 1 else None
