"""Summary values of a run: last, mean of the last rounds, best, rounds to a target."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

WINDOW = 100
"""Number of final rounds in the mean."""


@dataclass(frozen=True)
class Summary:
    """Summary of one model's metric on the test set."""

    last: float
    mean_last: float
    """The mean over the evaluations of the last 100 rounds."""
    mean_count: int
    """Number of evaluations in that mean."""
    best: float
    """The maximum over test evaluations; optimistic, because it is selected on the test set."""


def summarise(history: Sequence[dict[str, Any]], model: str, metric: str) -> Summary | None:
    """The summary of one model of a run; None if it was never evaluated."""
    points = series(history, model, metric)
    if not points:
        return None
    end = history[-1]["round"]
    late = [value for round, value in points if round > end - WINDOW and round > 0] or [points[-1][1]]
    return Summary(points[-1][1], fmean(late), len(late), max(value for _, value in points))


def series(
    history: Sequence[dict[str, Any]], model: str, metric: str, over: str = "round"
) -> list[tuple[float, float]]:
    """(x, value) pairs of a test metric over rounds, bytes, backward passes or samples."""
    points = [(record[over], record["test"].get(model, {}).get(metric)) for record in history]
    return [(x, value) for x, value in points if value is not None]


def rounds_to(history: Sequence[dict[str, Any]], model: str, metric: str, target: float) -> int | None:
    """The first evaluated round that reaches a target."""
    return next((int(round) for round, value in series(history, model, metric) if value >= target), None)


def from_to(counts: Iterable[int]) -> str:
    """The range of some numbers as text.

    >>> from_to([5, 20, 20]), from_to([5, 5])
    ('5 to 20', '5')
    """
    ordered = sorted(counts)
    return str(ordered[0]) if ordered[0] == ordered[-1] else f"{ordered[0]} to {ordered[-1]}"


@dataclass(frozen=True)
class SeedStatistics:
    """A mean over seeds with its standard deviation (n - 1)."""

    mean: float
    std: float
    count: int

    def percent(self) -> str:
        """Percent with standard deviation, e.g. ``83.12 ± 0.45``."""
        return f"{100 * self.mean:.2f} ± {100 * self.std:.2f}" if self.count > 1 else f"{100 * self.mean:.2f}"


def spread(values: Sequence[float]) -> SeedStatistics:
    """Mean and standard deviation of ``values``."""
    return SeedStatistics(fmean(values), stdev(values) if len(values) > 1 else 0.0, len(values))
