"""Interactive landscapes: one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from math import ceil
from typing import Any

import numpy as np

from fedflat.errors import UserError
from fedflat.flatness.landscapes.grid import Landscape
from fedflat.reporting.figures.landscape_scale import (
    BASIN,
    NOT_FINITE,
    LandscapeScale,
    grid_of,
    shown_tick,
    shown_value,
)
from fedflat.reporting.figures.landscapes import ACCENT, FAINT, INK, Panel
from fedflat.reporting.figures.style import colour_of

PER_ROW = 2
ROW_HEIGHT = 520
"""Height of a row of panels in pixels."""
GRID_COLOUR = "#e5e2dc"
FONT = "Helvetica, Arial, sans-serif"
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>
body {{ font-family: {font}; color: {ink}; margin: 2rem auto; max-width: 1200px; }}
p {{ color: {faint}; }}
</style></head>
<body><h1>{title}</h1><p>{about}</p>{figures}</body></html>
"""


def landscape_page(panels: Sequence[Panel], value: str = "train_loss", title: str = "Landscapes") -> str:
    """Render a page with each landscape as a surface and as contours on one scale; lines become curves."""
    note, parts = landscape_parts(panels, value)
    texts = {"title": escape(title), "about": escape(note), "figures": "".join(parts)}
    return PAGE.format(**texts, font=FONT, ink=INK, faint=FAINT)


def landscape_parts(panels: Sequence[Panel], value: str = "train_loss", library: bool = True) -> tuple[str, list[str]]:
    """Return a note on the scale, and the figures as HTML; ``library`` embeds Plotly."""
    if not panels:
        raise UserError("no landscape to plot")
    if len({panel.landscape.dimensions for panel in panels}) > 1:
        raise UserError("one- and two-dimensional landscapes cannot share a page; plot them separately")
    scale = LandscapeScale.over([panel.landscape for panel in panels], value)
    if panels[0].landscape.dimensions == 1:
        figures = [_curves(panels, scale)]
    else:
        figures = [_surfaces(panels, scale), _contours(panels, scale)]
    # Plotly is embedded once, with the first figure.
    parts = [
        figure.to_html(full_html=False, include_plotlyjs=library and number == 0)
        for number, figure in enumerate(figures)
    ]
    note = f" {scale.notes[:1].upper()}{scale.notes[1:]}." if scale.notes else ""
    return f"{shown_value(value).capitalize()} on one scale.{note}", parts


def _surfaces(panels: Sequence[Panel], scale: LandscapeScale) -> Any:
    """Draw each landscape as a surface, with the models as points on it."""
    from plotly import graph_objects

    figure = _subplots(panels, "surface")
    for number, panel in enumerate(panels):
        grid = _grid_values(panel.landscape, scale)
        contours = {"z": {"show": True, "color": "white", "width": 1, **_contour_levels(scale)}}
        figure.add_trace(graph_objects.Surface(**grid, contours=contours), *_position(number))
        figure.add_trace(_surface_marks(panel.landscape, scale), *_position(number))
    axis = {"title": {"text": ""}, "showbackground": False, "gridcolor": GRID_COLOUR}
    height_range = [np.log10(scale.low), np.log10(scale.high)]
    height_axis = {**axis, "range": height_range, **_ticks(scale), "title": {"text": shown_value(scale.value)}}
    figure.update_scenes(
        xaxis=axis,
        yaxis=axis,
        zaxis=height_axis,
        aspectratio={"x": 1, "y": 1, "z": 0.7},
        camera={"eye": {"x": 1.3, "y": -1.4, "z": 0.9}},
    )
    return _add_colour_axis(figure, scale, len(panels))


def _surface_marks(landscape: Landscape, scale: LandscapeScale) -> Any:
    """Mark the models at the height of the nearest grid point."""
    from plotly import graph_objects

    heights = np.log10(scale.clipped(grid_of(landscape, scale.value)))
    mark_heights = []
    for mark in landscape.marks:
        nearest = (
            int(np.abs(np.array(axis) - x).argmin()) for axis, x in zip(landscape.axes, mark.position, strict=True)
        )
        mark_heights.append(heights[tuple(nearest)])
    marker = {"color": ACCENT, "size": 4}
    return graph_objects.Scatter3d(
        **_mark_values(landscape), z=_json_values(mark_heights), mode="markers", marker=marker
    )


