"""Rank the combinations of a sweep by the last validation metric, or by the test metric without a validation split."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
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
    """Number of seeds."""
    diverged: int
    """Number of seeds that diverged."""
    validation: tuple[float, ...]
    """Scores on the validation split, one per seed that has a score."""
    test: tuple[float, ...]
    """Scores on the test set, one per seed that has a score."""

    def scores(self, split: Split) -> tuple[float, ...]:
        """The scores on one split."""
        return self.validation if split == "validation" else self.test


@dataclass(frozen=True)
class Ranking:
    """The combinations of a sweep, best first."""

    split: Split
    """The split whose scores determine the order."""
    metric: str
    combinations: tuple[RankedCombination, ...]


def ranking(runs: Iterable[tuple[dict[str, Any], Record]]) -> Ranking:
    """Rank combinations of settings by their mean score over seeds.

    Scores are validation metrics, or test metrics if any run has no validation split.

    Args:
        runs: the varied settings of every finished run, with its record.
    """
    runs = list(runs)
    has_validation = bool(runs) and all(record.config.data.validation > 0 for _, record in runs)
    split: Split = "validation" if has_validation else "test"
    # The metric of the first run that was evaluated; without one there are no scores to rank.
    metric, lower_is_better = next(
        ((record.metric, record.lower_is_better) for _, record in runs if record.history), ("accuracy", False)
    )
    groups: dict[str, tuple[dict[str, Any], list[Record]]] = {}
    for varied, record in runs:
        without_seed = {name: value for name, value in varied.items() if name != "seed"}
        groups.setdefault(repr(sorted(without_seed.items())), (without_seed, []))[1].append(record)
    combinations = [_ranked_combination(*group) for group in groups.values()]

    def sort_key(combination: RankedCombination) -> tuple[bool, bool, float]:
        """Sort the best mean score first, combinations with diverged runs after all others, those without scores last.

        The mean of a combination with diverged runs is that of the remaining seeds, and therefore not comparable.
        """
        scores = combination.scores(split)
        mean = fmean(scores) if scores else 0.0
        return not scores, combination.diverged > 0, mean if lower_is_better else -mean

    return Ranking(split, metric, tuple(sorted(combinations, key=sort_key)))


def _ranked_combination(varied: dict[str, Any], records: Sequence[Record]) -> RankedCombination:
    """Summarise the runs of one combination, one per seed."""
    validation = [last_score(record, "validation") for record in records]
    test = [last_score(record, "test") for record in records]
    return RankedCombination(
        varied,
        seeds=len(records),
        diverged=sum(record.status == "diverged" for record in records),
        validation=tuple(score for score in validation if score is not None),
        test=tuple(score for score in test if score is not None),
    )
