"""Summary values of a run: last, mean of the last rounds, best, rounds to a target."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import fmean, median, median_high, stdev
from typing import Any

import numpy as np

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


LEVEL = 0.95
DRAWS = 10_000
SIGNED_RANK_FROM = 6
"""Pairs from which the signed-rank test is used; with 5 its smallest p-value is 2 / 2^5 = 0.0625."""
EVERY_RESAMPLE = 6
"""Number of values up to which the bootstrap enumerates all n^n resamples."""


@dataclass(frozen=True)
class Pair:
    """Difference of two algorithms over their common seeds."""

    seeds: tuple[int, ...]
    differences: tuple[float, ...]
    mean: float
    interval: tuple[float, float] | None
    """95 % percentile bootstrap interval; None for a single seed."""
    t_interval: tuple[float, float] | None
    """95 % Student's t interval; preferable for few seeds and roughly normal differences."""
    test: str
    """Test behind ``p``: ``paired t``, ``signed rank`` or ``none``."""
    p: float | None


def compare_paired(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Pair | None:
    """``ours`` minus ``theirs`` over the common seeds; None if there are none."""
    seeds = tuple(sorted(ours.keys() & theirs.keys()))
    if not seeds:
        return None
    differences = tuple(ours[seed] - theirs[seed] for seed in seeds)
    test, p = paired_test(differences)
    return Pair(
        seeds, differences, fmean(differences), bootstrap_interval(differences), t_interval(differences), test, p
    )


def bootstrap_interval(
    values: Sequence[float], level: float = LEVEL, draws: int = DRAWS, seed: int = 0
) -> tuple[float, float] | None:
    """The percentile bootstrap interval of a mean; None for fewer than two values.

    Up to six values, all resamples are enumerated. For three values the interval is their range, whose coverage is only
    75 %.

    >>> bootstrap_interval([0.01, 0.02, 0.03])
    (0.01, 0.03)
    """
    count = len(values)
    if count < 2:
        return None
    if count <= EVERY_RESAMPLE:
        chosen = np.array(list(product(range(count), repeat=count)))
    else:
        chosen = np.random.default_rng(seed).integers(0, count, (draws, count))
    means = np.asarray(values, dtype=float)[chosen].mean(1)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2], method="inverted_cdf")
    return float(low), float(high)


def t_interval(values: Sequence[float], level: float = LEVEL) -> tuple[float, float] | None:
    """Student's t interval of a mean; None for fewer than two values."""
    from scipy.stats import t

    count = len(values)
    if count < 2:
        return None
    half = float(t.ppf((1 + level) / 2, count - 1)) * float(np.std(values, ddof=1)) / math.sqrt(count)
    return fmean(values) - half, fmean(values) + half


def paired_test(differences: Sequence[float]) -> tuple[str, float | None]:
    """Test name and two-sided p-value: paired t below six pairs, Wilcoxon's signed-rank test from six on."""
    if len(differences) < 2:
        return "none", None
    differences = _rounded(differences).tolist()
    if not np.any(differences):
        return "none", 1.0
    if len(differences) >= SIGNED_RANK_FROM:
        return "signed rank", signed_rank(differences)
    if math.isclose(min(differences), max(differences), rel_tol=1e-9):
        return "none", None  # t is infinite without any spread
    from scipy.stats import ttest_1samp

    return "paired t", float(ttest_1samp(differences, 0.0).pvalue)


def _rounded(values: Any) -> np.ndarray:
    """Values without their last bits, in which equal accuracies can differ after averaging."""
    return np.round(np.asarray(values, dtype=float), 12)


def signed_rank(differences: Sequence[float]) -> float:
    """Two-sided p-value of Wilcoxon's signed-rank test; zero differences are dropped.

    Exact without ties, and up to 16 pairs with ties (all sign flips are enumerated).
    """
    rounded = _rounded(differences)
    values = rounded[rounded != 0]
    if not len(values):
        return 1.0
    from scipy.stats import PermutationMethod, wilcoxon

    has_ties = len(np.unique(np.abs(values))) < len(values)
    method = PermutationMethod(n_resamples=2 ** min(len(values), 16)) if has_ties else "exact"
    return float(wilcoxon(values, method=method).pvalue)


