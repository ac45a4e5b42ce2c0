"""Figures of landscapes: contours, surfaces, planes, lines and paths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, LogNorm
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, NullLocator

from fedflat.errors import UserError
from fedflat.flatness.landscapes.grid import Landscape, Mark
from fedflat.flatness.landscapes.path import barrier
from fedflat.reporting.figures.curves import COLOURS
from fedflat.reporting.figures.landscape_scale import (
    BASIN,
    NOT_FINITE,
    LandscapeScale,
    common_line,
    grid_of,
    shown_tick,
    shown_value,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, FAINT, ACCENT = "#22303c", "#6b7580", "#d1495b"
PER_ROW = 4
SIGNS = tuple(
    zip(
        "osD^vP*X",
        ("#d1495b", "#edae49", "#7b4b94", "#22303c", "#ffffff", "#e07be0", "#8d6a4f", "#66a182"),
        strict=True,
    )
)
"""Marker and colour of each model on a plane."""
COLOUR_MAP = LinearSegmentedColormap.from_list("basin", list(BASIN)).with_extremes(bad=NOT_FINITE)


@dataclass(frozen=True)
class Panel:
    """A landscape with its title and caption."""

    title: str
    landscape: Landscape
    figures: str = ""


def contours(panels: Sequence[Panel], value: str = "train_loss", title: str = "") -> Figure:
    """Contours side by side with common levels; the bold line marks the same value in all panels."""
    _check(panels, 2)
    scale = LandscapeScale.over([panel.landscape for panel in panels], value)
    line = common_line([panel.landscape for panel in panels], scale)
    figure, grid = _panels(len(panels), 3.15, 3.6, bar=True)
    for axes, panel in zip(grid, panels, strict=False):
        draw_contours(axes, panel.landscape, scale, line)
        draw_marks(axes, panel.landscape.marks, alone=len(panel.landscape.marks) == 1)
        _titles(axes, panel)
    _colour_bar(figure, grid, scale, line)
    _caption(figure, title, scale.notes)
    return figure


def draw_contours(axes: Axes, landscape: Landscape, scale: LandscapeScale, line: float | None = None) -> None:
    """Filled contours of one landscape; non-finite values are grey."""
    xs, ys = (np.array(axis) for axis in landscape.axes)
    values = np.ma.masked_invalid(scale.clipped(grid_of(landscape, scale.value))).T
    axes.set_facecolor(NOT_FINITE)
    norm = LogNorm(scale.low, scale.high)
    steps = np.geomspace(scale.low, scale.high, 6 * (len(scale.levels) - 1) + 1)
    steps[0], steps[-1] = scale.low * (1 - 1e-9), scale.high * (1 + 1e-9)
    axes.contourf(xs, ys, values, levels=steps, norm=norm, cmap=COLOUR_MAP, antialiased=False)
    if values.min() < values.max():
        axes.contour(xs, ys, values, levels=scale.levels[1:-1], colors="white", linewidths=0.5, alpha=0.65)
        if line is not None and values.min() < line < values.max():
            axes.contour(xs, ys, values, levels=[line], colors=INK, linewidths=1.5)
    axes.set_aspect("equal", adjustable="box")
    axes.tick_params(labelsize=8, length=2.5, color=FAINT, labelcolor=FAINT, width=0.6)
    axes.locator_params(nbins=5)
    axes.spines[:].set_visible(False)


def draw_marks(axes: Axes, marks: Sequence[Mark], alone: bool = False) -> None:
    """Markers of the models; a single one is not labelled."""
    for number, mark in enumerate(marks):
        if alone:
            axes.plot(*mark.position, "+", color=ACCENT, markersize=8, markeredgewidth=1.5, zorder=5)
            continue
        words = f"{mark.name} ({mark.distance:.2g} from the plane)" if mark.distance > 0 else mark.name
        look: dict[str, Any] = {
            "color": SIGNS[number % len(SIGNS)][1],
            "markeredgecolor": "white",
            "markeredgewidth": 1.2,
            "markersize": 9,
        }
        axes.plot(*mark.position, SIGNS[number % len(SIGNS)][0], zorder=5, label=words, linestyle="none", **look)


def plane_picture(
    landscape: Landscape, values: Sequence[str] = ("train_loss", "test_error"), title: str = ""
) -> Figure:
    """The plane through three models, one panel and scale per value; distances equal weight distances."""
    _check([Panel("", landscape)], 2)
    figure, grid = _panels(len(values), 3.6 * min(max(_ratio(landscape), 0.75), 1.5) + 0.9, 4.1)
    for axes, value in zip(grid, values, strict=False):
        scale = LandscapeScale.over([landscape], value)
        draw_contours(axes, landscape, scale)
        # Equal aspect unless the panel would become too narrow.
        axes.set_aspect("equal" if 1 / 3 < _ratio(landscape) < 3 else "auto")
        draw_marks(axes, landscape.marks)
        axes.set_title(shown_value(value), loc="left", fontsize=11, fontweight="bold", color=INK, pad=8)
        if scale.notes:
            axes.set_xlabel(scale.notes, fontsize=7.5, color=FAINT)
        _colour_bar(figure, axes, scale)
    handles, labels = grid[0].get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=min(len(labels), 4),
        frameon=False,
        fontsize=9,
        labelcolor=INK,
    )
    _caption(figure, title)
    return figure


def surfaces(panels: Sequence[Panel], value: str = "train_loss", title: str = "") -> Figure:
    """Surfaces side by side; height and colour are the logarithm of the value."""
    _check(panels, 2)
    scale = LandscapeScale.over([panel.landscape for panel in panels], value)
    figure, grid = _panels(len(panels), 3.3, 3.4, bar=True, is_3d=True)
    for axes, panel in zip(grid, panels, strict=False):
        draw_surface(axes, panel.landscape, scale)
        _titles(axes, panel, below=True)
    _colour_bar(figure, grid, scale)
    _caption(figure, title, scale.notes)
    return figure


def draw_surface(axes: Any, landscape: Landscape, scale: LandscapeScale) -> None:
    """One landscape as a surface without a frame."""
    xs, ys = np.meshgrid(*landscape.axes, indexing="ij")
    values = scale.clipped(grid_of(landscape, scale.value))
    height = np.log10(values)
    colours = COLOUR_MAP(LogNorm(scale.low, scale.high)(np.nan_to_num(values, nan=scale.high)))
    axes.plot_surface(
        xs,
        ys,
        height,
        facecolors=colours,
        rcount=120,
        ccount=120,
        linewidth=0.15,
        edgecolor=(1, 1, 1, 0.35),
        shade=False,
    )
    axes.set_zlim(np.log10(scale.low), np.log10(scale.high))
    axes.set_box_aspect((1, 1, 0.72), zoom=1.28)
    axes.view_init(elev=28, azim=-52)
    axes.set_axis_off()


def lines(panels: Sequence[Panel], value: str = "train_loss", title: str = "") -> Figure:
    """One-dimensional landscapes in one panel."""
    _check(panels, 1)
    scale = LandscapeScale.over([panel.landscape for panel in panels], value)
    figure = Figure(figsize=(7.2, 4.4), layout="constrained")
    axes = figure.subplots()
    for number, panel in enumerate(panels):
        label = f"{panel.title}   {panel.figures}" if panel.figures else panel.title
        values = np.where(np.isfinite(grid_of(panel.landscape, value)), grid_of(panel.landscape, value), np.nan)
        axes.plot(panel.landscape.axes[0], values, color=COLOURS[number % len(COLOURS)], lw=1.9, label=label)
    _frame(axes)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(NullLocator())
    axes.set_yticks(scale.ticks, [shown_tick(tick, value) for tick in scale.ticks])
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("distance along the direction, in filter norms", color=INK)
    axes.set_ylabel(shown_value(value), color=INK)
    axes.legend(frameon=False, fontsize=9)
    _caption(
        figure,
        title,
        f"{scale.not_finite} of {scale.total} values are not finite and omitted" if scale.not_finite else "",
    )
    return figure


def path_picture(landscape: Landscape, values: Sequence[str] = ("train_loss", "test_error"), title: str = "") -> Figure:
    """Each value along a path, and its barrier."""
    _check([Panel("", landscape)], 1)
    figure = Figure(figsize=(4.4 * len(values), 3.6), layout="constrained")
    t = np.array(landscape.axes[0])
    for axes, value in zip(figure.subplots(1, len(values), squeeze=False)[0], values, strict=True):
        found = np.where(np.isfinite(grid_of(landscape, value)), grid_of(landscape, value), np.nan)
        ends = np.interp([0, 1], t, found)
        axes.plot([0, 1], ends, color=FAINT, lw=1, ls=(0, (4, 3)))
        axes.plot(t, found, color=COLOURS[0], lw=2)
        axes.plot([0, 1], ends, "o", color=COLOURS[0], markeredgecolor="white", markersize=7)
        highest = barrier(landscape.axes[0], grid_of(landscape, value))
        if np.isfinite(highest.height) and highest.height > 0:
            foot = ends[0] + highest.at * (ends[1] - ends[0])
            axes.annotate(
                "",
                (highest.at, foot + highest.height),
                (highest.at, foot),
                arrowprops={"arrowstyle": "<->", "color": ACCENT, "lw": 1.2},
            )
        axes.set_title(shown_value(value), loc="left", fontsize=11, fontweight="bold", color=INK)
        height = shown_tick(float(f"{highest.height:.2g}"), value)
        axes.set_title(f"barrier {height}", loc="right", fontsize=9.5, color=ACCENT)
        _frame(axes)
        ends_and_middle = axes.set_xticks([0, 0.5, 1], [landscape.marks[0].name, "half way", landscape.marks[1].name])
        for tick, side in zip(ends_and_middle, ("left", "center", "right"), strict=True):
            tick.label1.set_horizontalalignment(side)
        if value.endswith("error"):
            axes.yaxis.set_major_formatter(FuncFormatter(lambda tick, _: shown_tick(tick, "error")))
    _caption(figure, title)
    return figure


def _check(panels: Sequence[Panel], dimensions: int) -> None:
    if not panels:
        raise UserError("no landscape to plot")
    for panel in panels:
        if panel.landscape.dimensions != dimensions:
            raise UserError(
                f"this figure needs {dimensions} dimensions, but {panel.title} has {panel.landscape.dimensions}"
            )


def _panels(
    count: int, width: float, height: float, bar: bool = False, is_3d: bool = False
) -> tuple[Figure, list[Any]]:
    columns = min(count, PER_ROW)
    rows = ceil(count / columns)
    # Extra room, so that titles above a legend are not cropped.
    figure = Figure(
        figsize=(width * columns + (0.7 if bar else 0), height * rows), layout=ConstrainedLayoutEngine(h_pad=0.14)
    )
    grid = list(figure.subplots(rows, columns, squeeze=False, subplot_kw={"projection": "3d"} if is_3d else {}).ravel())
    for spare in grid[count:]:
        spare.set_visible(False)
    return figure, grid[:count]


def _titles(axes: Any, panel: Panel, below: bool = False) -> None:
    axes.set_title(panel.title, fontsize=12.5, fontweight="bold", color=INK, pad=2 if below else 8)
    if not panel.figures:
        return
    if below:
        axes.text2D(0.5, 0.0, panel.figures, transform=axes.transAxes, ha="center", fontsize=9.5, color=FAINT)
    else:
        axes.set_xlabel(panel.figures, fontsize=10.5, color=INK, labelpad=6)


def _colour_bar(figure: Figure, beside: Any, scale: LandscapeScale, line: float | None = None) -> None:
    """A colour bar beside one panel, or a labelled one shared by several."""
    several = isinstance(beside, list)
    place = (
        {"ax": beside, "fraction": 0.05, "pad": 0.015, "aspect": 24}
        if several
        else {"cax": beside.inset_axes((1.03, 0, 0.035, 1))}
    )
    shades = ScalarMappable(LogNorm(scale.low, scale.high), COLOUR_MAP)
    bar = figure.colorbar(shades, extend="max" if scale.cut_off else "neither", **place)
    bar.set_ticks(scale.ticks)
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda tick, _: shown_tick(tick, scale.value)))
    bar.ax.yaxis.set_minor_locator(NullLocator())
    bar.ax.tick_params(labelsize=8.5, length=0, colors=FAINT)
    bar.outline.set_visible(False)
    if line is not None:
        bar.ax.axhline(line, color=INK, lw=1.5)
    if several:
        bar.set_label(shown_value(scale.value), fontsize=9.5, color=INK)


def _caption(figure: Figure, title: str, notes: str = "") -> None:
    if title:
        figure.suptitle(title, fontsize=13, fontweight="bold", color=INK, x=0.01, ha="left")
    if notes:
        figure.supxlabel(notes, fontsize=8, color=FAINT, x=0.01, ha="left")


def _frame(axes: Axes) -> None:
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=FAINT, labelsize=9)


def _ratio(landscape: Landscape) -> float:
    """Aspect ratio of a plane."""
    width, height = (axis[-1] - axis[0] for axis in landscape.axes)
    return width / height
