"""Summary values of a run (last, mean of the last evaluations, best, rounds to a target) and statistics over seeds.

The statistics are paired differences with intervals and tests, Holm's correction, and ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import fmean, stdev
from typing import Any

import numpy as np

from fedflat.display import shown_metric

MEAN_LABEL = "mean of the last 10 % of evaluations"
"""Label of ``Summary.mean_last``."""


@dataclass(frozen=True)
class Summary:
    """Summary of one test metric of one model over all evaluations of a run."""

    last: float
    """The value at the last evaluation."""
    mean_last: float
    """The mean over the last 10 % of the run's evaluations (rounded up), without those before the model existed."""
    mean_count: int
    """Number of evaluations in the mean ``mean_last``."""
    best: float
    """The best value over all evaluations; it is optimistic, because it is selected on the test set."""
    at_best_validation: float | None
    """The value at the (first) evaluation with the best validation value; None without a validation split."""


def summarise(history: Sequence[dict[str, Any]], model: str, metric: str, lower_is_better: bool) -> Summary | None:
    """Summarise a test metric of one model of a run: last value, mean of the last 10 % of evaluations, best and so on.

    The mean leaves out the initial model (round 0). Returns None if the metric was never evaluated for this model.

    Args:
        history: one entry per evaluation.
        model: name of the evaluated model.
        metric: name of the metric.
        lower_is_better: whether lower values of the metric are better.
    """
    points = series(history, model, metric)
    if not points:
        return None
    last = points[-1][1]
    trained = [entry["round"] for entry in history if entry["round"] > 0]
    window_rounds = set(trained[-math.ceil(len(trained) / 10) :])  # the last 10 %
    window = [value for round, value in points if round in window_rounds] or [last]
    best = best_of([value for _, value in points], lower_is_better)
    tested, sign = dict(points), 1 if lower_is_better else -1
    validated = [(x, value) for x, value in series(history, model, metric, split="validation") if x in tested]
    chosen = tested[min(validated, key=lambda point: sign * point[1])[0]] if validated else None
    return Summary(last, fmean(window), len(window), best, chosen)


def best_of(values: Sequence[float], lower_is_better: bool) -> float:
    """Return the best of some values of a metric: the lowest or the highest.

    >>> best_of([0.5, 0.25], lower_is_better=True)
    0.25
    """
    return min(values) if lower_is_better else max(values)


def series(
    history: Sequence[dict[str, Any]], model: str, metric: str, over: str = "round", split: str = "test"
) -> list[tuple[float, float]]:
    """Return (x, value) pairs of a model's metric, one per evaluation that has it.

    Args:
        history: one entry per evaluation.
        model: name of the evaluated model, e.g. ``server``.
        metric: name of the metric.
        over: key of x in an entry: ``round``, ``backward_passes``, ``bytes_up``, ``bytes_down`` or ``samples``.
        split: the evaluated examples: ``test``, ``validation``, or ``unseen`` for those of clients that never train.
    """
    points = [(entry[over], entry.get(split, {}).get(model, {}).get(metric)) for entry in history]
    return [(x, value) for x, value in points if value is not None]


def common_evaluations(histories: Iterable[Sequence[dict[str, Any]]], model: str) -> list[list[dict[str, Any]]]:
    """Return the evaluations of a model in several runs, cut to the length of the shortest run.

    Runs without any evaluation of the model are left out.
    """
    evaluated = [[entry for entry in history if model in entry["test"]] for history in histories]
    evaluated = [entries for entries in evaluated if entries]
    count = min(map(len, evaluated), default=0)
    return [entries[:count] for entries in evaluated]


def values_by_seed(runs: Sequence[Sequence[dict[str, Any]]], model: str, metric: str) -> np.ndarray:
    """Return a model's test metric in runs of equal length, [seeds, evaluations]; NaN where it was not finite."""
    return np.array([[entry["test"][model].get(metric) for entry in entries] for entries in runs], dtype=float)


def rounds_to(
    history: Sequence[dict[str, Any]], model: str, metric: str, target: float, lower_is_better: bool = False
) -> int | None:
    """Return the first evaluated round at which a test metric is ``target`` or better; None if there is none."""
    sign = -1 if lower_is_better else 1
    points = series(history, model, metric)
    return next((int(round) for round, value in points if sign * value >= sign * target), None)


def shown_range(counts: Iterable[int]) -> str:
    """Format the range of some numbers.

    >>> shown_range([5, 20, 20]), shown_range([5, 5])
    ('5 to 20', '5')
    """
    distinct = sorted(set(counts))
    return str(distinct[0]) if len(distinct) == 1 else f"{distinct[0]} to {distinct[-1]}"


def shown_sizes(sizes: Mapping[str, float]) -> str:
    """Format the smallest, largest and median number of examples per client.

    >>> shown_sizes({"min": 2, "median": 3.0, "max": 4}), shown_sizes({"min": 16, "median": 16.0, "max": 16})
    ('2 to 4, median 3', '16')
    """
    low, high = int(sizes["min"]), int(sizes["max"])
    return str(low) if low == high else f"{low} to {high}, median {sizes['median']:g}"


