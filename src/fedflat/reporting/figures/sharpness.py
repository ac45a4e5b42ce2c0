"""Figure of sharpness over the radius."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from fedflat.reporting.figures.style import (
    add_outer_legend,
    described_labels,
    line_styles,
    open_frame,
    scale_logarithmically,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from fedflat.flatness import Sharpness

TICK_SPACING = 1 / 8
"""Smallest distance of labelled radii, as a fraction of the axis."""


def sharpness_picture(
    models: Mapping[str, Mapping[tuple[str, float], Sequence[Sharpness]]],
    descriptions: Mapping[str, str] | None = None,
) -> Figure:
    """Plot the rise of the loss over the radius rho, with one panel per kind and one line per model.

    Lines show means over the subsets of the examples.

    Args:
        models: for each name, by kind and radius, the model's sharpness on each subset of the examples.
        descriptions: for each name, what the model is, e.g. ``server model, seed 0, round 60``; default: none.
    """
    kinds = list(dict.fromkeys(kind for results in models.values() for kind, _ in results))
    styles = line_styles(models)
    labels, shared_description = described_labels(models, descriptions or {})
    figure = Figure(figsize=(max(4.2 * len(kinds), 6.4), 3.6), layout="constrained")
    for axes, kind in zip(figure.subplots(1, len(kinds), squeeze=False)[0], kinds, strict=True):
        for name, results in models.items():
            radii = sorted(radius for other_kind, radius in results if other_kind == kind)
            rises = [fmean(result.value for result in results[kind, radius]) for radius in radii]
            axes.plot(radii, rises, **styles[name].line, lw=1.6, label=labels[name])
        axes.set_title(kind, loc="left", fontsize=11)
        scale_rises(axes)
        open_frame(axes)
    add_outer_legend(figure, handles=figure.axes[0].lines, title=shared_description)
    return figure


def scale_rises(axes: Axes) -> None:
    """Label the axes of lines of sharpness over the radius, and make both logarithmic.

    Rises that are not positive are omitted, and a note above the panel states how many. If no rise is positive, the
    vertical axis is linear.
    """
    radii = np.unique(np.concatenate([line.get_xdata() for line in axes.lines]))
    rises = np.concatenate([np.asarray(line.get_ydata(), dtype=float) for line in axes.lines])
    axes.set_xscale("log")
    ticks = [radii[0]]
    for radius in radii:
        if np.log(radius / ticks[-1]) >= TICK_SPACING * np.log(radii[-1] / radii[0]) > 0:
            ticks.append(radius)
    axes.set_xticks(ticks, [f"{radius:g}" for radius in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("radius rho (log scale)")
    if not (rises > 0).any():
        axes.set_ylabel("rise of the loss")
        return
    scale_logarithmically(axes, nonpositive="mask")
    axes.set_ylabel("rise of the loss (log scale)")
    if omitted := int((rises <= 0).sum()):
        axes.set_title(f"{omitted} of {len(rises)} values ≤ 0 omitted", loc="right", fontsize=8)