def holm(ps: Sequence[float | None]) -> list[float | None]:
    """Holm's step-down correction of p-values; None stays None.

    >>> holm([0.01, 0.04, None, 0.03])
    [0.03, 0.06, None, 0.06]
    """
    known = sorted((p, place) for place, p in enumerate(ps) if p is not None)
    adjusted: list[float | None] = [None] * len(ps)
    highest = 0.0
    for passed, (p, place) in enumerate(known):
        highest = max(highest, min(1.0, (len(known) - passed) * p))
        adjusted[place] = highest
    return adjusted


@dataclass(frozen=True)
class Ranks:
    """Ranks of several algorithms (1 is best) over their common seeds."""

    seeds: tuple[int, ...]
    each: dict[str, tuple[float, ...]]
    """Rank of each algorithm at each seed; ties share the mean rank."""
    friedman: float | None
    """p-value of Friedman's test; None for fewer than three algorithms or two seeds."""
    critical: float | None
    """Nemenyi's critical difference at 5 %; closer mean ranks are not significantly different."""

    @property
    def mean(self) -> dict[str, float]:
        """Mean ranks, best first."""
        return dict(sorted(((name, fmean(places)) for name, places in self.each.items()), key=lambda pair: pair[1]))


def mean_ranks(values: Mapping[str, Mapping[int, float]]) -> Ranks | None:
    """Ranks per seed; diverged runs (minus infinity) rank last. None if the algorithms share no seed."""
    from scipy.stats import friedmanchisquare, rankdata, studentized_range

    if len(values) < 2:
        return None
    seeds = tuple(sorted(set.intersection(*(set(by_seed) for by_seed in values.values()))))
    if not seeds:
        return None
    table = _rounded([[by_seed[seed] for seed in seeds] for by_seed in values.values()])
    lost = ~np.isfinite(table)
    order = np.where(lost, np.inf, -table)
    places = np.stack([rankdata(column) for column in order.T], axis=1)
    count, blocks = places.shape
    friedman = critical = None
    if count >= 3 and blocks >= 2:
        if (places != places[0]).any():
            friedman = float(friedmanchisquare(*places).pvalue)
        critical = (
            float(studentized_range.ppf(0.95, count, 1e6))
            / math.sqrt(2)
            * math.sqrt(count * (count + 1) / (6 * blocks))
        )
    return Ranks(
        seeds, {name: tuple(map(float, row)) for name, row in zip(values, places, strict=True)}, friedman, critical
    )


@dataclass(frozen=True)
class RoundsToTarget:
    """Rounds that runs needed to reach a target; runs that ended before are censored, not dropped."""

    target: float
    rounds: tuple[int | None, ...]
    ends: tuple[int, ...]

    @property
    def count(self) -> int:
        """Number of runs that reached the target."""
        return sum(rounds is not None for rounds in self.rounds)

    @property
    def median(self) -> float | None:
        """The median over all runs; None if the middle run was censored. (A mean over successful runs is biased.)"""
        middle = median(math.inf if rounds is None else rounds for rounds in self.rounds)
        return middle if math.isfinite(middle) else None

    @property
    def text(self) -> str:
        """The median, or ``1000+`` if the middle run ended at round 1000 without reaching the target.

        >>> RoundsToTarget(0.9, (40, None, 60), (100, 100, 100)).text
        '60'
        >>> RoundsToTarget(0.9, (40, None, None), (100, 90, 80)).text
        '80+'
        """
        if self.median is not None:
            return f"{self.median:g}"
        known = (end if rounds is None else rounds for rounds, end in zip(self.rounds, self.ends, strict=True))
        return f"{median_high(known)}+"


def detectable(count: int, power: float = 0.8, level: float = LEVEL) -> float:
    """The effect size (in standard deviations of the differences) that a paired t test of ``count`` pairs detects.

    >>> round(detectable(3), 1), round(detectable(10), 1)
    (3.3, 1.0)
    """
    from scipy.optimize import brentq
    from scipy.stats import nct, t

    beyond = float(t.ppf((1 + level) / 2, count - 1))

    def detection_rate(effect: float) -> float:
        return float(nct.sf(beyond, count - 1, effect * math.sqrt(count)))

    return float(brentq(lambda effect: detection_rate(effect) - power, 0.01, 50.0, xtol=1e-4))
