"""Figures of landscapes: contours, surfaces, planes, lines and paths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from fedflat.reporting.figures.landscape_scale import (
    AXIS_TITLES,
    BASIN,
    NOT_FINITE,
    LandscapeScale,
    common_line,
    grid_of,
    shown_line,
    shown_tick,
    shown_value,
    values_to_plot,
)
from fedflat.reporting.figures.style import LineStyle, line_styles, marker_spacing, open_frame, subplot_list

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, FAINT, ACCENT = "#22303c", "#6b7580", "#d1495b"
PER_ROW = 4
COLOUR_MAP = LinearSegmentedColormap.from_list("basin", list(BASIN)).with_extremes(bad=NOT_FINITE)


@dataclass(frozen=True)
class Panel:
    """A landscape with its title and caption."""

    title: str
    """Title of the panel."""
    landscape: Landscape
    """The landscape to draw."""
    caption: str = ""
    """Text shown below the panel, e.g. lambda_max of the model; may be empty."""


def panels_of(landscapes: Mapping[str, Landscape], value: str) -> list[Panel]:
    """Return a panel for each landscape that has this value, with the description of its model as caption."""
    return [
        Panel(name, landscape, landscape.metadata.get("described", ""))
        for name, landscape in landscapes.items()
        if value in landscape.values
    ]


def landscape_picture(landscape: Landscape, value: str | None = None) -> Figure:
    """Draw one landscape in the figure of its kind: contours, lines, a plane or a path.

    Args:
        landscape: the landscape.
        value: name of the value to draw; default: the loss and, on planes and paths, also the error.
    """
    if landscape.kind == "around":
        panels = [Panel(landscape.marks[0].name if landscape.marks else "", landscape)]
        return contours(panels, value) if landscape.dimensions == 2 else lines(panels, value)
    draw = plane_picture if landscape.kind == "plane" else path_picture
    return draw(landscape, [value] if value else ())


def contours(
    panels: Sequence[Panel],
    value: str | None = None,
    title: str = "",
    styles: Mapping[str, LineStyle] | None = None,
) -> Figure:
    """Draw the contours of landscapes side by side, with common levels.

    A bold contour marks the same value in all panels, so that their flat regions can be compared.

    Args:
        panels: two-dimensional landscapes.
        value: name of the value to draw; default: the training loss, or the only loss.
        title: title above all panels.
        styles: colours and markers by the titles of the panels; default: chosen by the titles.
    """
    _check_dimensions(panels, 2)
    scale = _common_scale(panels, value)
    line = common_line([panel.landscape for panel in panels], scale)
    figure, grid = _panel_axes(len(panels), width=3.15, height=3.6, has_shared_bar=True)
    styles = line_styles(panel.title for panel in panels) | dict(styles or {})
    for index, (axes, panel) in enumerate(zip(grid, panels, strict=True)):
        draw_contours(axes, panel.landscape, scale, line)
        draw_marks(axes, panel.landscape.marks, styles[panel.title])
        _add_titles(axes, panel)
        _add_axis_titles(axes, panel.landscape, panel.caption, is_leftmost=index % PER_ROW == 0)
    _add_colour_bar(figure, grid, scale, line)
    _add_caption(figure, title, "; ".join(filter(None, (shown_line(line, scale), scale.notes))))
    return figure


def draw_contours(axes: Axes, landscape: Landscape, scale: LandscapeScale, line: float | None = None) -> None:
    """Draw filled contours of one landscape; non-finite values are grey.

    Args:
        axes: where to draw.
        landscape: a two-dimensional landscape.
        scale: levels and colours.
        line: value of the bold contour; None for no such contour.
    """
    xs, ys = (np.array(axis) for axis in landscape.axes)
    values = np.ma.masked_invalid(scale.clipped(grid_of(landscape, scale.value))).T  # matplotlib expects [y, x]
    axes.set_facecolor(NOT_FINITE)
    norm = LogNorm(scale.low, scale.high)
    shades = np.geomspace(scale.low, scale.high, 6 * (len(scale.levels) - 1) + 1)  # six shades per level
    shades[0], shades[-1] = scale.low * (1 - 1e-9), scale.high * (1 + 1e-9)  # include both ends despite rounding
    axes.contourf(xs, ys, values, levels=shades, norm=norm, cmap=COLOUR_MAP, antialiased=False)
    if values.min() < values.max():
        axes.contour(xs, ys, values, levels=scale.levels[1:-1], colors="white", linewidths=0.5, alpha=0.65)
        if line is not None and values.min() < line < values.max():
            axes.contour(xs, ys, values, levels=[line], colors=INK, linewidths=1.5)
    axes.set_aspect("equal", adjustable="box")
    axes.tick_params(labelsize=8, length=2.5, color=FAINT, labelcolor=FAINT, width=0.6)
    axes.locator_params(nbins=5)
    axes.spines[:].set_visible(False)


def draw_marks(
    axes: Axes, marks: Sequence[Mark], single_style: LineStyle | None = None, heights: Sequence[float] = ()
) -> None:
    """Mark the models in the colours and with the markers of their algorithms, labelled for a legend.

    Args:
        axes: where to draw.
        marks: the models.
        single_style: style of the model if there is only one; otherwise, or if None, names determine the styles.
        heights: the third coordinate of each mark, on a surface.
    """
    styles = line_styles(mark.name for mark in marks)
    for index, mark in enumerate(marks):
        style = single_style if single_style is not None and len(marks) == 1 else styles[mark.name]
        label = f"{mark.name} ({mark.distance:.2g} from the plane)" if mark.distance > 0 else mark.name
        edge: dict[str, Any] = {"markeredgecolor": "white", "markeredgewidth": 1.2, "linestyle": "none"}
        coordinates = [[coordinate] for coordinate in (*mark.position, *heights[index : index + 1])]
        axes.plot(*coordinates, marker=style.marker, zorder=5, label=label, color=style.colour, markersize=9, **edge)


def plane_picture(landscape: Landscape, values: Sequence[str] = (), title: str = "") -> Figure:
    """Draw the plane through three models, with one panel per value, each on its own scale.

    Args:
        landscape: the plane; its coordinates are distances in weight space.
        values: names of the values to draw; default: the training loss and the test metric, if they were measured.
        title: title above all panels.
    """
    values = values or values_to_plot(landscape)
    _check_dimensions([Panel("", landscape)], 2)
    width, height = (axis[-1] - axis[0] for axis in landscape.axes)
    ratio = width / height
    panel_width = 3.6 * min(max(ratio, 0.75), 1.5) + 0.9  # with a colour bar
    figure, grid = _panel_axes(len(values), width=panel_width, height=4.1)
    for axes, value in zip(grid, values, strict=True):
        scale = LandscapeScale.over([landscape], value)
        draw_contours(axes, landscape, scale)
        # Equal aspect unless the panel would become too narrow.
        axes.set_aspect("equal" if 1 / 3 < ratio < 3 else "auto")
        draw_marks(axes, landscape.marks)
        axes.set_title(shown_value(value), loc="left", fontsize=11, fontweight="bold", color=INK, pad=8)
        _add_axis_titles(axes, landscape, scale.notes, is_leftmost=value == values[0])
        _add_colour_bar(figure, axes, scale)
    handles, labels = grid[0].get_legend_handles_labels()
    columns = min(len(labels), 4)
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=9, labelcolor=INK)
    _add_caption(figure, title)
    return figure


def surfaces(panels: Sequence[Panel], value: str | None = None, title: str = "") -> Figure:
    """Draw landscapes as surfaces side by side; height and colour show the logarithm of the value.

    Args:
        panels: two-dimensional landscapes.
        value: name of the value to draw; default: the training loss, or the only loss.
        title: title above all panels.
    """
    _check_dimensions(panels, 2)
    scale = _common_scale(panels, value)
    projection = {"projection": "3d"}
    figure, grid = _panel_axes(len(panels), width=3.3, height=3.4, has_shared_bar=True, subplot_kw=projection)
    for axes, panel in zip(grid, panels, strict=True):
        draw_surface(axes, panel.landscape, scale)
        _add_titles(axes, panel)
        _add_caption_3d(axes, panel.caption)
    marked = next((panel.landscape.marks for panel in panels if panel.landscape.kind == "plane"), ())
    if marked:
        options: dict[str, Any] = {"ncols": 2, "frameon": False, "fontsize": 8, "labelcolor": INK}
        figure.legend(*grid[0].get_legend_handles_labels(), loc="outside upper left", **options)  # notes are below
    _add_colour_bar(figure, grid, scale)
    _add_caption(figure, title, scale.notes)
    return figure


def draw_surface(axes: Any, landscape: Landscape, scale: LandscapeScale) -> None:
    """Draw one landscape as a surface without a frame; the height is the logarithm of the value.

    The models of a plane are marked on the surface. Around a model, the centre is the model.
    """
    xs, ys = np.meshgrid(*landscape.axes, indexing="ij")
    values = scale.clipped(grid_of(landscape, scale.value))
    height = np.log10(values)
    colours = COLOUR_MAP(LogNorm(scale.low, scale.high)(np.nan_to_num(values, nan=scale.high)))
    lines: dict[str, Any] = {"rcount": 120, "ccount": 120, "linewidth": 0.15, "edgecolor": (1, 1, 1, 0.35)}
    axes.plot_surface(xs, ys, height, facecolors=colours, shade=False, **lines)
    if landscape.kind == "plane":
        axes.computed_zorder = False  # otherwise the surface hides the marks
        heights = [
            np.log10(np.clip(landscape.at(scale.value, *mark.position), scale.low, scale.high))
            for mark in landscape.marks
        ]
        draw_marks(axes, landscape.marks, heights=heights)
    axes.set_zlim(np.log10(scale.low), np.log10(scale.high))
    axes.set_box_aspect((1, 1, 0.72), zoom=1.28)
    axes.view_init(elev=28, azim=-52)
    axes.set_axis_off()


def lines(panels: Sequence[Panel], value: str | None = None, title: str = "") -> Figure:
    """Draw one-dimensional landscapes as lines in one panel.

    Args:
        panels: one-dimensional landscapes.
        value: name of the value to draw; default: the training loss, or the only loss.
        title: title above the panel.
    """
    _check_dimensions(panels, 1)
    scale = _common_scale(panels, value)
    value = scale.value  # the default if none was given
    figure = Figure(figsize=(7.2, 4.4), layout="constrained")
    axes = figure.subplots()
    styles = line_styles(panel.title for panel in panels)
    for panel in panels:
        label = "   ".join([panel.title, *panel.caption.splitlines()])
        values = _finite(grid_of(panel.landscape, value))
        spacing = marker_spacing(len(values))
        axes.plot(panel.landscape.axes[0], values, **styles[panel.title].line, markevery=spacing, lw=1.9, label=label)
    _style_axes(axes)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(NullLocator())  # removes the default ticks
    axes.set_yticks(scale.ticks, [shown_tick(tick, value) for tick in scale.ticks])
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("distance along the direction, in filter norms", color=INK)
    axes.set_ylabel(shown_value(value), color=INK)
    axes.legend(frameon=False, fontsize=9)
    omitted = f"{scale.not_finite} of {scale.total} values are not finite and omitted" if scale.not_finite else ""
    _add_caption(figure, title, omitted)
    return figure


def path_picture(landscape: Landscape, values: Sequence[str] = (), title: str = "") -> Figure:
    """Plot values along the path between two models, with one panel per value and an arrow at the barrier.

    Args:
        landscape: the path, from the first model (0) to the second (1).
        values: names of the values to plot; default: the training loss and the test metric, if they were measured.
        title: title above all panels.
    """
    values = values or values_to_plot(landscape)
    _check_dimensions([Panel("", landscape)], 1)
    figure = Figure(figsize=(4.4 * len(values), 3.6), layout="constrained")
    t, styles = np.array(landscape.axes[0]), line_styles(mark.name for mark in landscape.marks)
    for axes, value in zip(figure.subplots(1, len(values), squeeze=False)[0], values, strict=True):
        along_path = _finite(grid_of(landscape, value))
        ends = np.interp([0, 1], t, along_path)
        axes.plot([0, 1], ends, color=FAINT, lw=1, ls=(0, (4, 3)))  # dashed: the line between the ends
        axes.plot(t, along_path, color=INK, lw=2)
        for mark, x, y in zip(landscape.marks, (0, 1), ends, strict=True):
            style = styles[mark.name]
            axes.plot([x], [y], style.marker, color=style.colour, markeredgecolor="white", markersize=8)
        highest = barrier(landscape.axes[0], grid_of(landscape, value))
        if np.isfinite(highest.height) and highest.height > 0:
            foot = ends[0] + highest.at * (ends[1] - ends[0])  # on the straight line between the ends
            arrow = {"arrowstyle": "<->", "color": ACCENT, "lw": 1.2}
            axes.annotate("", (highest.at, foot + highest.height), (highest.at, foot), arrowprops=arrow)
        axes.set_title(shown_value(value), loc="left", fontsize=11, fontweight="bold", color=INK)
        height = shown_tick(float(f"{highest.height:.2g}"), value)
        axes.set_title(f"barrier {height}", loc="right", fontsize=9.5, color=ACCENT)
        _style_axes(axes)
        ticks = axes.set_xticks([0, 0.5, 1], [landscape.marks[0].name, "half way", landscape.marks[1].name])
        for tick, side in zip(ticks, ("left", "center", "right"), strict=True):
            tick.label1.set_horizontalalignment(side)
        if value.endswith("error"):
            axes.yaxis.set_major_formatter(FuncFormatter(lambda tick, _: shown_tick(tick, "error")))
    _add_caption(figure, title)
    return figure


def _common_scale(panels: Sequence[Panel], value: str | None) -> LandscapeScale:
    """Return a scale for all panels and the value named ``value``; default: the training loss, or the only loss."""
    landscapes = [panel.landscape for panel in panels]
    return LandscapeScale.over(landscapes, value or values_to_plot(landscapes[0])[0])


def _finite(values: Any) -> Any:
    """Replace infinite values by NaN, which are not drawn."""
    return np.where(np.isfinite(values), values, np.nan)


def _check_dimensions(panels: Sequence[Panel], dimensions: int) -> None:
    """Raise a ``UserError`` if there are no panels, or if a landscape does not have this number of dimensions."""
    if not panels:
        raise UserError("no landscape to plot")
    for panel in panels:
        if panel.landscape.dimensions != dimensions:
            raise UserError(
                f"this figure needs {dimensions} dimensions, but {panel.title} has {panel.landscape.dimensions}"
            )


def _panel_axes(
    count: int, *, width: float, height: float, has_shared_bar: bool = False, **options: Any
) -> tuple[Figure, list[Any]]:
    """Create a figure with ``count`` panels; returns the figure and the panels' axes.

    Args:
        count: number of panels.
        width: width of a panel in inches.
        height: height of a panel in inches.
        has_shared_bar: whether to leave space for a colour bar beside all panels.
        options: further arguments of ``Figure.subplots``.
    """
    columns = min(count, PER_ROW)
    size = (width * columns + (0.7 if has_shared_bar else 0), height * ceil(count / columns))
    # More vertical padding than matplotlib's default, with which a figure's title would be cropped if it has a legend.
    figure = Figure(figsize=size, layout=ConstrainedLayoutEngine(h_pad=0.14))
    return figure, subplot_list(figure, count, columns, **options)


def _add_titles(axes: Any, panel: Panel) -> None:
    axes.set_title(panel.title, fontsize=12.5, fontweight="bold", color=INK, pad=2 if axes.name == "3d" else 8)


def _add_axis_titles(axes: Axes, landscape: Landscape, note: str, *, is_leftmost: bool) -> None:
    """Label the axes with their units, the vertical one in the leftmost panel, and add a note below the panel."""
    x_title, y_title = AXIS_TITLES[landscape.kind]
    axes.set_xlabel("\n".join(filter(None, (x_title, note))), fontsize=9, color=INK, labelpad=4)
    if is_leftmost:
        axes.set_ylabel(y_title, fontsize=9, color=INK)


def _add_caption_3d(axes: Any, caption: str) -> None:
    """Place the caption as text, because 3D axes without a frame hide their labels."""
    axes.text2D(0.5, 0.0, caption, transform=axes.transAxes, ha="center", fontsize=9.5, color=FAINT)


def _add_colour_bar(figure: Figure, axes: Any, scale: LandscapeScale, line: float | None = None) -> None:
    """Add a colour bar.

    Args:
        figure: the figure.
        axes: one panel, or a list of panels that share the bar, which is then labelled with the value's name.
        scale: levels and colours.
        line: value to mark on the bar, that of the bold contour; None for no mark.
    """
    is_shared = isinstance(axes, list)
    if is_shared:
        position = {"ax": axes, "fraction": 0.05, "pad": 0.015, "aspect": 24}
    else:
        position = {"cax": axes.inset_axes((1.03, 0, 0.035, 1))}
    shades = ScalarMappable(LogNorm(scale.low, scale.high), COLOUR_MAP)
    bar = figure.colorbar(shades, extend="max" if scale.cut_off else "neither", **position)
    bar.set_ticks(scale.ticks)
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda tick, _: shown_tick(tick, scale.value)))
    bar.ax.yaxis.set_minor_locator(NullLocator())
    bar.ax.tick_params(labelsize=8.5, length=0, colors=FAINT)
    bar.outline.set_visible(False)
    if line is not None:
        bar.ax.axhline(line, color=INK, lw=1.5)
    if is_shared:
        bar.set_label(shown_value(scale.value), fontsize=9.5, color=INK)


def _add_caption(figure: Figure, title: str, notes: str = "") -> None:
    """Add a title above and notes below the figure, unless they are empty."""
    if title:
        figure.suptitle(title, fontsize=13, fontweight="bold", color=INK, x=0.01, ha="left")
    if notes:
        figure.supxlabel(notes, fontsize=8, color=FAINT, x=0.01, ha="left")


def _style_axes(axes: Axes) -> None:
    open_frame(axes)
    axes.tick_params(colors=FAINT, labelsize=9)
