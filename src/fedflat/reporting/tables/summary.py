"""The figures that are reported of a run, each by its name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

WINDOW = 100
"""Rounds behind the mean over the last evaluations."""


@dataclass(frozen=True)
class Summary:
    """One model's figures on the test set."""

    last: float
    mean_last: float
    """The mean over the evaluations of the last 100 rounds."""
    mean_count: int
    """How many evaluations that is."""
    best: float
    """The maximum over test evaluations: optimistic, since the test set chose it."""


def summarise(history: Sequence[dict[str, Any]], model: str, metric: str) -> Summary | None:
    """The figures of one model of a run; None where it was never evaluated."""
    points = series(history, model, metric)
    if not points:
        return None
    end = history[-1]["round"]
    late = [value for round, value in points if round > end - WINDOW and round > 0] or [points[-1][1]]
    return Summary(points[-1][1], fmean(late), len(late), max(value for _, value in points))


def series(
    history: Sequence[dict[str, Any]], model: str, metric: str, over: str = "round"
) -> list[tuple[float, float]]:
    """A metric on the test set over rounds, bytes, passes or samples."""
    found = [(record[over], record["test"].get(model, {}).get(metric)) for record in history]
    return [(x, value) for x, value in found if value is not None]


def rounds_to(history: Sequence[dict[str, Any]], model: str, metric: str, target: float) -> int | None:
    """The first evaluated round that reaches a target."""
    return next((int(round) for round, value in series(history, model, metric) if value >= target), None)


def from_to(counts: Iterable[int]) -> str:
    """Numbers by the lowest and the highest of them.

    >>> from_to([5, 20, 20]), from_to([5, 5])
    ('5 to 20', '5')
    """
    some = sorted(counts)
    return str(some[0]) if some[0] == some[-1] else f"{some[0]} to {some[-1]}"


@dataclass(frozen=True)
class Spread:
    """A mean over seeds with its standard deviation (n - 1)."""

    mean: float
    std: float
    count: int

    def percent(self) -> str:
        """As in papers: 83.12 ± 0.45."""
        return f"{100 * self.mean:.2f} ± {100 * self.std:.2f}" if self.count > 1 else f"{100 * self.mean:.2f}"


def spread(values: Sequence[float]) -> Spread:
    """Mean and standard deviation of some values."""
    return Spread(fmean(values), stdev(values) if len(values) > 1 else 0.0, len(values))
