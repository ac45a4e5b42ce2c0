"""Formatting of metrics, sizes, durations and counts, on screen and in reports."""

from __future__ import annotations

from collections.abc import Iterable
from math import floor, log10
from statistics import median_low

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


def shown_metric(value: float | None, metric: str, number_format: str = ".4g") -> str:
    """Format a metric: accuracies and other shares in per cent, anything else with ``number_format``.

    >>> shown_metric(0.91234, "accuracy"), shown_metric(1.5, "loss")
    ('91.23', '1.5')
    """
    if value is None:
        return "–"
    return f"{100 * value:.2f}" if is_share(metric) else format(value, number_format)


def column_format(values: Iterable[float | None], digits: int = 4) -> str:
    """Choose one format for the numbers of a column: as many decimals as a typical one needs for its first digits.

    >>> column_format([0.7435, 0.741]), column_format([53.2, 1204.5, None]), column_format([3e-9])
    ('.4f', '.2f', '.3e')
    """
    magnitudes = [abs(value) for value in values if value]
    if not magnitudes:
        return ".4g"
    decimals = digits - 1 - floor(log10(median_low(magnitudes)))
    return f".{max(decimals, 0)}f" if decimals <= 7 else ".3e"


def with_unit(metric: str) -> str:
    """A metric's name with its unit, for column headings.

    >>> with_unit("accuracy"), with_unit("loss")
    ('accuracy %', 'loss')
    """
    return f"{metric} %" if is_share(metric) else metric


BYTE_UNITS = ("B", "kB", "MB", "GB", "TB")


def shown_bytes(count: float | None, largest: float | None = None) -> str:
    """Format a number of bytes in decimal units; the ``largest`` number of a column determines its unit and decimals.

    >>> shown_bytes(123), shown_bytes(45_600_000), shown_bytes(968_000, largest=1_936_000)
    ('123 B', '45.6 MB', '0.97 MB')
    """
    if count is None:
        return "–"
    power = min(int(log10(max(largest or count, 1)) / 3), len(BYTE_UNITS) - 1)
    unit = 1000**power
    number_format = ".0f" if power == 0 else f",.{max(0, 2 - int(log10(largest / unit)))}f" if largest else ",.3g"
    return f"{format(count / unit, number_format)} {BYTE_UNITS[power]}"


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
