"""Interactive landscapes: one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Sequence
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

PER_ROW = 2
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
    """A page with each landscape as a surface and as contours on one scale; lines become curves."""
    about, parts = landscape_parts(panels, value)
    return PAGE.format(
        title=escape(title), about=escape(about), figures="".join(parts), font=FONT, ink=INK, faint=FAINT
    )


def landscape_parts(panels: Sequence[Panel], value: str = "train_loss", library: bool = True) -> tuple[str, list[str]]:
    """A note on the scale and the figures as HTML; ``library`` embeds Plotly."""
    if not panels:
        raise UserError("no landscape to plot")
    if len({panel.landscape.dimensions for panel in panels}) > 1:
        raise UserError("one- and two-dimensional landscapes cannot share a page; plot them separately")
    scale = LandscapeScale.over([panel.landscape for panel in panels], value)
    flat = panels[0].landscape.dimensions == 1
    figures = [_curves(panels, scale)] if flat else [_surfaces(panels, scale), _contours(panels, scale)]
    # Plotly is embedded once, with the first figure.
    parts = [
        figure.to_html(full_html=False, include_plotlyjs=library and number == 0)
        for number, figure in enumerate(figures)
    ]
    note = f" {scale.notes[:1].upper()}{scale.notes[1:]}." if scale.notes else ""
    about = f"{shown_value(value).capitalize()} on one scale.{note}"
    return about, parts


def _surfaces(panels: Sequence[Panel], scale: LandscapeScale) -> Any:
    from plotly import graph_objects

    figure = _grid(panels, "surface")
    for place, panel in enumerate(panels):
        xs, ys = panel.landscape.axes
        clipped, exact = scale.clipped(grid_of(panel.landscape, scale.value)), grid_of(panel.landscape, scale.value)
        height = np.log10(clipped).T
        figure.add_trace(
            graph_objects.Surface(
                x=xs,
                y=ys,
                z=_none(height),
                text=_hover(exact.T),
                hovertemplate=f"x %{{x:.3g}}<br>y %{{y:.3g}}<br>{shown_value(scale.value)} %{{text}}<extra></extra>",
                coloraxis="coloraxis",
                contours={"z": {"show": True, "color": "white", "width": 1, **_steps(scale)}},
            ),
            *_place(place),
        )
        figure.add_trace(_marks_above(panel.landscape, height), *_place(place))
    low, high = np.log10(scale.low), np.log10(scale.high)
    axis = {"title": {"text": ""}, "showbackground": False, "gridcolor": "#e5e2dc"}
    upright = {**axis, "range": [low, high], **_ticks(scale), "title": {"text": shown_value(scale.value)}}
    figure.update_scenes(
        xaxis=axis,
        yaxis=axis,
        zaxis=upright,
        aspectratio={"x": 1, "y": 1, "z": 0.7},
        camera={"eye": {"x": 1.3, "y": -1.4, "z": 0.9}},
    )
    return _styled(figure, scale, len(panels), 520)


def _contours(panels: Sequence[Panel], scale: LandscapeScale) -> Any:
    from plotly import graph_objects

    figure = _grid(panels, "contour")
    for place, panel in enumerate(panels):
        xs, ys = panel.landscape.axes
        exact = grid_of(panel.landscape, scale.value)
        figure.add_trace(
            graph_objects.Contour(
                x=xs,
                y=ys,
                z=_none(np.log10(scale.clipped(exact)).T),
                text=_hover(exact.T),
                hovertemplate=f"x %{{x:.3g}}<br>y %{{y:.3g}}<br>{shown_value(scale.value)} %{{text}}<extra></extra>",
                coloraxis="coloraxis",
                contours=_steps(scale),
                line={"color": "white", "width": 0.7},
            ),
            *_place(place),
        )
        marks = panel.landscape.marks
        figure.add_trace(
            graph_objects.Scatter(
                x=[mark.position[0] for mark in marks],
                y=[mark.position[1] for mark in marks],
                text=[mark.name for mark in marks],
                mode="markers+text" if len(marks) > 1 else "markers",
                textposition="top center",
                marker={
                    "color": ACCENT,
                    "size": 10,
                    "symbol": "cross-thin" if len(marks) == 1 else "circle",
                    "line": {"width": 2, "color": ACCENT},
                },
                hovertemplate="%{text}<extra></extra>",
                showlegend=False,
            ),
            *_place(place),
        )
    figure.update_layout(plot_bgcolor=NOT_FINITE)
    return _styled(figure, scale, len(panels), 520)


def _curves(panels: Sequence[Panel], scale: LandscapeScale) -> Any:
    from plotly import graph_objects

    from fedflat.reporting.figures.curves import COLOURS

    figure = graph_objects.Figure()
    for number, panel in enumerate(panels):
        values = grid_of(panel.landscape, scale.value)
        line = {"color": COLOURS[number % len(COLOURS)], "width": 2.5}
        figure.add_trace(graph_objects.Scatter(x=panel.landscape.axes[0], y=_none(values), name=panel.title, line=line))
    figure.update_yaxes(type="log", title=shown_value(scale.value), gridcolor="#e5e2dc")
    figure.update_xaxes(gridcolor="#e5e2dc")
    figure.update_layout(template="plotly_white", font={"family": FONT, "color": INK}, height=520)
    return figure


def _grid(panels: Sequence[Panel], kind: str) -> Any:
    from plotly.subplots import make_subplots

    rows, columns = ceil(len(panels) / PER_ROW), min(len(panels), PER_ROW)
    titles = [escape(panel.title) for panel in panels]
    return make_subplots(
        rows,
        columns,
        specs=[[{"type": kind}] * columns] * rows,
        subplot_titles=titles,
        horizontal_spacing=0.06,
        vertical_spacing=0.08,
    )


def _place(number: int) -> tuple[int, int]:
    return number // PER_ROW + 1, number % PER_ROW + 1


def _styled(figure: Any, scale: LandscapeScale, panels: int, height: int) -> Any:
    bar = {"title": {"text": shown_value(scale.value)}, **_ticks(scale)}
    colours = [[position, colour] for position, colour in BASIN]
    axis = {"colorscale": colours, "cmin": np.log10(scale.low), "cmax": np.log10(scale.high), "colorbar": bar}
    figure.update_layout(
        template="plotly_white",
        font={"family": FONT, "color": INK},
        coloraxis=axis,
        height=height * ceil(panels / PER_ROW),
    )
    return figure


def _marks_above(landscape: Landscape, height: Any) -> Any:
    """Markers of the models on the surface."""
    from plotly import graph_objects

    xs, ys = (np.array(axis) for axis in landscape.axes)
    spots = [
        (int(np.abs(xs - mark.position[0]).argmin()), int(np.abs(ys - mark.position[1]).argmin()))
        for mark in landscape.marks
    ]
    return graph_objects.Scatter3d(
        x=[mark.position[0] for mark in landscape.marks],
        y=[mark.position[1] for mark in landscape.marks],
        z=_none(np.array([height[j, i] for i, j in spots])),
        text=[mark.name for mark in landscape.marks],
        mode="markers",
        marker={"color": ACCENT, "size": 4},
        hovertemplate="%{text}<extra></extra>",
        showlegend=False,
    )


def _steps(scale: LandscapeScale) -> dict[str, float]:
    low, high = np.log10(scale.low), np.log10(scale.high)
    return {"start": low, "end": high, "size": (high - low) / (len(scale.levels) - 1)}


def _ticks(scale: LandscapeScale) -> dict[str, Any]:
    return {
        "tickvals": [float(np.log10(tick)) for tick in scale.ticks],
        "ticktext": [shown_tick(tick, scale.value) for tick in scale.ticks],
    }


def _none(values: Any) -> Any:
    """Values with None where not finite."""
    return [_none(row) for row in values] if values.ndim > 1 else [float(v) if np.isfinite(v) else None for v in values]


def _hover(values: Any) -> list[list[str]]:
    return [[f"{value:.4g}" if np.isfinite(value) else "not finite" for value in row] for row in values]
