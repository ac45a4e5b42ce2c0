"""Interactive landscapes: one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

from fedflat.errors import UserError
from fedflat.flatness.landscapes.grid import Landscape, Mark
from fedflat.reporting.figures.landscape_panels import FAINT, INK, Panel, common_scale
from fedflat.reporting.figures.landscape_scale import (
    AXIS_TITLES,
    BASIN,
    LINE_TITLES,
    NOT_FINITE,
    LandscapeScale,
    common_line,
    grid_of,
    shown_line,
    shown_tick,
    shown_value,
)
from fedflat.reporting.figures.landscapes import panel_styles
from fedflat.reporting.figures.style import MARKERS, LineStyle, line_styles, marker_spacing

PANEL_SIZE = {"width": 340, "height": 340}
"""Size of a panel in pixels: one fits a phone, two a printed page, three a screen."""
LINES_HEIGHT = 520
"""Height of one-dimensional landscapes in pixels."""
UNUSED_BUTTONS = (
    "select2d",
    "lasso2d",
    "autoScale2d",
    "zoomIn2d",
    "zoomOut2d",
    "resetCameraLastSave3d",
    "tableRotation",
)
CONFIG = {
    "modeBarButtonsToRemove": UNUSED_BUTTONS,
    "displaylogo": False,
    "showSendToCloud": False,
    "plotlyServerURL": "",
    "responsive": True,
}
"""Plotly's options: few buttons, no link to its web site, no upload."""
SYMBOLS = dict(
    zip(MARKERS, ("circle", "square", "diamond", "triangle-up", "triangle-down", "cross", "x", "star"), strict=True)
)
"""Plotly's names of the markers."""
SYMBOLS_3D = frozenset({"circle", "square", "diamond", "cross", "x"})
"""The only ones of these symbols that Plotly has in three dimensions."""
TEXT = "%{text}<extra></extra>"
"""A tooltip that shows only a name."""
TRANSPARENT = "rgba(0,0,0,0)"
GRID_COLOUR = "#e5e2dc"
FONT = "Helvetica, Arial, sans-serif"
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>
body {{ font-family: {font}; color: {ink}; margin: 2rem auto; max-width: 1200px; }}
p {{ color: {faint}; }}
.panels {{ display: flex; flex-wrap: wrap; }}
.title {{ margin: 0 0.5rem; }}
</style></head>
<body><h1>{title}</h1><p>{about}</p>{figures}</body></html>
"""


def landscape_page(panels: Sequence[Panel], value: str | None = None, title: str = "Landscapes") -> str:
    """Render an interactive HTML page of landscapes on one scale.

    Two-dimensional ones become a surface and a contour plot each, one-dimensional ones curves in one plot.

    Args:
        panels: landscapes of the same dimension.
        value: name of the plotted value; default: the training loss, or the only loss.
        title: heading of the page.
    """
    note, rows = landscape_parts(panels, value)
    figures = "".join(f'<div class="panels">{"".join(row)}</div>' for row in rows)
    texts = {"title": escape(title), "about": escape(note), "figures": figures}
    return PAGE.format(**texts, font=FONT, ink=INK, faint=FAINT)


def landscape_parts(
    panels: Sequence[Panel],
    value: str | None = None,
    library: bool = True,
    styles: Mapping[str, LineStyle] | None = None,
) -> tuple[str, list[list[str]]]:
    """Return a note on the scale, and the interactive figures as HTML: a row of surfaces and a row of contours.

    Args:
        panels: landscapes of the same dimension.
        value: name of the plotted value; default: the training loss, or the only loss.
        library: whether to embed the Plotly library in the first figure.
        styles: colours and markers by the names of models; default: chosen by the names.
    """
    if not panels:
        raise UserError("no landscape to plot")
    if len({panel.landscape.dimensions for panel in panels}) > 1:
        raise UserError("one- and two-dimensional landscapes cannot share a page; plot them separately")
    scale = common_scale(panels, value)
    styles = line_styles(panel.title for panel in panels) | panel_styles(panels, styles)
    if panels[0].landscape.dimensions == 1:
        figures, notes = [[_curves(panels, scale, styles)]], [scale.omitted]
    else:
        line = common_line([panel.landscape for panel in panels], scale)
        figures = [
            [_surface(panel, scale, styles) for panel in panels],
            [_contours(panel, scale, styles, line) for panel in panels],
        ]
        symbols = {marker["symbol"] for panel in panels for _, marker in _markers(panel, styles)}
        circles = "" if symbols <= SYMBOLS_3D else "surfaces mark models with triangles and stars by circles"
        notes = [shown_line(line, scale), scale.notes, circles]
    first, rows = figures[0][0], []
    for row in figures:  # Plotly is embedded once, with the first figure
        titles = [_title(panel) for panel in panels] if len(row) == len(panels) else [""]
        parts = [
            figure.to_html(full_html=False, include_plotlyjs=library and figure is first, config=CONFIG)
            for figure in row
        ]
        rows.append([title + part for title, part in zip(titles, parts, strict=True)])
    notes = [f"{shown_value(scale.value)} on one scale", *notes]
    return " ".join(f"{note[0].upper()}{note[1:]}." for note in notes if note), rows


def _title(panel: Panel) -> str:
    """Return the title of a panel, and its caption or a description of its models, as HTML; Plotly would crop them."""
    descriptions = panel.landscape.metadata.get("descriptions", {})
    caption = panel.caption or "; ".join(f"{name}: {text}" for name, text in descriptions.items())
    return f'<p class="title"><b>{escape(panel.title)}</b><br>{escape(caption)}</p>'


def _surface(panel: Panel, scale: LandscapeScale, styles: Mapping[str, LineStyle]) -> Any:
    """Draw a landscape as a surface, with the models as points on it.

    Args:
        panel: the landscape and its title.
        scale: levels and colours; heights are logarithms.
        styles: colours and markers of the models by name.
    """
    from plotly import graph_objects

    contours = {"z": {"show": True, "color": "white", "width": 1, **_contour_levels(scale)}}
    figure = graph_objects.Figure(graph_objects.Surface(**_grid_values(panel.landscape, scale), contours=contours))
    heights = np.log10(scale.clipped(grid_of(panel.landscape, scale.value)))
    for mark, marker in _markers(panel, styles):
        nearest = tuple(  # the grid point at which the mark is drawn
            int(np.abs(np.array(axis) - x).argmin())
            for axis, x in zip(panel.landscape.axes, mark.position, strict=True)
        )
        point = {**_mark_values(mark), "z": _json_values([heights[nearest]])}
        symbol = marker["symbol"] if marker["symbol"] in SYMBOLS_3D else "circle"
        figure.add_trace(graph_objects.Scatter3d(**point, marker={**marker, "symbol": symbol, "size": 5}))
    names = AXIS_TITLES[panel.landscape.kind]
    ticks = _tick_labels({tick: shown_tick(tick, scale.value) for tick in scale.ticks})
    axes = [
        {"title": {"text": name, "font": {"size": 10}}, "showbackground": False, "gridcolor": GRID_COLOUR, "nticks": 5}
        for name in (*names, shown_value(scale.value))
    ]
    figure.update_scenes(
        xaxis=axes[0],
        yaxis=axes[1],
        zaxis={**axes[2], "range": [np.log10(scale.low), np.log10(scale.high)], **ticks},
        aspectratio={"x": 1, "y": 1, "z": 0.7},
        camera={
            "eye": {"x": 1.95, "y": -2.05, "z": 1.2},
            "center": {"x": 0, "y": 0, "z": -0.1},
        },  # leaves room for titles
    )
    return _styled(figure, scale, has_bar=False)


def _contours(panel: Panel, scale: LandscapeScale, styles: Mapping[str, LineStyle], bold_value: float) -> Any:
    """Draw the contours of a landscape and mark its models.

    Args:
        panel: the landscape and its title.
        scale: levels and colours.
        styles: colours and markers of the models by name.
        bold_value: value of the bold contour, the same in all panels.
    """
    from plotly import graph_objects

    line = {"color": "white", "width": 0.7}
    grid = _grid_values(panel.landscape, scale)
    figure = graph_objects.Figure(graph_objects.Contour(**grid, contours=_contour_levels(scale), line=line))
    height = float(np.log10(bold_value))
    bold = {"coloring": "none", "start": height, "end": height, "size": 1, "showlabels": False}
    values = {name: grid[name] for name in ("x", "y", "z")}
    figure.add_trace(
        graph_objects.Contour(
            **values,
            contours=bold,
            line={"color": INK, "width": 2},
            showscale=False,
            hoverinfo="skip",
            showlegend=False,
        )
    )
    for mark, marker in _markers(panel, styles):
        figure.add_trace(graph_objects.Scatter(**_mark_values(mark), marker={**marker, "size": 7}))
    x_title, y_title = AXIS_TITLES[panel.landscape.kind]
    figure.update_xaxes(title={"text": x_title, "standoff": 4}, nticks=5, constrain="domain")
    figure.update_yaxes(title={"text": y_title, "standoff": 4}, nticks=5, constrain="domain", scaleanchor="x")
    figure.update_layout(plot_bgcolor=NOT_FINITE, showlegend=len(panel.landscape.marks) > 1)
    return _styled(figure, scale, has_bar=True)


def _markers(panel: Panel, styles: Mapping[str, LineStyle]) -> list[tuple[Mark, dict[str, Any]]]:
    """Return each model with its Plotly marker; a single model has the style of the panel's title."""
    marks = panel.landscape.marks
    chosen = [styles[panel.title if len(marks) == 1 else mark.name] for mark in marks]
    line = {"width": 1.2, "color": "white"}
    return [
        (mark, {"color": style.colour, "symbol": SYMBOLS[style.marker], "line": line})
        for mark, style in zip(marks, chosen, strict=True)
    ]


