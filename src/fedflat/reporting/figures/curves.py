"""Curves of a metric over rounds or cost, with one band per algorithm."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from fedflat.display import column_format
from fedflat.engines.problem.task import is_error
from fedflat.errors import UserError, one_of
from fedflat.reporting.figures.style import (
    COLOURS,
    add_legend,
    add_outer_legend,
    label_rounds,
    limit_to_late,
    line_styles,
    marker_spacing,
    metric_label,
    open_frame,
    plotted_factor,
)
from fedflat.reporting.tables.summary import common_evaluations, values_by_seed

AXES = {
    "round": "communication round",
    "backward_passes": "backward passes",
    "bytes_up": "bytes sent by clients",
    "bytes_down": "bytes sent to clients",
    "samples": "samples processed",
    "virtual_seconds": "virtual time (s)",
}
"""Horizontal axes, with their labels."""
HIDDEN_FRACTION = 0.15
"""Fraction of lines that may lie outside the visible range if there are more lines than colours."""
TARGET_COLOUR = "#7d8a97"
LEGEND_ROWS = 40
"""Maximum number of lines in one column of the legend."""


def curves(
    lines: Sequence[tuple[str, Sequence[list[dict[str, Any]]], str]],
    metric: str,
    over: str = "round",
    lower_is_better: bool | None = None,
) -> Figure:
    """Plot a test metric: one line per algorithm with the mean over seeds, and a band of one standard deviation.

    Args:
        lines: (label, one history per seed, name of the evaluated model) of every line.
        metric: name of the metric.
        over: horizontal axis, one of ``AXES``.
        lower_is_better: whether lower values of the metric are better; default: as of known metrics.
    """
    if over not in AXES:
        raise one_of("axis", over, AXES)
    if any(over not in entry for _, histories, _ in lines for history in histories for entry in history):
        raise UserError("some of these runs have no virtual time; set a clock, such as clock='lognormal'")
    has_many_lines = len(lines) > len(COLOURS)
    figure = Figure(figsize=(8.2, 4.8), layout="constrained")
    axes = figure.subplots()
    styles, is_percent = line_styles(label for label, _, _ in lines), plotted_factor(metric) == 100
    bands = {label: _band(histories, model, metric, over) for label, histories, model in lines}
    bands = {label: band for label, band in bands.items() if len(band.x)}
    bounds = [bound for band in bands.values() for bound in (band.lower, band.upper)]
    number_format = ".1f" if is_percent else column_format(band.mean[-1] for band in bands.values())
    falls = is_error(metric) if lower_is_better is None else lower_is_better
    note = limit_to_late(axes, bounds, falls, HIDDEN_FRACTION if has_many_lines else 0.0)
    low, high = axes.get_ylim() if note else (-np.inf, np.inf)
    for label, (x, mean, lower, upper) in bands.items():
        style, legend_label = styles[label], f"{label}   {mean[-1]:{number_format}}"
        axes.plot(x, mean, **style.line, markevery=marker_spacing(len(x)), lw=1.8, label=legend_label)
        # Where the line is outside the axis, the rest of its band would be a wedge without a line.
        is_visible = (mean >= low) & (mean <= high)
        axes.fill_between(x, lower, upper, where=is_visible, color=style.colour, alpha=0.15, lw=0)
    axes.set_xlabel(AXES[over] + note)
    if over == "round" and bands:
        label_rounds(axes, max(round(band.x[-1]) for band in bands.values()))
    axes.set_ylabel(metric_label(metric))
    open_frame(axes)
    has_bands = any(len(histories) > 1 for _, histories, _ in lines)
    title = "mean over seeds, band: ± standard deviation\n" if has_bands else ""
    title += "number: last value in per cent" if is_percent else "number: last value"
    options: dict[str, Any] = {"title": title, "title_fontsize": 8, "alignment": "left"}
    if has_many_lines:  # sort the legend by the last value of each line
        handles = sorted(axes.lines, key=lambda line: float(np.asarray(line.get_ydata())[-1]), reverse=True)
        options |= {"fontsize": 8, "ncols": ceil(len(lines) / LEGEND_ROWS)}
        add_outer_legend(figure, "outside right center", handles=handles, **options)
    elif bands:
        add_legend(axes, loc="best", fontsize=9, **options)
    return figure


def mark_targets(figure: Figure, targets: Sequence[float], metric: str) -> None:
    """Draw target values of a metric as horizontal lines in a figure of ``curves``, if its axis includes them.

    Args:
        figure: the figure, whose vertical axis stays unchanged.
        targets: values of the metric, e.g. 0.9 for an accuracy of 90 %.
        metric: name of the metric.
    """
    (axes,) = figure.axes
    low, high = axes.get_ylim()
    for target in targets:
        value = plotted_factor(metric) * target
        if low < value < high:
            axes.axhline(value, color=TARGET_COLOUR, lw=0.8, ls=(0, (2, 3)), zorder=0)
            axes.annotate(
                f"target {value:g}",
                (0, value),
                xycoords=("axes fraction", "data"),
                xytext=(2, 2),
                textcoords="offset points",
                fontsize=8,
                color=TARGET_COLOUR,
            )


class Band(NamedTuple):
    """A line with a band: means over seeds of x and of a metric, and both ends of the band, [points] each."""

    x: np.ndarray
    mean: np.ndarray
    lower: np.ndarray
    upper: np.ndarray


def _band(histories: Sequence[list[dict[str, Any]]], model: str, metric: str, over: str) -> Band:
    """Return the line of a metric, without evaluations in which a seed's value is not finite.

    Seeds that never evaluated the model are left out.
    """
    seeds = common_evaluations(histories, model)
    if not seeds:
        return Band(*[np.zeros(0)] * 4)
    values, factor = values_by_seed(seeds, model, metric), plotted_factor(metric)
    is_finite = np.isfinite(values).all(0)
    x = np.array([[entry[over] for entry in entries] for entries in seeds]).mean(0)[is_finite]
    values = values[:, is_finite]
    mean = values.mean(0) * factor
    std = values.std(0, ddof=1) * factor if len(values) > 1 else np.zeros(len(x))
    return Band(x, mean, mean - std, np.minimum(mean + std, 100.0 if factor == 100 else np.inf))