def _contours(panels: Sequence[Panel], scale: LandscapeScale) -> Any:
    """Draw the contours of each landscape, with labelled models if there are several."""
    from plotly import graph_objects

    figure = _subplots(panels, "contour")
    for number, panel in enumerate(panels):
        grid, line = _grid_values(panel.landscape, scale), {"color": "white", "width": 0.7}
        contours = graph_objects.Contour(**grid, contours=_contour_levels(scale), line=line)
        figure.add_trace(contours, *_position(number))
        is_alone = len(panel.landscape.marks) == 1
        marks = graph_objects.Scatter(
            **_mark_values(panel.landscape),
            mode="markers" if is_alone else "markers+text",
            textposition="top center",
            marker={
                "color": ACCENT,
                "size": 10,
                "symbol": "cross-thin" if is_alone else "circle",
                "line": {"width": 2, "color": ACCENT},
            },
        )
        figure.add_trace(marks, *_position(number))
    figure.update_layout(plot_bgcolor=NOT_FINITE)
    return _add_colour_axis(figure, scale, len(panels))


def _curves(panels: Sequence[Panel], scale: LandscapeScale) -> Any:
    """Draw one-dimensional landscapes as curves."""
    from plotly import graph_objects

    figure = graph_objects.Figure()
    for number, panel in enumerate(panels):
        values = _json_values(grid_of(panel.landscape, scale.value))
        line = {"color": colour_of(number), "width": 2.5}
        figure.add_trace(graph_objects.Scatter(x=panel.landscape.axes[0], y=values, name=panel.title, line=line))
    figure.update_yaxes(type="log", title=shown_value(scale.value), gridcolor=GRID_COLOUR)
    figure.update_xaxes(gridcolor=GRID_COLOUR)
    figure.update_layout(template="plotly_white", font={"family": FONT, "color": INK}, height=ROW_HEIGHT)
    return figure


def _subplots(panels: Sequence[Panel], kind: str) -> Any:
    """Create one subplot per panel, for traces of this kind."""
    from plotly.subplots import make_subplots

    rows, columns = ceil(len(panels) / PER_ROW), min(len(panels), PER_ROW)
    titles = [escape(panel.title) for panel in panels]
    specs, spacing = [[{"type": kind}] * columns] * rows, {"horizontal_spacing": 0.06, "vertical_spacing": 0.08}
    return make_subplots(rows, columns, specs=specs, subplot_titles=titles, **spacing)


def _position(number: int) -> tuple[int, int]:
    """Return row and column of a panel, which Plotly counts from 1."""
    return number // PER_ROW + 1, number % PER_ROW + 1


def _grid_values(landscape: Landscape, scale: LandscapeScale) -> dict[str, Any]:
    """Return the arguments of a Plotly trace that surfaces and contours share; heights are logarithms."""
    xs, ys = landscape.axes
    exact = grid_of(landscape, scale.value).T  # Plotly expects [y, x]
    hover = [[f"{value:.4g}" if np.isfinite(value) else "not finite" for value in row] for row in exact]
    return {
        "x": xs,
        "y": ys,
        "z": [_json_values(row) for row in np.log10(scale.clipped(exact))],
        "text": hover,
        "hovertemplate": f"x %{{x:.3g}}<br>y %{{y:.3g}}<br>{shown_value(scale.value)} %{{text}}<extra></extra>",
        "coloraxis": "coloraxis",
    }


def _mark_values(landscape: Landscape) -> dict[str, Any]:
    """Return the arguments of a Plotly trace that marks the models of a landscape."""
    return {
        "x": [mark.position[0] for mark in landscape.marks],
        "y": [mark.position[1] for mark in landscape.marks],
        "text": [mark.name for mark in landscape.marks],
        "hovertemplate": "%{text}<extra></extra>",
        "showlegend": False,
    }


def _add_colour_axis(figure: Any, scale: LandscapeScale, panels: int) -> Any:
    """Set style, size and the colour axis that all panels share."""
    axis = {
        "colorscale": [[position, colour] for position, colour in BASIN],
        "cmin": np.log10(scale.low),
        "cmax": np.log10(scale.high),
        "colorbar": {"title": {"text": shown_value(scale.value)}, **_ticks(scale)},
    }
    height, font = ROW_HEIGHT * ceil(panels / PER_ROW), {"family": FONT, "color": INK}
    figure.update_layout(template="plotly_white", font=font, coloraxis=axis, height=height)
    return figure


def _contour_levels(scale: LandscapeScale) -> dict[str, float]:
    low, high = np.log10(scale.low), np.log10(scale.high)
    return {"start": low, "end": high, "size": (high - low) / (len(scale.levels) - 1)}


def _ticks(scale: LandscapeScale) -> dict[str, Any]:
    """Return the ticks of a logarithmic axis, labelled with the values themselves."""
    return {
        "tickvals": [float(np.log10(tick)) for tick in scale.ticks],
        "ticktext": [shown_tick(tick, scale.value) for tick in scale.ticks],
    }


def _json_values(values: Iterable[float]) -> list[float | None]:
    """Replace values that are not finite, which JSON lacks, by None."""
    return [float(value) if np.isfinite(value) else None for value in values]
