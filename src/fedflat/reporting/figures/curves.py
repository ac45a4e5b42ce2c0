"""Curves of a metric over rounds or cost, with one band per algorithm."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from fedflat.display import is_share
from fedflat.errors import UserError, one_of
from fedflat.reporting.figures.style import (
    COLOURS,
    label_rounds,
    limit_to_late,
    line_styles,
    marker_spacing,
    metric_label,
    open_frame,
)
from fedflat.reporting.tables.summary import series

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
LEGEND_ROWS = 40
"""Maximum number of lines in one column of the legend."""


def curves(
    lines: Sequence[tuple[str, Sequence[list[dict[str, Any]]], str]], metric: str, over: str = "round"
) -> Figure:
    """Plot a test metric: one line per algorithm with the mean over seeds, and a band of one standard deviation.

    Args:
        lines: (label, one history per seed, name of the evaluated model) of every line.
        metric: name of the metric.
        over: horizontal axis, one of ``AXES``.
    """
    if over not in AXES:
        raise one_of("axis", over, AXES)
    if any(over not in entry for _, histories, _ in lines for history in histories for entry in history):
        raise UserError("some of these runs have no virtual time; set a clock, such as clock='lognormal'")
    has_many_lines = len(lines) > len(COLOURS)
    legend_columns = ceil(len(lines) / LEGEND_ROWS)
    size = (8.2, 4.8)
    if has_many_lines:  # the legend moves from the axes to their right
        size = (8.2 + 2.2 * legend_columns, max(4.8, 0.18 * ceil(len(lines) / legend_columns) + 0.4))
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    scale = 100 if is_share(metric) else 1
    styles, bounds, last_round = line_styles(label for label, _, _ in lines), [], 0
    for label, histories, model in lines:
        x, values = _align([series(history, model, metric, over) for history in histories])
        if not len(x):
            continue
        mean = values.mean(0) * scale
        std = values.std(0, ddof=1) * scale if len(values) > 1 else np.zeros(len(x))
        bounds += [mean - std, mean + std]
        last_round = max(last_round, round(x[-1]))
        legend_label = f"{label}   {mean[-1]:.1f}" if scale == 100 else label  # with the last value in per cent
        axes.plot(x, mean, **styles[label].line, markevery=marker_spacing(len(x)), lw=1.8, label=legend_label)
        axes.fill_between(x, mean - std, mean + std, color=styles[label].colour, alpha=0.15, lw=0)
    hidden_fraction = HIDDEN_FRACTION if has_many_lines else 0.0
    note = limit_to_late(axes, bounds, lower_is_better=not is_share(metric), hidden_fraction=hidden_fraction)
    axes.set_xlabel(AXES[over] + note)
    if over == "round" and last_round:
        label_rounds(axes, last_round)
    axes.set_ylabel(metric_label(metric))
    open_frame(axes)
    has_bands = any(len(histories) > 1 for _, histories, _ in lines)
    options: dict[str, Any] = {"frameon": False, "title_fontsize": 8}
    explanations = ["mean over seeds, band: ± standard deviation"] if has_bands else []
    explanations += ["number: last value in per cent"] if scale == 100 else []
    options["title"] = "\n".join(explanations) or None
    if has_many_lines:  # sort the legend by the last value of each line
        handles = sorted(axes.lines, key=lambda line: float(np.asarray(line.get_ydata())[-1]), reverse=True)
        figure.legend(handles=handles, fontsize=8, loc="outside right center", ncols=legend_columns, **options)
    else:
        axes.legend(fontsize=9, loc="lower right" if is_share(metric) else "upper right", **options)
    return figure


def _align(curves_of_seeds: Sequence[list[tuple[float, float]]]) -> tuple[np.ndarray, np.ndarray]:
    """Combine the curves of several seeds point by point: their first points, their second points, and so on.

    Args:
        curves_of_seeds: the points (x, value) of each seed. Seeds without points are dropped, and longer curves are cut
            to the length of the shortest.

    Returns:
        The mean x over seeds of every point, [points], and the values, [seeds, points].
    """
    evaluated = [points for points in curves_of_seeds if points]
    if not evaluated:
        return np.zeros(0), np.zeros((0, 0))
    count = min(map(len, evaluated))
    stacked = np.array([points[:count] for points in evaluated])
    return stacked[:, :, 0].mean(0), stacked[:, :, 1]