def class_texts(partition: Mapping[str, Any]) -> dict[str, str]:
    """Return a partition's classes per client and heterogeneity as texts by label."""
    return {
        "classes per client": f"{partition['classes_per_client']:.2f} on average",
        "heterogeneity": f"{partition['heterogeneity']:.3f} (mean total variation distance from all data; 0 is i.i.d.)",
    }


@dataclass(frozen=True)
class SeedStatistics:
    """The mean of one value per seed, with its standard deviation."""

    mean: float
    """NaN without any seed."""
    std: float | None
    """Sample standard deviation (divisor n - 1); None for fewer than two seeds."""
    count: int
    """Number of seeds."""

    def shown(self, metric: str, number_format: str = ".4g") -> str:
        """Format the mean of a metric and, for several seeds, the standard deviation; without any seed, return "–"."""
        if not self.count:
            return "–"
        deviation = "" if self.std is None else f" ± {shown_metric(self.std, metric, number_format)}"
        return f"{shown_metric(self.mean, metric, number_format)}{deviation}"


def seed_statistics(values: Sequence[float]) -> SeedStatistics:
    """Compute mean and standard deviation of one value per seed."""
    mean = fmean(values) if values else math.nan
    return SeedStatistics(mean, stdev(values) if len(values) > 1 else None, len(values))


LEVEL, POWER = 0.95, 0.8
"""Confidence level of intervals, and power of the detectable effect."""
BOOTSTRAP_DRAWS = 10_000
MIN_SIGNED_RANK_PAIRS = 6
"""Number of pairs from which the signed-rank test is used; with 5 its smallest p-value is 2 / 2^5 = 0.0625."""
MAX_ENUMERATED_VALUES = 6
"""Number of values up to which the bootstrap enumerates all n^n resamples."""


@dataclass(frozen=True)
class PairedDifference:
    """Difference of two algorithms over their common seeds, with intervals and a test."""

    seeds: tuple[int, ...]
    """The common seeds."""
    differences: tuple[float, ...]
    """The difference at each of these seeds."""
    mean: float
    """The mean of the differences."""
    interval: tuple[float, float] | None
    """95 % percentile bootstrap interval; None for a single seed."""
    t_interval: tuple[float, float] | None
    """95 % Student's t interval; preferable for few seeds and roughly normal differences."""
    test: str
    """Test behind ``p``: ``paired t``, ``signed rank`` or ``none``."""
    p: float | None
    """Two-sided p-value, without correction for several comparisons; None if no test applies."""


def compare_paired(values: Mapping[int, float], baseline: Mapping[int, float]) -> PairedDifference | None:
    """Compare values with a baseline over their common seeds; None if there are none.

    Args:
        values: one value per seed.
        baseline: one value per seed, which is subtracted.
    """
    seeds = tuple(sorted(values.keys() & baseline.keys()))
    if not seeds:
        return None
    differences = tuple(values[seed] - baseline[seed] for seed in seeds)
    interval, student_interval = bootstrap_interval(differences), t_interval(differences)
    test, p = paired_test(differences)
    return PairedDifference(seeds, differences, fmean(differences), interval, student_interval, test, p)


def bootstrap_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Compute the percentile bootstrap interval of a mean; None for fewer than two values.

    For up to six values, all resamples are enumerated instead of drawn. For three values, the interval is their range,
    whose coverage is only 75 %.

    >>> bootstrap_interval([0.01, 0.02, 0.03])
    (0.01, 0.03)
    """
    count = len(values)
    if count < 2:
        return None
    if count <= MAX_ENUMERATED_VALUES:
        resamples = np.array(list(product(range(count), repeat=count)))
    else:
        resamples = np.random.default_rng(0).integers(0, count, (BOOTSTRAP_DRAWS, count))
    means = np.asarray(values, dtype=float)[resamples].mean(1)
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], method="inverted_cdf")
    return float(low), float(high)


def t_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Compute Student's t interval of a mean; None for fewer than two values."""
    from scipy.stats import t

    count = len(values)
    if count < 2:
        return None
    mean, standard_error = fmean(values), float(np.std(values, ddof=1)) / math.sqrt(count)
    half_width = float(t.ppf((1 + LEVEL) / 2, count - 1)) * standard_error
    return mean - half_width, mean + half_width


def paired_test(differences: Sequence[float]) -> tuple[str, float | None]:
    """Test whether paired differences are zero on average.

    Returns:
        The name of the test and its two-sided p-value. The test is ``paired t`` for fewer than six pairs,
        ``signed rank`` (Wilcoxon's test) for six or more, or ``none`` if no test applies.
    """
    if len(differences) < 2:
        return "none", None
    differences = _drop_last_bits(differences).tolist()
    if not np.any(differences):
        return "none", 1.0
    if len(differences) >= MIN_SIGNED_RANK_PAIRS:
        return "signed rank", signed_rank_p(differences)
    if are_equal(differences):
        return "none", None  # t is infinite without any spread
    from scipy.stats import ttest_1samp

    return "paired t", float(ttest_1samp(differences, 0.0).pvalue)


