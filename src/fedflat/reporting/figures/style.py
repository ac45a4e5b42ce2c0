"""Style and layout that figures share; without importing matplotlib, so that reports can use it without figures."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from math import ceil
from typing import TYPE_CHECKING, Any, Literal, cast
from zlib import crc32

import numpy as np

from fedflat.display import is_share
from fedflat.engines.problem.task import is_error

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.legend import Legend

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#b0508a", "#a67c00", "#3f9bd1", "#6f4aa0", "#4a4a4a")
"""Colours that colour-blind readers can distinguish (after Okabe and Ito); also in the style sheet of the report."""
MARKERS = "osD^vPX*"
"""Matplotlib's names of markers, in the order of the colours."""
DASHES = ("-", "--", ":", "-.")
FIXED = ("fedavg", "fedsam", "scaffold", "fedmoswa", "fedswa", "fedasam", "feddyn", "fedcm")
"""Algorithms that have the same colour and marker in every figure."""
MAX_LEGEND_SHARE = 0.7
"""A legend that fills more of a panel's width or height is placed outside the panel."""
LEGEND_MARGIN = 0.2
"""Space around a legend outside the panels, in inches."""
MARKS_PER_LINE = 8
"""Number of markers along a curve."""
EARLY_FRACTION = 1 / 3
"""Fraction at the start of a curve that is ignored when the range of the vertical axis is chosen."""
MIN_LATE_SHARE = 0.6
"""The early fraction is shown nevertheless if the rest then fills at least this share of the axis."""


