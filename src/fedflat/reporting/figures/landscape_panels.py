"""Panels of landscape figures: their titles, axes, colour bars and captions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, LogNorm
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import NullLocator

from fedflat.errors import UserError
from fedflat.flatness.landscapes.grid import Landscape
from fedflat.reporting.figures.landscape_scale import (
    AXIS_TITLES,
    BASIN,
    NOT_FINITE,
    LandscapeScale,
    shown_value,
    values_to_plot,
)
from fedflat.reporting.figures.style import add_outer_legend, described_labels, open_frame, subplot_list, wrapped

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

INK, FAINT, ACCENT = "#22303c", "#6b7580", "#d1495b"
PER_ROW = 4
LONG_TITLE = 24
"""Longer titles of panels, in characters, are smaller and have several lines."""
TITLE_CHARACTERS, TITLE_ROW = 32, 0.32
"""Characters in a line of a long title, and the space for a line in inches."""
Position = Literal["outside lower left", "outside upper left"]
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


def panels_of(landscapes: Mapping[str, Landscape]) -> list[Panel]:
    """Return a panel for each landscape of the training loss, with the description of its model as caption."""
    return [
        Panel(name, landscape, landscape.metadata.get("described", ""))
        for name, landscape in landscapes.items()
        if "train_loss" in landscape.values
    ]


def common_scale(panels: Sequence[Panel], value: str | None) -> LandscapeScale:
    """Return a scale for all panels and the value named ``value``; default: the training loss, or the only loss."""
    landscapes = [panel.landscape for panel in panels]
    return LandscapeScale.over(landscapes, value or values_to_plot(landscapes[0])[0])


def finite(values: Any) -> Any:
    """Replace infinite values by NaN, which are not drawn."""
    return np.where(np.isfinite(values), values, np.nan)


def check_dimensions(panels: Sequence[Panel], dimensions: int) -> None:
    """Raise a ``UserError`` if there are no panels, or if a landscape does not have this number of dimensions."""
    if not panels:
        raise UserError("no landscape to plot")
    for panel in panels:
        if panel.landscape.dimensions != dimensions:
            raise UserError(
                f"this figure needs {dimensions} dimensions, but {panel.title} has {panel.landscape.dimensions}"
            )


def panel_axes(
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


def title_height(panels: Sequence[Panel]) -> float:
    """Return the height of the further lines of the panels' titles in inches."""
    return TITLE_ROW * max(wrapped(panel.title, TITLE_CHARACTERS).count("\n") for panel in panels)


def add_titles(axes: Any, panel: Panel) -> None:
    """Write the title of a panel above it."""
    title, size = wrapped(panel.title, TITLE_CHARACTERS), 12.5 if len(panel.title) <= LONG_TITLE else 9
    axes.set_title(title, fontsize=size, fontweight="bold", color=INK, pad=2 if axes.name == "3d" else 8)


def add_axis_titles(axes: Axes, landscape: Landscape, note: str, *, is_leftmost: bool) -> None:
    """Label the axes with their units, the vertical one in the leftmost panel, and add a note below the panel."""
    x_title, y_title = AXIS_TITLES[landscape.kind]
    axes.set_xlabel("\n".join(filter(None, (x_title, note))), fontsize=9, color=INK, labelpad=4)
    if is_leftmost:
        axes.set_ylabel(y_title, fontsize=9, color=INK)


def add_caption_3d(axes: Any, caption: str) -> None:
    """Place the caption as text, because 3D axes without a frame hide their labels."""
    axes.text2D(0.5, 0.0, caption, transform=axes.transAxes, ha="center", fontsize=9.5, color=FAINT)


def add_colour_bar(figure: Figure, axes: Any, scale: LandscapeScale, line: float | None = None) -> None:
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
    bar = figure.colorbar(shades, **position)
    bar.set_ticks(list(scale.bar_labels), labels=list(scale.bar_labels.values()))
    bar.ax.yaxis.set_minor_locator(NullLocator())
    bar.ax.tick_params(labelsize=8.5, length=0, colors=FAINT)
    bar.outline.set_visible(False)
    if line is not None:
        bar.ax.axhline(line, color=INK, lw=1.5)
    if is_shared:
        bar.set_label(shown_value(scale.value), fontsize=9.5, color=INK)


def add_models(figure: Figure, landscape: Landscape, handles: Sequence[Artist], position: Position) -> None:
    """Add a legend of the models of a plane or path, with their averages, seeds and rounds if they are known.

    Args:
        figure: the figure.
        landscape: the landscape.
        handles: the mark of each model; its label is the name of the model, or starts with it.
        position: where to place the legend, e.g. ``outside lower left``.
    """
    if not landscape.marks:
        return
    descriptions = landscape.metadata.get("descriptions", {})
    names = [mark.name for mark in landscape.marks]
    labels, shared = described_labels(names, descriptions)
    texts = [
        str(handle.get_label()).replace(name, labels[name], 1) for name, handle in zip(names, handles, strict=True)
    ]
    options: dict[str, Any] = {"fontsize": 8, "title_fontsize": 8, "labelcolor": INK}
    legend = add_outer_legend(figure, position, handles=handles, labels=texts, title=shared, **options)
    legend.get_title().set_color(INK)


def add_caption(figure: Figure, title: str, notes: str = "") -> None:
    """Add a title above and notes below the figure, unless they are empty."""
    if title:
        figure.suptitle(title, fontsize=13, fontweight="bold", color=INK, x=0.01, ha="left")
    if notes:
        figure.supxlabel(notes, fontsize=8, color=FAINT, x=0.01, ha="left", wrap=True)


def style_axes(axes: Axes) -> None:
    """Set the frame, the grid and the ticks of a line plot."""
    open_frame(axes)
    axes.tick_params(colors=FAINT, labelsize=9)
