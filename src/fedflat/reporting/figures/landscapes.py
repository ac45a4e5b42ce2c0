"""Figures of landscapes: contours, surfaces, planes, lines and paths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from fedflat.display import shown_loss_or_error
from fedflat.errors import UserError
from fedflat.flatness.landscapes.grid import Landscape, Mark
from fedflat.flatness.landscapes.path import barrier
from fedflat.reporting.figures.landscape_panels import (
    ACCENT,
    COLOUR_MAP,
    FAINT,
    INK,
    PER_ROW,
    add_axis_titles,
    add_caption,
    add_caption_3d,
    add_colour_bar,
    add_models,
    add_titles,
    check_dimensions,
    common_scale,
    finite,
    panel_axes,
    style_axes,
    title_height,
)
from fedflat.reporting.figures.landscape_panels import Panel as Panel  # part of the public API
from fedflat.reporting.figures.landscape_scale import (
    LINE_TITLES,
    NOT_FINITE,
    LandscapeScale,
    common_line,
    grid_of,
    shown_line,
    shown_tick,
    shown_value,
    values_to_plot,
)
from fedflat.reporting.figures.style import LineStyle, add_legend, line_styles, marker_spacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROUNDING = 1e-9
"""Barriers below this fraction of the largest value are rounding errors, and drawn as 0."""


def landscape_picture(landscape: Landscape, value: str | None = None) -> Figure:
    """Draw one landscape in the figure of its kind: contours, lines, a plane or a path.

    Args:
        landscape: the landscape.
        value: name of the value to draw; default: the loss and, on planes and paths, also the error.
    """
    if landscape.kind == "around":
        name = landscape.marks[0].name if landscape.marks else ""
        panels = [Panel(name, landscape, landscape.metadata.get("described", ""))]
        return contours(panels, value) if landscape.dimensions == 2 else lines(panels, value)
    draw = plane_picture if landscape.kind == "plane" else path_picture
    return draw(landscape, [value] if value else ())


def contours(
    panels: Sequence[Panel],
    value: str | None = None,
    title: str = "",
    styles: Mapping[str, LineStyle] | None = None,
    level: float | None = None,
) -> Figure:
    """Draw the contours of landscapes side by side, with common levels.

    A bold contour marks the same value in all panels, so that their flat regions can be compared.

    Args:
        panels: two-dimensional landscapes.
        value: name of the value to draw; default: the training loss, or the only loss.
        title: title above all panels.
        styles: colours and markers by the names of models; default: chosen by the names.
        level: value of the bold contour; default: the lowest tick of the scale that is inside every panel.
    """
    check_dimensions(panels, 2)
    scale = common_scale(panels, value)
    line = common_line([panel.landscape for panel in panels], scale) if level is None else level
    if level is not None and not scale.low < level < scale.high:
        raise UserError(f"level={level:g} is outside the scale; expected {scale.low:.3g} to {scale.high:.3g}")
    figure, grid = panel_axes(len(panels), width=3.15, height=3.6 + title_height(panels), has_shared_bar=True)
    styles = panel_styles(panels, styles)
    for index, (axes, panel) in enumerate(zip(grid, panels, strict=True)):
        draw_contours(axes, panel.landscape, scale, line)
        draw_marks(axes, panel.landscape.marks, styles, panel.title, size=5)  # small: the bold contour may be near
        add_titles(axes, panel)
        add_axis_titles(axes, panel.landscape, panel.caption, is_leftmost=index % PER_ROW == 0)
    add_colour_bar(figure, grid, scale, line)
    add_caption(figure, title, "; ".join(filter(None, (shown_line(line, scale), scale.notes))))
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


def panel_styles(panels: Sequence[Panel], styles: Mapping[str, LineStyle] | None = None) -> dict[str, LineStyle]:
    """Return colours and markers by the names of all models: those in ``styles``, or else chosen by the names.

    The only model of a landscape is named by the title of its panel.
    """
    names = [
        panel.title if len(panel.landscape.marks) == 1 else mark.name
        for panel in panels
        for mark in panel.landscape.marks
    ]
    return line_styles(names) | dict(styles or {})


def draw_marks(
    axes: Axes,
    marks: Sequence[Mark],
    styles: Mapping[str, LineStyle],
    title: str = "",
    heights: Sequence[float] = (),
    size: float = 9,
) -> None:
    """Mark the models in the colours and with the markers of their algorithms, labelled for a legend.

    Args:
        axes: where to draw.
        marks: the models.
        styles: colours and markers by name.
        title: name of the model if there is only one; default: the name of its mark.
        heights: the third coordinate of each mark, on a surface.
        size: size of the markers in points.
    """
    for index, mark in enumerate(marks):
        style = styles[title if title and len(marks) == 1 else mark.name]
        label = f"{mark.name} ({mark.distance:.2g} from the plane)" if mark.distance > 0 else mark.name
        edge: dict[str, Any] = {"markeredgecolor": "white", "markeredgewidth": size / 7.5, "linestyle": "none"}
        coordinates = [[coordinate] for coordinate in (*mark.position, *heights[index : index + 1])]
        axes.plot(*coordinates, marker=style.marker, zorder=5, label=label, color=style.colour, markersize=size, **edge)


def plane_picture(landscape: Landscape, values: Sequence[str] = (), title: str = "") -> Figure:
    """Draw the plane through three models, with one panel per value, each on its own scale.

    Args:
        landscape: the plane; its coordinates are distances in weight space.
        values: names of the values to draw; default: the training loss and the test metric, if they were measured.
        title: title above all panels.
    """
    values = values or values_to_plot(landscape)
    check_dimensions([Panel("", landscape)], 2)
    width, height = (axis[-1] - axis[0] for axis in landscape.axes)
    ratio = width / height
    panel_width = 3.6 * min(max(ratio, 0.75), 1.5) + 0.9  # with a colour bar
    figure, grid = panel_axes(len(values), width=panel_width, height=3.9)
    styles = line_styles(mark.name for mark in landscape.marks)
    for axes, value in zip(grid, values, strict=True):
        scale = LandscapeScale.over([landscape], value)
        draw_contours(axes, landscape, scale)
        # Equal aspect unless the panel would become too narrow.
        axes.set_aspect("equal" if 1 / 3 < ratio < 3 else "auto")
        draw_marks(axes, landscape.marks, styles)
        axes.set_title(shown_value(value), loc="left", fontsize=11, fontweight="bold", color=INK, pad=8)
        add_axis_titles(axes, landscape, scale.notes.replace("; ", "\n"), is_leftmost=value == values[0])
        add_colour_bar(figure, axes, scale)
    add_models(figure, landscape, grid[0].lines, "outside lower left")
    add_caption(figure, title)
    return figure


def surfaces(
    panels: Sequence[Panel],
    value: str | None = None,
    title: str = "",
    styles: Mapping[str, LineStyle] | None = None,
) -> Figure:
    """Draw landscapes as surfaces side by side; height and colour show the logarithm of the value.

    Args:
        panels: two-dimensional landscapes.
        value: name of the value to draw; default: the training loss, or the only loss.
        title: title above all panels.
        styles: colours and markers by the names of models; default: chosen by the names.
    """
    check_dimensions(panels, 2)
    scale, styles = common_scale(panels, value), panel_styles(panels, styles)
    projection = {"projection": "3d"}
    width = 4.6 if len(panels) == 1 and _is_plane(panels[0]) else 3.3  # wide enough for its legend
    figure, grid = panel_axes(
        len(panels), width=width, height=3.4 + title_height(panels), has_shared_bar=True, subplot_kw=projection
    )
    for axes, panel in zip(grid, panels, strict=True):
        draw_surface(axes, panel.landscape, scale, styles, panel.title)
        add_titles(axes, panel)
        add_caption_3d(axes, panel.caption)
    planes = [(axes, panel.landscape) for axes, panel in zip(grid, panels, strict=True) if _is_plane(panel)]
    if planes:
        add_models(figure, planes[0][1], planes[0][0].lines, "outside upper left")  # notes are below
    add_colour_bar(figure, grid, scale)
    add_caption(figure, title, scale.notes)
    return figure


def _is_plane(panel: Panel) -> bool:
    return panel.landscape.kind == "plane"


def draw_surface(
    axes: Any, landscape: Landscape, scale: LandscapeScale, styles: Mapping[str, LineStyle], title: str
) -> None:
    """Draw one landscape as a surface without a frame, and mark its models on it.

    Args:
        axes: where to draw, with a 3D projection.
        landscape: a two-dimensional landscape.
        scale: levels and colours; the height is the logarithm of the value.
        styles: colours and markers of the models by name.
        title: name of the model if there is only one; if empty, the name of its mark.
    """
    xs, ys = np.meshgrid(*landscape.axes, indexing="ij")
    values = scale.clipped(grid_of(landscape, scale.value))
    height = np.log10(values)
    colours = COLOUR_MAP(LogNorm(scale.low, scale.high)(np.nan_to_num(values, nan=scale.high)))
    lines: dict[str, Any] = {"rcount": 120, "ccount": 120, "linewidth": 0.15, "edgecolor": (1, 1, 1, 0.35)}
    axes.plot_surface(xs, ys, height, facecolors=colours, shade=False, clip_on=False, **lines)
    axes.computed_zorder = False  # otherwise the surface hides the marks
    heights = [
        np.log10(np.clip(landscape.at(scale.value, *mark.position), scale.low, scale.high)) for mark in landscape.marks
    ]
    draw_marks(axes, landscape.marks, styles, title, heights)
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
    check_dimensions(panels, 1)
    scale = common_scale(panels, value)
    value = scale.value  # the default if none was given
    figure = Figure(figsize=(7.2, 4.4), layout="constrained")
    axes = figure.subplots()
    styles = line_styles(panel.title for panel in panels)
    for panel in panels:
        label = "   ".join([panel.title, *panel.caption.splitlines()])
        values = finite(grid_of(panel.landscape, value))
        spacing = marker_spacing(len(values))
        axes.plot(panel.landscape.axes[0], values, **styles[panel.title].line, markevery=spacing, lw=1.9, label=label)
    style_axes(axes)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(NullLocator())  # removes the default ticks
    axes.set_yticks(scale.ticks, [shown_tick(tick, value) for tick in scale.ticks])
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(LINE_TITLES["around"], color=INK)
    axes.set_ylabel(shown_value(value), color=INK)
    add_legend(axes, outside="outside upper left", fontsize=9)  # notes are below
    add_caption(figure, title, scale.omitted)
    return figure


def path_picture(landscape: Landscape, values: Sequence[str] = (), title: str = "") -> Figure:
    """Plot values along the path between two models, with one panel per value and an arrow at the barrier.

    Args:
        landscape: the path, from the first model (0) to the second (1).
        values: names of the values to plot; default: the training loss and the test metric, if they were measured.
        title: title above all panels.
    """
    values = values or values_to_plot(landscape)
    check_dimensions([Panel("", landscape)], 1)
    figure = Figure(figsize=(4.4 * len(values), 3.6), layout="constrained")
    t, styles = np.array(landscape.axes[0]), line_styles(mark.name for mark in landscape.marks)
    for axes, value in zip(figure.subplots(1, len(values), squeeze=False)[0], values, strict=True):
        along_path = finite(grid_of(landscape, value))
        ends = np.interp([0, 1], t, along_path)
        axes.plot([0, 1], ends, color=FAINT, lw=1, ls=(0, (4, 3)))  # dashed: the line between the ends
        axes.plot(t, along_path, color=INK, lw=2)
        for mark, x, y in zip(landscape.marks, (0, 1), ends, strict=True):
            style = styles[mark.name]
            options: dict[str, Any] = {"color": style.colour, "markeredgecolor": "white", "markersize": 8}
            axes.plot([x], [y], style.marker, label=mark.name, **options)
        highest = barrier(landscape.axes[0], grid_of(landscape, value))
        height = highest.height if highest.height > ROUNDING * np.nanmax(np.abs(along_path)) else 0.0
        if np.isfinite(height) and height > 0:
            foot = ends[0] + highest.at * (ends[1] - ends[0])  # on the straight line between the ends
            arrow = {"arrowstyle": "<->", "color": ACCENT, "lw": 1.2}
            axes.annotate("", (highest.at, foot + height), (highest.at, foot), arrowprops=arrow)
        axes.set_title(shown_value(value), loc="left", fontsize=11, fontweight="bold", color=INK)
        shown_height = shown_loss_or_error(height, value) + (" %" if value.endswith("error") else "")
        shown_barrier = "no barrier" if height == 0 else f"barrier {shown_height}"
        axes.set_title(shown_barrier, loc="right", fontsize=9.5, color=ACCENT)
        style_axes(axes)
        axes.set_xlabel(LINE_TITLES["path"], fontsize=9, color=INK)
        if value.endswith("error"):
            axes.yaxis.set_major_formatter(FuncFormatter(lambda tick, _: shown_tick(tick, "error")))
    add_models(figure, landscape, figure.axes[0].lines[-2:], "outside lower left")
    add_caption(figure, title)
    return figure
