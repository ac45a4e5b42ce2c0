"""Honest statistics of few seeds: paired differences, their interval, a paired test, Holm's correction, ranks,
censored rounds.

Two algorithms that ran with the same seed saw the same partition, cohorts and batches, so that their difference is
freed of all of these.

>>> pair = compare_paired({0: 0.91, 1: 0.93, 2: 0.92}, {0: 0.90, 1: 0.91, 2: 0.89})
>>> round(pair.mean, 3), pair.seeds, pair.test
(0.02, (0, 1, 2), 'paired t')
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import fmean, median, median_high
from typing import Any

import numpy as np

LEVEL = 0.95
DRAWS = 10_000
SIGNED_RANK_FROM = 6
"""With 5 pairs the signed-rank test cannot go below p = 2 / 2^5 = 0.0625, whatever the data; from 6 on it can
(0.031).
"""
EVERY_RESAMPLE = 6
"""Up to so many values all resamples, n^n of them, are looked at instead of some drawn at random."""


@dataclass(frozen=True)
class Pair:
    """One algorithm less another, over the seeds that both have."""

    seeds: tuple[int, ...]
    differences: tuple[float, ...]
    mean: float
    interval: tuple[float, float] | None
    """Bootstrap, percentiles, 95 %; None for a single seed."""
    t_interval: tuple[float, float] | None
    """Student's, 95 %: wider, and to be believed for few seeds if the differences are about normal."""
    test: str
    """Which test gave ``p``: paired t, signed rank, or none."""
    p: float | None


def compare_paired(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Pair | None:
    """Ours less theirs over the seeds that both have; None where they share none."""
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

    Up to six values every resample is counted, so that nothing is drawn at random. Of three values it is their range,
    which holds the true median of the differences in 75 % of all cases and not in 95 %: that is what three values can
    say.

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
    """Student's interval of a mean; None for fewer than two values."""
    from scipy.stats import t

    count = len(values)
    if count < 2:
        return None
    half = float(t.ppf((1 + level) / 2, count - 1)) * float(np.std(values, ddof=1)) / math.sqrt(count)
    return fmean(values) - half, fmean(values) + half


def paired_test(differences: Sequence[float]) -> tuple[str, float | None]:
    """The name of the test and its two-sided p: paired t below six pairs, Wilcoxon's signed-rank test from six on."""
    if len(differences) < 2:
        return "none", None
    differences = _without_last_bits(differences).tolist()
    if not np.any(differences):
        return "none", 1.0
    if len(differences) >= SIGNED_RANK_FROM:
        return "signed rank", signed_rank(differences)
    if math.isclose(min(differences), max(differences), rel_tol=1e-9):
        return "none", None  # without any spread t is infinite: the seeds say nothing about chance
    from scipy.stats import ttest_1samp

    return "paired t", float(ttest_1samp(differences, 0.0).pvalue)


def _without_last_bits(values: Any) -> np.ndarray:
    """Numbers without their last bits, in which means of shares of the same test set differ that are the same in
    truth.
    """
    return np.round(np.asarray(values, dtype=float), 12)


def signed_rank(differences: Sequence[float]) -> float:
    """The exact two-sided p of Wilcoxon's signed-rank test, with ties; differences of zero are left out.

    Under the null hypothesis each sign is a fair coin, so that the distribution of the sum of positive ranks is a
    convolution.
    """
    rounded = _without_last_bits(differences)
    values = rounded[rounded != 0]
    if not len(values):
        return 1.0
    from scipy.stats import rankdata

    doubled = np.rint(2 * rankdata(np.abs(values))).astype(int)
    ways = np.zeros(doubled.sum() + 1)
    ways[0] = 1.0
    for rank in doubled:
        shifted = np.zeros_like(ways)
        shifted[rank:] = ways[: len(ways) - rank]
        ways = (ways + shifted) / 2
    positive = int(doubled[values > 0].sum())
    tail = min(ways[: positive + 1].sum(), ways[positive:].sum())
    return float(min(1.0, 2 * tail))


def holm(ps: Sequence[float | None]) -> list[float | None]:
    """Holm's step-down correction: the family-wise error of all these comparisons stays below the level; None stays
    None.

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
    """Places of several algorithms, 1 is best, averaged over the seeds that all of them have."""

    seeds: tuple[int, ...]
    each: dict[str, tuple[float, ...]]
    """For every algorithm its place at each seed; equals share their places."""
    friedman: float | None
    """The p of Friedman's test that all are alike; None for fewer than three algorithms or two seeds."""
    critical: float | None
    """Nemenyi's critical difference at 5 %: mean ranks closer than that are not told apart."""

    @property
    def mean(self) -> dict[str, float]:
        """Mean places, the best first."""
        return dict(sorted(((name, fmean(places)) for name, places in self.each.items()), key=lambda pair: pair[1]))


def mean_ranks(values: Mapping[str, Mapping[int, float]]) -> Ranks | None:
    """Places by seed; a value of minus infinity (a run that diverged) comes last. None where not two algorithms share
    a seed.
    """
    from scipy.stats import friedmanchisquare, rankdata, studentized_range

    if len(values) < 2:
        return None
    seeds = tuple(sorted(set.intersection(*(set(by_seed) for by_seed in values.values()))))
    if not seeds:
        return None
    table = _without_last_bits([[by_seed[seed] for seed in seeds] for by_seed in values.values()])
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
class Reached:
    """The rounds that runs needed to reach a target; those that ended before they reached it are censored, not left
    out.
    """

    target: float
    rounds: tuple[int | None, ...]
    ends: tuple[int, ...]

    @property
    def count(self) -> int:
        """How many runs reached it."""
        return sum(rounds is not None for rounds in self.rounds)

    @property
    def median(self) -> float | None:
        """The median over all runs; None where it is beyond the end of the runs. (A mean over those that made it
        would flatter.)
        """
        middle = median(math.inf if rounds is None else rounds for rounds in self.rounds)
        return middle if math.isfinite(middle) else None

    @property
    def text(self) -> str:
        """The median, or ``1000+`` where the run in the middle had not reached the target by round 1000, when it ended.

        >>> Reached(0.9, (40, None, 60), (100, 100, 100)).text, Reached(0.9, (40, None, None), (100, 90, 80)).text
        ('60', '80+')
        """
        if self.median is not None:
            return f"{self.median:g}"
        known = (end if rounds is None else rounds for rounds, end in zip(self.rounds, self.ends, strict=True))
        return f"{median_high(known)}+"


def detectable(count: int, power: float = 0.8, level: float = LEVEL) -> float:
    """The true difference, in standard deviations of the differences, that a paired t test of so many pairs finds
    with this probability.

    >>> round(detectable(3), 1), round(detectable(10), 1)
    (3.3, 1.0)
    """
    from scipy.optimize import brentq
    from scipy.stats import nct, t

    beyond = float(t.ppf((1 + level) / 2, count - 1))

    def found(effect: float) -> float:
        return float(
            nct.sf(beyond, count - 1, effect * math.sqrt(count))
        )  # that it is found with the wrong sign is next to impossible

    return float(brentq(lambda effect: found(effect) - power, 0.01, 50.0, xtol=1e-4))
