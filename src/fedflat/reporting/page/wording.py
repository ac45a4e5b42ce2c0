"""Formatting of differences, intervals and p-values."""

from __future__ import annotations

from collections.abc import Sequence

from fedflat.units import shown_metric


def signed(value: float, metric: str) -> str:
    """A difference with its sign.

    >>> signed(0.0123, "accuracy"), signed(-0.5, "loss")
    ('+1.23', '−0.5')
    """
    return ("+" if value > 0 else "") + shown_metric(value, metric).replace("-", "−")


def interval(bounds: Sequence[float] | None, metric: str) -> str:
    """An interval as text.

    >>> interval((-0.01, 0.02), "accuracy")
    '−1.00 to +2.00'
    """
    return "–" if bounds is None else f"{signed(bounds[0], metric)} to {signed(bounds[1], metric)}"


def shown_p(p: float | None) -> str:
    """A p-value, never shown as zero.

    >>> shown_p(0.0123), shown_p(0.00001), shown_p(None)
    ('0.012', '< 0.001', '–')
    """
    if p is None:
        return "–"
    return "< 0.001" if p < 0.001 else f"{p:.2g}" if p < 0.1 else f"{p:.2f}"
