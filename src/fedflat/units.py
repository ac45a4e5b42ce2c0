"""Formatting of metrics, sizes, durations and counts, on screen and in reports."""

from __future__ import annotations

SHARES = frozenset({"accuracy", "miou", "iou", "pixel_accuracy", "mAP", "label_accuracy"})
"""Metrics between 0 and 1, which are shown in per cent."""


def is_share(metric: str) -> bool:
    """Whether a metric lies between 0 and 1 and is shown in per cent.

    >>> is_share("miou"), is_share("loss")
    (True, False)
    """
    return metric in SHARES


ERRORS = frozenset({"loss", "rmse", "mse", "mae"})
"""Metrics that are better if lower."""


def is_error(metric: str) -> bool:
    """Whether lower values of a metric are better, unless its task says otherwise.

    >>> is_error("rmse"), is_error("r2")
    (True, False)
    """
    return metric in ERRORS


def shown_metric(value: float | None, metric: str) -> str:
    """Format a metric: accuracies and other shares in per cent, anything else with four digits.

    >>> shown_metric(0.91234, "accuracy"), shown_metric(1.5, "loss")
    ('91.23', '1.5')
    """
    if value is None:
        return "–"
    return f"{100 * value:.2f}" if is_share(metric) else f"{value:.4g}"


def with_unit(metric: str) -> str:
    """A metric's name with its unit, for column headings.

    >>> with_unit("accuracy"), with_unit("loss")
    ('accuracy %', 'loss')
    """
    return f"{metric} %" if is_share(metric) else metric


def shown_bytes(count: float | None) -> str:
    """Format a number of bytes in decimal units.

    >>> shown_bytes(123), shown_bytes(45_600_000)
    ('123 B', '45.6 MB')
    """
    if count is None:
        return "–"
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.1f} TB"


def shown_seconds(seconds: float | None) -> str:
    """Format a duration in seconds.

    >>> shown_seconds(3.14), shown_seconds(75), shown_seconds(3720)
    ('3.1 s', '1 min 15 s', '1 h 2 min')
    """
    if seconds is None:
        return "–"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def shown_count(count: float | None) -> str:
    """Format an integer, grouped by thousands.

    >>> shown_count(1234567)
    '1,234,567'
    """
    return "–" if count is None else f"{count:,.0f}"


def counted(count: int, noun: str) -> str:
    """Return a count with its noun, in the plural unless the count is 1.

    >>> counted(1, "round"), counted(3, "round")
    ('1 round', '3 rounds')
    """
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
