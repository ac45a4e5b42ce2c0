"""Curves of a metric over rounds or cost, with one band per algorithm."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from fedflat.errors import one_of
from fedflat.reporting.tables.summary import series
from fedflat.units import is_share

OVER = {
    "round": "communication round",
    "backward_passes": "backward passes",
    "bytes_up": "bytes sent by clients",
    "bytes_down": "bytes sent to clients",
    "samples": "samples processed",
}
EARLY = 0.2
"""Fraction of a run whose values may lie below the visible range."""
LEFT_OUT = 0.15
"""The same fraction with more lines than colours; the legend shows final values."""
STYLES = ("-", "--", ":", "-.")
"""Line styles, used after all colours."""
COLOURS = ("#1b6ca8", "#d1495b", "#edae49", "#00798c", "#7b4b94", "#66a182", "#8d6a4f", "#333333", "#e07be0", "#9aa0a6")


def curves(
    lines: Sequence[tuple[str, Sequence[list[dict[str, Any]]], str]], metric: str, over: str = "round"
) -> Figure:
    """A figure with one line per (label, histories by seed, model): mean and standard deviation over seeds."""
    if over not in OVER:
        raise one_of("axis", over, OVER)
    many = len(lines) > len(COLOURS)
    figure = Figure(figsize=_size(len(lines)) if many else (8.2, 4.8), layout="constrained")
    axes = figure.subplots()
    scale = 100 if is_share(metric) else 1
    early, highest = [], 0.0
    for index, (label, histories, model) in enumerate(lines):
        grid, values = _aligned([series(history, model, metric, over) for history in histories])
        if not len(grid):
            continue
        mean, std = values.mean(0) * scale, values.std(0, ddof=1) * scale if len(values) > 1 else np.zeros(len(grid))
        early.append(mean[int(EARLY * len(mean))])
        highest = max(highest, float((mean + std).max()))
        colour, style = COLOURS[index % len(COLOURS)], STYLES[index // len(COLOURS) % len(STYLES)]
        axes.plot(grid, mean, style, color=colour, lw=1.8, label=f"{label}   {mean[-1]:.1f}" if scale == 100 else label)
        axes.fill_between(grid, mean - std, mean + std, color=colour, alpha=0.15, lw=0)
    lowest = np.quantile(early, LEFT_OUT if many else 0) if early else highest
    if is_share(metric) and highest > lowest:
        # The steep first rounds look alike for all methods, so the axis favours later ones.
        room = 0.05 * (highest - lowest)
        axes.set_ylim(lowest - 2 * room, highest + room)
    axes.set_xlabel(OVER[over])
    axes.set_ylabel(f"test {metric}" + (" (%)" if scale == 100 else ""))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if many:
        from_above = sorted(axes.lines, key=lambda line: float(np.asarray(line.get_ydata())[-1]), reverse=True)
        figure.legend(
            handles=from_above, frameon=False, fontsize=8, loc="outside right center", ncols=_columns(len(lines))
        )
    else:
        axes.legend(frameon=False, fontsize=9, loc="lower right" if is_share(metric) else "upper right")
    return figure


def _columns(lines: int) -> int:
    """Number of legend columns."""
    return ceil(lines / 40)


def _size(lines: int) -> tuple[float, float]:
    """Figure size in inches with a legend beside the axes."""
    columns = _columns(lines)
    return 8.2 + 2.2 * columns, max(4.8, 0.18 * ceil(lines / columns) + 0.4)


def _aligned(seeds: Sequence[list[tuple[float, float]]]) -> tuple[np.ndarray, np.ndarray]:
    """Values of all seeds at their common points, matched by position."""
    filled = [points for points in seeds if points]
    if not filled:
        return np.zeros(0), np.zeros((0, 0))
    count = min(len(points) for points in filled)
    grid = np.array([[x for x, _ in points[:count]] for points in filled]).mean(0)
    return grid, np.array([[value for _, value in points[:count]] for points in filled])
