"""Formats of differences, confidence intervals and p-values in a report."""

from __future__ import annotations

from collections.abc import Sequence

from fedflat.units import shown_metric


def shown_difference(value: float, metric: str, number_format: str = ".4g") -> str:
    """Format a difference of a metric with its sign; differences of shares are in percentage points.

    >>> shown_difference(0.0123, "accuracy"), shown_difference(-0.5, "loss")
    ('+1.23', '−0.5')
    """
    return ("+" if value > 0 else "") + shown_metric(value, metric, number_format).replace("-", "−")


def shown_interval(bounds: Sequence[float] | None, metric: str, number_format: str = ".4g") -> str:
    """Format the confidence interval of a difference; None becomes a dash.

    >>> shown_interval((-0.01, 0.02), "accuracy")
    '−1.00 to +2.00'
    """
    if bounds is None:
        return "–"
    low, high = bounds
    return f"{shown_difference(low, metric, number_format)} to {shown_difference(high, metric, number_format)}"


def shown_p(p: float | None) -> str:
    """Format a p-value, never as zero.

    >>> shown_p(0.0123), shown_p(0.00001), shown_p(None)
    ('0.012', '< 0.001', '–')
    """
    if p is None:
        return "–"
    if p < 0.001:
        return "< 0.001"
    return f"{p:.2g}" if p < 0.1 else f"{p:.2f}"