def _curves(panels: Sequence[Panel], scale: LandscapeScale, styles: Mapping[str, LineStyle]) -> Any:
    """Draw one-dimensional landscapes as curves in one plot."""
    from plotly import graph_objects

    figure = graph_objects.Figure()
    for panel in panels:
        values, style = _json_values(grid_of(panel.landscape, scale.value)), styles[panel.title]
        spacing = marker_spacing(len(values))
        sizes = [8 if index % spacing == 0 else 0 for index in range(len(values))]
        options = {
            "name": "<br>".join(map(escape, [panel.title, *panel.caption.splitlines()])),
            "mode": "lines+markers",
            "line": {"color": style.colour, "width": 2.5},
            "marker": {"symbol": SYMBOLS[style.marker], "size": sizes, "opacity": 1},
        }
        figure.add_trace(graph_objects.Scatter(x=panel.landscape.axes[0], y=values, **options))
    figure.update_yaxes(type="log", title=shown_value(scale.value), gridcolor=GRID_COLOUR)
    figure.update_xaxes(title=LINE_TITLES[panels[0].landscape.kind], gridcolor=GRID_COLOUR)
    legend = {"orientation": "h", "y": -0.2, "yanchor": "top"}  # below the plot, so that it fits a phone
    figure.update_layout(
        template="plotly_white",
        font={"family": FONT, "color": INK},
        height=LINES_HEIGHT,
        legend=legend,
        showlegend=True,
    )
    return figure


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