def are_equal(differences: Sequence[float]) -> bool:
    """Whether two or more differences are equal, so that intervals have no width and t is infinite.

    >>> are_equal([0.1 + 0.2, 0.3]), are_equal([0.1, 0.2]), are_equal([0.1])
    (True, False, False)
    """
    values = _drop_last_bits(differences)
    return len(values) > 1 and math.isclose(values.min(), values.max(), rel_tol=1e-9)


def _drop_last_bits(values: Any) -> np.ndarray:
    """Round values to 12 digits, because equal accuracies can differ in their last bits after averaging."""
    return np.round(np.asarray(values, dtype=float), 12)


def signed_rank_p(differences: Sequence[float]) -> float:
    """Compute the exact two-sided p-value of Wilcoxon's signed-rank test, also with ties; zero differences are dropped.

    >>> signed_rank_p([1, 2, 3]), signed_rank_p([1, 1, -1])
    (0.25, 1.0)
    """
    from scipy.stats import rankdata

    values = _drop_last_bits(differences)
    values = values[values != 0]
    if not len(values):
        return 1.0
    ranks = (2 * rankdata(np.abs(values))).astype(int)  # twice the ranks, because tied ones may be halves
    smaller = min(ranks[values > 0].sum(), ranks[values < 0].sum())
    shares = np.ones(1)  # shares[s]: share of all sign flips in which the positive ranks sum to s
    for rank in ranks:
        shares = (np.pad(shares, (0, rank)) + np.pad(shares, (rank, 0))) / 2
    return float(min(1.0, 2 * shares[: smaller + 1].sum()))


def holm_correction(p_values: Sequence[float | None]) -> list[float | None]:
    """Apply Holm's step-down correction to p-values; None stays None.

    >>> holm_correction([0.01, 0.04, None, 0.03])
    [0.03, 0.06, None, 0.06]
    """
    ascending = sorted((p, index) for index, p in enumerate(p_values) if p is not None)
    corrected: list[float | None] = [None] * len(p_values)
    highest = 0.0  # corrected p-values must not decrease
    for rank, (p, index) in enumerate(ascending):
        highest = max(highest, min(1.0, (len(ascending) - rank) * p))
        corrected[index] = highest
    return corrected


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
        means = {name: fmean(ranks) for name, ranks in self.each.items()}
        return dict(sorted(means.items(), key=lambda item: item[1]))


def rank_algorithms(values: Mapping[str, Mapping[int, float]], lower_is_better: bool = False) -> Ranks | None:
    """Rank algorithms at every seed that all of them have; None for fewer than two algorithms or without such a seed.

    Args:
        values: one value per seed, by algorithm; infinite for diverged runs, which rank last.
        lower_is_better: whether lower values are better.
    """
    from scipy.stats import friedmanchisquare, rankdata, studentized_range

    if len(values) < 2:
        return None
    seeds = tuple(sorted(set.intersection(*(set(by_seed) for by_seed in values.values()))))
    if not seeds:
        return None
    table = _drop_last_bits([[by_seed[seed] for seed in seeds] for by_seed in values.values()])
    smaller_is_better = np.where(np.isfinite(table), table if lower_is_better else -table, np.inf)
    ranks = rankdata(smaller_is_better, axis=0)  # [algorithms, seeds]
    friedman = critical = None
    if len(values) >= 3 and len(seeds) >= 2:
        if (ranks != ranks[0]).any():  # Friedman's test is undefined if all ranks are equal
            friedman = float(friedmanchisquare(*ranks).pvalue)
        # Nemenyi's test uses the studentized range with infinitely many degrees of freedom.
        quantile = float(studentized_range.ppf(0.95, len(values), 1e6)) / math.sqrt(2)
        critical = quantile * math.sqrt(len(values) * (len(values) + 1) / (6 * len(seeds)))
    each = {name: tuple(map(float, row)) for name, row in zip(values, ranks, strict=True)}
    return Ranks(seeds, each, friedman, critical)


def detectable_effect(pairs: int) -> float:
    """Return the smallest effect that a paired t test detects with probability ``POWER``.

    The effect is measured in standard deviations of the differences.

    >>> round(detectable_effect(3), 1), round(detectable_effect(10), 1)
    (3.3, 1.0)
    """
    from scipy.optimize import brentq
    from scipy.stats import nct, t

    critical_value = float(t.ppf((1 + LEVEL) / 2, pairs - 1))

    def excess_power(effect: float) -> float:
        """Return the test's power at this effect minus ``POWER``; t is then noncentrally distributed."""
        return float(nct.sf(critical_value, pairs - 1, effect * math.sqrt(pairs))) - POWER

    return float(brentq(excess_power, 0.01, 50.0, xtol=1e-4))
