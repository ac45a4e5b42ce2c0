"""Means of random draws with confidence intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import sqrt
from statistics import fmean, stdev

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """A mean with its 95 % confidence interval ``[low, high]``."""

    value: float
    """The mean of the draws."""
    low: float
    """Lower end of the confidence interval."""
    high: float
    """Upper end of the confidence interval."""
    draws: int
    """Number of draws that were averaged."""

    @property
    def half_width(self) -> float:
        """Half the width of the confidence interval."""
        return (self.high - self.low) / 2

    def document(self) -> dict[str, float]:
        """Return all fields as a dictionary."""
        return asdict(self)


def estimate(draws: Sequence[float], offset: float = 0.0) -> Estimate:
    """Return the mean of independent draws plus ``offset``, with Student's t interval (infinite for a single draw).

    Args:
        draws: the random values.
        offset: a known constant that is added to the mean without uncertainty.

    >>> mean = estimate([1.0, 2.0, 3.0])
    >>> mean.value, round(mean.low, 3), round(mean.high, 3)
    (2.0, -0.484, 4.484)
    """
    value = offset + fmean(draws)
    if len(draws) < 2:
        return Estimate(value, float("-inf"), float("inf"), len(draws))
    from scipy.stats import t

    quantile = float(t.ppf((1 + CONFIDENCE) / 2, len(draws) - 1))
    half_width = quantile * stdev(draws) / sqrt(len(draws))
    return Estimate(value, value - half_width, value + half_width, len(draws))