def _mark_values(mark: Mark) -> dict[str, Any]:
    """Return the arguments of a Plotly trace that marks a model."""
    x, y = mark.position
    return {"x": [x], "y": [y], "text": [mark.name], "name": mark.name, "mode": "markers", "hovertemplate": TEXT}


def _styled(figure: Any, scale: LandscapeScale, has_bar: bool) -> Any:
    """Set the style and size of a panel, and the colours that all panels share; returns the figure."""
    bar = {"orientation": "h", "thickness": 9, "y": -0.24, "yanchor": "top", "title": {"text": ""}}
    bar |= _tick_labels(scale.bar_labels)
    figure.update_layout(
        template="plotly_white",
        font={"family": FONT, "color": INK, "size": 11},
        paper_bgcolor=TRANSPARENT,
        modebar={"bgcolor": TRANSPARENT},
        coloraxis={
            "colorscale": [[position, colour] for position, colour in BASIN],
            "cmin": np.log10(scale.low),
            "cmax": np.log10(scale.high),
            "colorbar": bar,
            "showscale": has_bar,
        },
        legend={"orientation": "h", "y": 1.0, "yanchor": "bottom", "font": {"size": 10}},
        margin={"l": 46, "r": 12, "t": 30, "b": 76} if has_bar else {"l": 0, "r": 0, "t": 0, "b": 0},
        **PANEL_SIZE,
    )
    return figure


def _contour_levels(scale: LandscapeScale) -> dict[str, float]:
    low, high = np.log10(scale.low), np.log10(scale.high)
    return {"start": low, "end": high, "size": (high - low) / (len(scale.levels) - 1)}


def _tick_labels(labels: Mapping[float, str]) -> dict[str, Any]:
    """Return Plotly's options for the ticks of a logarithmic axis, given their labels by value."""
    return {"tickvals": [float(np.log10(tick)) for tick in labels], "ticktext": list(labels.values())}


def _json_values(values: Iterable[float]) -> list[float | None]:
    """Replace values that are not finite, which JSON lacks, by None."""
    return [float(value) if np.isfinite(value) else None for value in values]
