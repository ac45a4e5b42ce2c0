"""How values are shown: numbers with units on screen and in reports, and HTML tables in notebooks."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from math import floor, isfinite, log10
from statistics import median_low

SHARES = frozenset({"accuracy", "miou", "iou", "pixel_accuracy", "mAP", "label_accuracy", "f1", "exact_match"})
"""Metrics between 0 and 1, which are shown in per cent."""
MAX_NAMES = 20
"""Largest number of names in a text that lists them."""


def is_share(metric: str) -> bool:
    """Whether a metric lies between 0 and 1 and is shown in per cent.

    >>> is_share("miou"), is_share("loss")
    (True, False)
    """
    return metric in SHARES


def shown_metric(value: float | None, metric: str, number_format: str = ".4g") -> str:
    """Format a metric: accuracies and other shares in per cent, anything else with ``number_format``.

    >>> shown_metric(0.91234, "accuracy"), shown_metric(1.5, "loss"), shown_metric(31823.4, "rmse")
    ('91.23', '1.5', '31823')
    """
    if value is None:
        return "–"
    if number_format == ".4g" and 1e4 <= abs(value) < 1e9:
        number_format = ".0f"
    return f"{100 * value:.2f}" if is_share(metric) else format(value, number_format)


def shown_loss_or_error(value: float, name: str) -> str:
    """Format a value of a landscape: an error, e.g. ``test_error``, in per cent, anything else with four digits.

    >>> shown_loss_or_error(0.0803, "test_error"), shown_loss_or_error(0.28134, "train_loss")
    ('8.03', '0.2813')
    """
    return f"{100 * value:.2f}" if name.endswith("error") else f"{value:.4g}"


def column_format(values: Iterable[float | None], digits: int = 4) -> str:
    """Choose one format for the numbers of a column, with ``digits`` significant digits for their median.

    >>> column_format([0.74, 0.7]), column_format([53.2, 1204.5, None]), column_format([3e-9]), column_format([2e30])
    ('.4f', '.2f', '.3e', '.3e')
    >>> column_format([float("inf")])
    '.4g'
    """
    magnitudes = [abs(value) for value in values if value and isfinite(value)]
    if not magnitudes:
        return ".4g"
    decimals = digits - 1 - floor(log10(median_low(magnitudes)))
    return f".{max(decimals, 0)}f" if -7 < decimals <= 7 else ".3e"


def shown_target(target: float, metric: str) -> str:
    """Format a target value of a metric.

    >>> shown_target(0.9, "accuracy"), shown_target(1.5, "loss")
    ('90 %', '1.5')
    """
    return f"{100 * target:g} %" if is_share(metric) else f"{target:g}"


def with_unit(metric: str) -> str:
    """A metric's name with its unit, for column headings.

    >>> with_unit("accuracy"), with_unit("loss")
    ('accuracy %', 'loss')
    """
    return f"{metric} %" if is_share(metric) else metric


BYTE_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def shown_bytes(count: float | None, largest: float | None = None) -> str:
    """Format a number of bytes in decimal units; the ``largest`` number of a column determines its unit and decimals.

    >>> shown_bytes(123), shown_bytes(45_600_000), shown_bytes(999_900), shown_bytes(968_000, largest=1_936_000)
    ('123 B', '45.6 MB', '1 MB', '0.97 MB')
    """
    if count is None:
        return "–"
    rounded = float(f"{largest or count:.3g}")
    power = min(int(log10(max(rounded, 1)) / 3), len(BYTE_UNITS) - 1)
    unit = 1000**power
    if power == 0:
        number_format = ".0f"
    elif not largest:
        number_format = ",.3g"
    else:  # as many decimals as three significant digits of the largest number need
        number_format = f",.{max(0, 2 - int(log10(largest / unit)))}f"
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
    """Format a count, rounded to an integer and grouped by thousands; a dash if it is None.

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


def names_by_reason(reasons: Mapping[str, str]) -> dict[str, str]:
    """Return the names that have the same reason, as text by reason.

    >>> names_by_reason({"site 0": "late", "site 1": "lost", "site 2": "late"})
    {'late': 'site 0, site 2', 'lost': 'site 1'}
    """
    names: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        names.setdefault(reason, []).append(name)
    return {reason: shown_names(listed) for reason, listed in names.items()}


def shown_names(names: Sequence[str]) -> str:
    """Return names as text, with the number of those beyond the first ``MAX_NAMES``.

    >>> shown_names([str(number) for number in range(22)]).partition("18, ")[2]
    '19, 2 more'
    """
    more = [f"{len(names) - MAX_NAMES} more"] if len(names) > MAX_NAMES else []
    return ", ".join([*names[:MAX_NAMES], *more])


def html_table(title: str, columns: Iterable[object], rows: Iterable[Iterable[object]]) -> str:
    """Return a table with a title as HTML.

    >>> html_table("Runs", ["algorithm"], [["fedavg"]])
    '<p><b>Runs</b></p><table><tr><th>algorithm</th></tr><tr><td>fedavg</td></tr></table>'
    """
    header = "".join(f"<th>{_escape(column)}</th>" for column in columns)
    body = "".join(f"<tr>{''.join(f'<td>{_escape(value)}</td>' for value in row)}</tr>" for row in rows)
    return f"<p><b>{_escape(title)}</b></p><table>{f'<tr>{header}</tr>' if header else ''}{body}</table>"


def html_values(title: str, values: Mapping[str, object]) -> str:
    """Return names and values as an HTML table with a title; values that are None are left out."""
    return html_table(title, (), ((name, value) for name, value in values.items() if value is not None))


def _escape(value: object) -> str:
    return html.escape("–" if value is None else str(value))


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