@dataclass(frozen=True)
class LineStyle:
    """Colour, marker and dashes of a line in a figure, derived from a number; numbers below 64 all look different."""

    number: int

    @property
    def colour(self) -> str:
        """The colour; colours repeat after eight."""
        return COLOURS[self.number % len(COLOURS)]

    @property
    def marker(self) -> str:
        """Matplotlib's name of the marker; it differs where colours repeat."""
        return MARKERS[(self.number + self.number // len(COLOURS)) % len(MARKERS)]

    @property
    def line(self) -> dict[str, Any]:
        """Matplotlib's arguments of a line: colour, dashes and marker."""
        dashes = DASHES[self.number // len(COLOURS) % len(DASHES)]
        return {"color": self.colour, "ls": dashes, "marker": self.marker, "ms": 4}


def line_styles(labels: Iterable[str]) -> dict[str, LineStyle]:
    """Choose a style for each label of a figure, the name of an algorithm or model.

    An algorithm's style is fixed or determined by its name (without seed, round or settings), so that it looks the same
    in every figure. If another label of the figure already has that style, the algorithm gets the next free one.
    Labels that differ only in the seed share a colour.

    >>> [(style.colour, style.marker) for style in line_styles(["fedsam", "fedavg"]).values()]
    [('#d55e00', 's'), ('#0072b2', 'o')]
    >>> [style.line["ls"] + style.colour for style in line_styles(["fedsam (seed 0)", "fedsam (seed 1)"]).values()]
    ['-#d55e00', '--#d55e00']
    """
    names = list(dict.fromkeys(labels))
    numbers: dict[str, int] = {}  # numbers of the styles chosen so far
    algorithms = {name: algorithm_of(name).lower() for name in names}
    # Fixed styles first; an algorithm before its variants.
    for name in sorted(names, key=lambda name: (algorithms[name] not in FIXED, algorithms[name] != name.lower())):
        algorithm = algorithms[name]
        first = FIXED.index(algorithm) if algorithm in FIXED else crc32(algorithm.encode()) % len(COLOURS)
        # Once all colours are used, the next 8 numbers have the same colours with other markers and dashes.
        colours_of = {without_seed(other): number for other, number in reversed(numbers.items())}
        candidates: Iterator[int] = count(colours_of.get(without_seed(name), 0), len(COLOURS))
        if without_seed(name) not in colours_of:
            blocks = count(len(colours_of) // len(COLOURS) * len(COLOURS), len(COLOURS))
            candidates = (block + (first + step) % len(COLOURS) for block in blocks for step in range(len(COLOURS)))
        numbers[name] = next(number for number in candidates if number not in numbers.values())
    return {name: LineStyle(numbers[name]) for name in names}


def without_seed(label: str) -> str:
    """Return a label of a figure without its seed."""
    return re.sub(r",? \(?seed \d+\)?", "", label)


def algorithm_of(label: str) -> str:
    """Return the algorithm in a label of a figure: the text before a seed, a round or settings.

    >>> algorithm_of("fedprox(mu=0.1, nesterov=true), seed 0"), algorithm_of("fedavg (seed 1)")
    ('fedprox(mu=0.1, nesterov=true)', 'fedavg')
    """
    match = re.match(r"(?:[^\s,(]|\([^)]*\))+", label)  # spaces and commas inside parentheses belong to the algorithm
    return match.group() if match else label


def described_labels(names: Iterable[str], descriptions: Mapping[str, str]) -> tuple[dict[str, str], str]:
    """Return a legend label for each model, and the description that all models share (empty if they differ).

    Parts of a description that the name contains are left out.

    Args:
        names: names of the models.
        descriptions: for each name, what the model is, e.g. ``server model, seed 0, round 60``; may be empty.

    >>> described_labels(["a", "b"], {"a": "server model, seed 0", "b": "server model, seed 1"})
    ({'a': 'a (server model, seed 0)', 'b': 'b (server model, seed 1)'}, '')
    >>> described_labels(["a (seed 0)", "a (seed 1)"], {f"a (seed {seed})": f"server, seed {seed}" for seed in (0, 1)})
    ({'a (seed 0)': 'a (seed 0)', 'a (seed 1)': 'a (seed 1)'}, 'server')
    """
    descriptions = {
        name: ", ".join(part for part in text.split(", ") if part not in name) for name, text in descriptions.items()
    }
    names, texts = list(names), set(descriptions.values())
    if len(texts) == 1:
        return {name: name for name in names}, texts.pop()
    return {name: f"{name} ({descriptions[name]})" if descriptions.get(name) else name for name in names}, ""


def marker_spacing(points: int) -> int:
    """Return the distance between two markers of a curve, counted in points, if the curve has ``points`` points."""
    return max(1, ceil(points / MARKS_PER_LINE))


def plotted_factor(metric: str) -> int:
    """Return the factor from a metric to the plotted value: shares are plotted in per cent."""
    return 100 if is_share(metric) else 1


def metric_label(metric: str) -> str:
    """Label of the axis of a test metric, with its unit, or with its direction if lower values are better.

    >>> metric_label("accuracy"), metric_label("rmse")
    ('test accuracy (%)', 'test rmse (lower is better)')
    """
    suffix = " (%)" if is_share(metric) else " (lower is better)" if is_error(metric) else ""
    return f"test {metric}{suffix}"


def late_limits(
    curves: Sequence[np.ndarray], lower_is_better: bool, hidden_fraction: float = 0.0
) -> tuple[float, float] | None:
    """Return limits (low, high) of a vertical axis that show the differences of curves, not their steep beginning.

    The limits include every curve after its first third, except for some of the worst curves if ``hidden_fraction`` is
    above 0. They also include the first third if the rest then still fills most of the axis. Returns None if
    there are no finite values or all are equal.

    Args:
        curves: the values of each curve, [points].
        lower_is_better: whether curves fall rather than rise.
        hidden_fraction: fraction of the curves, the worst ones, that may be partly outside the limits.
    """
    sign = -1.0 if lower_is_better else 1.0  # turns falling curves into rising ones
    finite = [sign * curve[np.isfinite(curve)] for curve in curves]
    late_minima = [float(curve[int(EARLY_FRACTION * len(curve)) :].min()) for curve in finite if len(curve)]
    if not late_minima:
        return None
    worst = float(np.quantile(late_minima, hidden_fraction))
    best = max(float(curve.max()) for curve in finite if len(curve))
    if best <= worst:
        return None
    whole = min(float(curve.min()) for curve in finite if len(curve))
    if best - whole <= (best - worst) / MIN_LATE_SHARE:
        worst = min(worst, whole)
    margin = 0.05 * (best - worst)
    ends = (sign * (worst - 2 * margin), sign * (best + margin))
    return min(ends), max(ends)


def limit_to_late(axes: Axes, curves: Sequence[np.ndarray], lower_is_better: bool, hidden_fraction: float = 0.0) -> str:
    """Set the limits of the vertical axis to ``late_limits``; returns a note on values outside, or empty."""
    limits = late_limits(curves, lower_is_better, hidden_fraction)
    if limits is None:
        return ""
    axes.set_ylim(limits)
    is_outside = any(np.any(curve < limits[0]) or np.any(curve > limits[1]) for curve in curves)
    return " (early values are outside the axis)" if is_outside else ""


def label_rounds(axes: Axes, last: int) -> None:
    """Label a horizontal axis of rounds at round numbers and at the ``last`` round."""
    from matplotlib.ticker import MaxNLocator

    ticks = MaxNLocator(8, integer=True, min_n_ticks=1).tick_values(0, max(last, 1))
    spacing = ticks[1] - ticks[0]
    axes.set_xticks([*(tick for tick in ticks if 0 <= tick <= last - spacing / 2), last])


def evenly_spaced(count: int, maximum: int) -> np.ndarray:
    """Return at most ``maximum`` evenly spaced indices out of ``range(count)``, including both ends.

    >>> evenly_spaced(9, 3), evenly_spaced(2, 3)
    (array([0, 4, 8]), array([0, 1]))
    """
    return np.linspace(0, count - 1, min(count, maximum)).round().astype(int)


def sort_and_subsample_clients(counts: np.ndarray, maximum: int) -> np.ndarray:
    """Return the class counts of clients sorted by most frequent class, then by its share, and subsampled evenly.

    Args:
        counts: examples per client and class, [clients, classes].
        maximum: maximum number of clients to return.
    """
    share = counts.max(1) / np.maximum(counts.sum(1), 1)
    ordered = counts[np.lexsort((-share, counts.argmax(1)))]
    shown: np.ndarray = ordered[evenly_spaced(len(ordered), maximum)]
    return shown


def scale_logarithmically(axes: Axes, nonpositive: Literal["clip", "mask"] = "clip") -> None:
    """Make the vertical axis logarithmic, with plain numbers as labels, also within a decade.

    Values that are not positive are drawn below the axis (``clip``) or omitted (``mask``).
    """
    from matplotlib.ticker import FuncFormatter, LogLocator

    axes.set_yscale("log", nonpositive=nonpositive)
    low, high = axes.get_ylim()
    labelled = "123456789" if high < 10 * low else "25"  # leading digits of the minor ticks that have room for a label
    axes.yaxis.set_minor_locator(LogLocator(subs=range(2, 10)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in labelled else ""))


def wrapped(name: str, characters: int) -> str:
    """Break a name into lines of about this length, after commas and spaces and before plus signs.

    >>> wrapped("fedprox(mu=0.1,nesterov=true)+swa", 20)
    'fedprox(mu=0.1,\\nnesterov=true)+swa'
    """
    lines = [""]
    for part in re.split(r"(?<=[, ])|(?=\+)", name):
        if lines[-1] and len(lines[-1] + part) > characters:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)


def add_outer_legend(figure: Figure, loc: str = "outside lower left", **options: Any) -> Legend:
    """Add a legend outside the panels, and enlarge the figure so that names of any length fit."""
    style: dict[str, Any] = {"loc": loc, "frameon": False, "fontsize": 9, "title_fontsize": 9, "alignment": "left"}
    legend: Legend = figure.legend(**style | options)
    box, (width, height) = legend.get_window_extent(), figure.get_size_inches()
    legend_width, legend_height = box.width / figure.dpi + LEGEND_MARGIN, box.height / figure.dpi + LEGEND_MARGIN
    if loc.startswith("outside right"):
        figure.set_size_inches(width + legend_width, max(height, legend_height))
    else:
        figure.set_size_inches(max(width, legend_width), height + legend_height)
    return legend


def add_legend(axes: Axes, outside: str = "outside lower left", **options: Any) -> None:
    """Add a legend inside a figure's only panel, or at ``outside`` if it would cover too much of the panel."""
    legend = axes.legend(**{"frameon": False} | options)
    box, panel = legend.get_window_extent(), axes.get_window_extent()
    if max(box.width / panel.width, box.height / panel.height) > MAX_LEGEND_SHARE:
        legend.remove()
        add_outer_legend(cast("Figure", axes.figure), **options | {"loc": outside})


def open_frame(axes: Axes, grid: float = 0.25) -> None:
    """Draw a faint grid (with this opacity) and remove the frame's upper and right sides."""
    axes.grid(alpha=grid)
    axes.spines[["top", "right"]].set_visible(False)


def subplot_list(figure: Figure, count: int, columns: int, **options: Any) -> list[Any]:
    """Add ``count`` subplots row by row, hide the unused ones of the last row, and return the others."""
    subplots = figure.subplots(ceil(count / columns), columns, squeeze=False, **options).ravel()
    for unused in subplots[count:]:
        unused.set_visible(False)
    return list(subplots[:count])
