"""Figure of a partition: stacked class counts per client, or a heat map for many classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.colors import PowerNorm, to_rgb
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from fedflat.data.partitioners.partitioner import IntArray

COLOURS = ("#4e79a7", "#f28e2b", "#e15759", "#76b7b2", "#59a14f", "#edc948", "#b07aa1", "#ff9da7", "#9c755f", "#bab0ac")
"""Colours of classes (Tableau 10); further classes use lighter versions."""
MOST_COLOURS = 2 * len(COLOURS)
MOST_CLIENTS = 200
"""Maximum number of clients shown; more are subsampled evenly."""
LETTERS = 120
"""Characters per legend line."""


def partition_picture(histogram: IntArray | Sequence[Sequence[int]], classes: Sequence[str], title: str) -> Figure:
    """The class counts [clients, classes] as one figure."""
    return partition_pictures({title: histogram}, classes)


def partition_pictures(histograms: Mapping[str, IntArray | Sequence[Sequence[int]]], classes: Sequence[str]) -> Figure:
    """Several partitions of one dataset, one panel each."""
    rows = len(histograms)
    few = len(classes) <= MOST_COLOURS
    height = 3.4 if rows == 1 else 1.75 * rows + 0.9
    figure = Figure(
        figsize=(9.0, height if few else 1.6 * height), layout=ConstrainedLayoutEngine(h_pad=0.08, hspace=0.04)
    )
    for axes, (title, histogram) in zip(figure.subplots(rows, squeeze=False)[:, 0], histograms.items(), strict=True):
        counts = np.asarray(histogram)
        shown = _ordered(counts)
        (_columns if few else _cells)(axes, shown, classes)
        axes.set_title(title if len(title) < 55 else f"{title}\n", loc="left", fontsize=10.5, fontweight="bold", pad=5)
        axes.set_title(_measured(counts, len(shown)), loc="right", fontsize=8.5, color="#666666", pad=5)
        axes.tick_params(labelsize=8, length=0, colors="#555555")
        axes.set_xlim(-0.5, len(shown) - 0.5)
        axes.set_xticks([])
        axes.spines[:].set_visible(False)
    axes.set_xlabel("clients, sorted by most frequent class", fontsize=9, color="#333333")
    if few:
        _legend(figure, classes)
    return figure


def _ordered(counts: IntArray) -> IntArray:
    """Clients sorted by their most frequent class, subsampled if there are too many."""
    share = counts.max(1) / counts.sum(1)
    ordered = counts[np.lexsort((-share, counts.argmax(1)))]
    shown: IntArray = ordered[np.linspace(0, len(ordered) - 1, min(len(ordered), MOST_CLIENTS)).round().astype(int)]
    return shown


def _measured(counts: IntArray, shown: int) -> str:
    clients, per_client = len(counts), np.count_nonzero(counts, axis=1).mean()
    which = f"{clients} clients" if shown == clients else f"{shown} of {clients} clients"
    sizes = counts.sum(1)
    size = f"{sizes.min()}" if sizes.min() == sizes.max() else f"{sizes.min()} to {sizes.max()}"
    return f"{which}, {size} examples each, {per_client:.1f} classes per client"


def _columns(axes: Axes, counts: IntArray, classes: Sequence[str]) -> None:
    """One column per client, its classes stacked in colours."""
    most = counts.argmax(1)
    first = counts.max(1)
    axes.bar(
        np.arange(len(counts)), first, width=0.86, color=[_colours(len(classes))[label] for label in most], linewidth=0
    )
    for label, colour in enumerate(_colours(len(classes))):
        held = np.where(most == label, 0, counts[:, label])
        axes.bar(np.arange(len(counts)), held, bottom=first, width=0.86, color=colour, linewidth=0)
        first = first + held
    axes.set_ylim(0, 1.01 * first.max())
    axes.set_ylabel("examples", fontsize=9, color="#333333")
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=True, steps=[1, 2.5, 5, 10]))
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)


def _cells(axes: Axes, counts: IntArray, classes: Sequence[str]) -> None:
    """A heat map of square roots of counts, so that single examples stay visible."""
    norm = PowerNorm(0.5, vmin=0, vmax=max(int(counts.max()), 1))
    image = axes.imshow(counts.T, aspect="auto", cmap="Blues", interpolation="nearest", norm=norm, origin="upper")
    every = max(1, 10 ** (len(str(len(classes) - 1)) - 1))
    axes.set_yticks(range(0, len(classes), every), classes[::every])
    scale = axes.figure.colorbar(image, ax=axes, pad=0.01, aspect=40, ticks=MaxNLocator(4, integer=True))
    scale.ax.tick_params(labelsize=8, length=0, colors="#555555")
    scale.outline.set_visible(False)
    scale.set_label("examples", fontsize=9, color="#333333")


def _legend(figure: Figure, classes: Sequence[str]) -> None:
    patches = [Patch(color=colour, label=name) for name, colour in zip(classes, _colours(len(classes)), strict=True)]
    lines = -(-sum(len(name) + 4 for name in classes) // LETTERS)
    figure.legend(
        handles=patches,
        loc="outside lower center",
        ncols=-(-len(classes) // lines),
        frameon=False,
        fontsize=8.5,
        handlelength=0.9,
        columnspacing=1.2,
    )


def _colours(count: int) -> list[tuple[float, float, float]]:
    """The first ``count`` colours of the palette, followed by a lighter version of each."""
    palette = [to_rgb(colour) for colour in COLOURS]
    lighter = [(0.45 * r + 0.55, 0.45 * g + 0.55, 0.45 * b + 0.55) for r, g, b in palette]
    return (palette + lighter)[:count]
