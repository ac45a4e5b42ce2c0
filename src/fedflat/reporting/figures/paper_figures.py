"""Vector figures of a report: curves, paired differences, ranks and the partition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fedflat.reporting.figures.style import open_frame
from fedflat.reporting.page.document import AXES, SUMMARY_LABELS
from fedflat.units import is_share

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#b0508a", "#a67c00", "#3f9bd1", "#6f4aa0", "#4a4a4a")
"""Colour-blind safe (after Okabe and Ito); the same as on the page."""
DASHES = ("-", "--", ":", "-.")
MAX_LINES = 16
"""Maximum number of rows in a figure; the best are shown."""

Values = Mapping[str, Any]


def figures_of(section: Values, by: str) -> dict[str, Figure]:
    """Draw all figures of a section, by name."""
    from fedflat.reporting.figures.partition import partition_picture

    figures = {}
    if _plotted_rows(section):
        figures = {f"curves-{axis}": curve_figure(section, axis) for axis in AXES}
    if any(difference["pair"] for difference in section["differences"]):
        figures["differences"] = difference_figure(section, by)
    if section["ranks"]:
        figures["ranks"] = rank_figure(section["ranks"])
    counts = section["partition"]["shown"]
    classes = [str(label) for label in range(len(counts[0]))]
    figures["partition"] = partition_picture(counts, classes, section["name"])
    return figures


def _plotted_rows(section: Values) -> list[int]:
    """Numbers of the rows to plot, at most ``MAX_LINES``: best rank first, or in table order without ranks."""
    if section["ranks"]:
        numbers = [line["row"] for line in section["ranks"]["lines"]]
    else:
        numbers = [row["number"] for row in section["rows"]]
    return [number for number in numbers if section["curves"][number]["metrics"]][:MAX_LINES]


def curve_figure(section: Values, axis: str) -> Figure:
    """Plot the metric of a section over rounds or cost: mean over seeds, and a band of one standard deviation."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.2, 3.8), layout="constrained")
    axes, metric = figure.subplots(), section["metric"]
    scale = _scale(metric)
    for number in _plotted_rows(section):
        curve = section["curves"][number]
        values = curve["metrics"].get(metric)
        if values is None:
            continue
        x = np.array(curve["over"][axis], dtype=float)
        mean, std = (scale * np.array(values[name], dtype=float) for name in ("mean", "std"))
        colour, dash = _colour(number), DASHES[number // len(COLOURS) % len(DASHES)]
        axes.plot(x, mean, color=colour, ls=dash, lw=1.5, label=section["rows"][number]["label"])
        axes.fill_between(x, mean - std, mean + std, color=colour, alpha=0.13, lw=0)
    axes.set_xlabel(AXES[axis])
    axes.set_ylabel(f"test {metric}" + (" (%)" if scale == 100 else ""))
    _style(axes)
    axes.legend(frameon=False, fontsize=8)
    return figure


def difference_figure(section: Values, by: str) -> Figure:
    """Plot paired differences from the baseline: mean, each seed, bootstrap interval and Student's interval."""
    scale = _scale(section["metric"])
    differences = [difference for difference in section["differences"] if difference["pair"]][:MAX_LINES]
    figure, axes = _row_axes([difference["label"] for difference in differences])
    for y, difference in enumerate(differences):
        pair, colour = difference["pair"], _colour(difference["row"])
        for bounds, width, alpha in ((pair["interval"], 5.0, 0.35), (pair["t_interval"], 1.0, 1.0)):
            if bounds:
                x = scale * np.array(bounds)
                axes.plot(x, [y, y], color=colour, lw=width, alpha=alpha, solid_capstyle="round")
        seeds = scale * np.array(pair["differences"])
        axes.plot(seeds, [y] * len(seeds), "o", ms=3, mfc="none", color=colour)
        axes.plot([scale * pair["mean"]], [y], "o", ms=5, color=colour)
    axes.axvline(0, color="#222222", lw=0.9)
    baseline = section["rows"][section["baseline"]]["label"]
    unit = " (percentage points)" if scale == 100 else ""
    axes.set_xlabel(f"difference from {baseline}, {SUMMARY_LABELS[by]}{unit}", fontsize=9)
    return figure


def rank_figure(ranks: Values) -> Figure:
    """Plot mean ranks, the ranks at each seed, and Nemenyi's critical difference."""
    lines: Sequence[Values] = ranks["lines"][:MAX_LINES]
    figure, axes = _row_axes([line["label"] for line in lines])
    for y, line in enumerate(lines):
        axes.plot(line["each"], [y] * len(line["each"]), "o", ms=3, mfc="none", color=_colour(line["row"]))
        axes.plot([line["mean"]], [y], "o", ms=5.5, color=_colour(line["row"]))
    critical, largest_difference = ranks["critical"], len(ranks["lines"]) - 1
    if critical is not None and critical < largest_difference:
        axes.plot([1, 1 + critical], [-0.8, -0.8], color="#222222", lw=1.2, marker="|")
        axes.text(1, -1.0, f"critical difference {critical:.2f}", fontsize=8, va="bottom", color="#444444")
        axes.set_ylim(len(lines) - 0.5, -1.8)
    axes.set_xlabel("mean rank over seeds, 1 is best", fontsize=9)
    return figure


def _row_axes(labels: Sequence[str]) -> tuple[Figure, Axes]:
    """Create axes with one labelled horizontal line per row, the first on top."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.2, 0.9 + 0.32 * max(3, len(labels))), layout="constrained")
    axes = figure.subplots()
    axes.set_yticks(range(len(labels)), labels, fontsize=9)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    _style(axes)
    axes.tick_params(axis="y", length=0)
    return figure, axes


def _style(axes: Axes) -> None:
    open_frame(axes)
    axes.tick_params(labelsize=8.5)


def _scale(metric: str) -> int:
    """Return the factor from a metric to the plotted value: shares are plotted in per cent."""
    return 100 if is_share(metric) else 1


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]
