"""Figure of a partition: stacked class counts per client, or a heat map for many classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.colors import PowerNorm, to_rgb
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from fedflat.reporting.figures.style import sort_and_subsample_clients, subplot_list
from fedflat.reporting.tables.summary import shown_range

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from fedflat.data.partitioners.partitioner import IntArray

COLOURS = ("#4e79a7", "#f28e2b", "#e15759", "#76b7b2", "#59a14f", "#edc948", "#b07aa1", "#ff9da7", "#9c755f", "#bab0ac")
"""Colours of classes (Tableau 10); further classes use lighter versions."""
MAX_COLOURED_CLASSES = 2 * len(COLOURS)
"""Number of classes up to which clients are stacked columns; more classes make a heat map."""
MAX_CLIENTS = 200
"""Maximum number of clients shown; more are subsampled evenly."""
LEGEND_CHARACTERS = 120
"""Characters per legend line."""


def partition_picture(histogram: IntArray | Sequence[Sequence[int]], classes: Sequence[str], title: str) -> Figure:
    """Draw one partition, given the examples per client and class, [clients, classes], and the names of the classes."""
    return partition_pictures({title: histogram}, classes)


def partition_pictures(histograms: Mapping[str, IntArray | Sequence[Sequence[int]]], classes: Sequence[str]) -> Figure:
    """Draw several partitions of one dataset, one panel each.

    Args:
        histograms: examples per client and class, [clients, classes], by title.
        classes: names of the classes.
    """
    rows = len(histograms)
    stacked = len(classes) <= MAX_COLOURED_CLASSES
    height = 3.4 if rows == 1 else 1.75 * rows + 0.9
    layout = ConstrainedLayoutEngine(h_pad=0.08, hspace=0.04)
    figure = Figure(figsize=(9.0, height if stacked else 1.6 * height), layout=layout)
    for axes, (title, histogram) in zip(subplot_list(figure, rows, columns=1), histograms.items(), strict=True):
        counts = np.asarray(histogram)
        shown = sort_and_subsample_clients(counts, MAX_CLIENTS)
        if stacked:
            _draw_columns(axes, shown, classes)
        else:
            _draw_heat_map(axes, shown, classes)
        # A long title gets its own line, above the caption on the right.
        axes.set_title(title if len(title) < 55 else f"{title}\n", loc="left", fontsize=10.5, fontweight="bold", pad=5)
        axes.set_title(_caption(counts, len(shown)), loc="right", fontsize=8.5, color="#666666", pad=5)
        axes.tick_params(labelsize=8, length=0, colors="#555555")
        axes.set_xlim(-0.5, len(shown) - 0.5)
        axes.set_xticks([])
        axes.spines[:].set_visible(False)
    order = ", sorted by most frequent class" if len(classes) > 1 else ""  # regression has no classes
    axes.set_xlabel(f"clients{order}", fontsize=9, color="#333333")
    if stacked and len(classes) > 1:
        _add_legend(figure, classes)
    return figure


def _caption(counts: IntArray, shown: int) -> str:
    """Describe the number of clients, their examples and their classes.

    Args:
        counts: examples per client and class, [clients, classes].
        shown: number of clients that are drawn, which is smaller than their number if they were subsampled.
    """
    clients = f"{len(counts)} clients" if shown == len(counts) else f"{shown} of {len(counts)} clients"
    classes = np.count_nonzero(counts, axis=1).mean()
    caption = f"{clients}, {shown_range(counts.sum(1))} examples each"
    return f"{caption}, {classes:.1f} classes per client" if counts.shape[1] > 1 else caption


def _draw_columns(axes: Axes, counts: IntArray, classes: Sequence[str]) -> None:
    """Draw one column per client with stacked classes, its most frequent class at the bottom.

    ``counts`` holds the examples per client and class, [clients, classes].
    """
    x, colours = np.arange(len(counts)), _class_colours(len(classes))
    most_frequent, height = counts.argmax(1), counts.max(1)
    axes.bar(x, height, width=0.86, color=[colours[label] for label in most_frequent], linewidth=0)
    for label, colour in enumerate(colours):
        examples = np.where(most_frequent == label, 0, counts[:, label])  # the most frequent class is drawn already
        axes.bar(x, examples, bottom=height, width=0.86, color=colour, linewidth=0)
        height = height + examples
    axes.set_ylim(0, 1.01 * height.max())
    axes.set_ylabel("examples", fontsize=9, color="#333333")
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=True, steps=[1, 2.5, 5, 10]))
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)


def _draw_heat_map(axes: Axes, counts: IntArray, classes: Sequence[str]) -> None:
    """Draw a heat map of ``counts`` [clients, classes], shaded by their square roots: single examples stay visible."""
    norm = PowerNorm(0.5, vmin=0, vmax=max(int(counts.max()), 1))
    image = axes.imshow(counts.T, aspect="auto", cmap="Blues", interpolation="nearest", norm=norm, origin="upper")
    tick_step = 10 ** (len(str(len(classes) - 1)) - 1)  # 10 for up to 100 classes, 100 for up to 1000
    axes.set_yticks(range(0, len(classes), tick_step), classes[::tick_step])
    scale = axes.figure.colorbar(image, ax=axes, pad=0.01, aspect=40, ticks=MaxNLocator(4, integer=True))
    scale.ax.tick_params(labelsize=8, length=0, colors="#555555")
    scale.outline.set_visible(False)
    scale.set_label("examples", fontsize=9, color="#333333")


def _add_legend(figure: Figure, classes: Sequence[str]) -> None:
    """Add a legend of classes below the figure, on as many lines as their names need."""
    colours = _class_colours(len(classes))
    lines = ceil(sum(len(name) + 4 for name in classes) / LEGEND_CHARACTERS)
    figure.legend(
        handles=[Patch(color=colour, label=name) for name, colour in zip(classes, colours, strict=True)],
        loc="outside lower center",
        ncols=ceil(len(classes) / lines),
        frameon=False,
        fontsize=8.5,
        handlelength=0.9,
        columnspacing=1.2,
    )


def _class_colours(count: int) -> list[tuple[float, float, float]]:
    """Return ``count`` colours: first those of the palette, then a lighter version of each."""
    palette = [to_rgb(colour) for colour in COLOURS]
    lighter = [(0.45 * red + 0.55, 0.45 * green + 0.55, 0.45 * blue + 0.55) for red, green, blue in palette]
    return (palette + lighter)[:count]
