"""The figure of the flat-minima study: surfaces above contours on one scale, with curvature and accuracy."""

from __future__ import annotations

from typing import Any

from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from fedflat.flatness.landscapes.grid import Landscape
from fedflat.reporting.figures.landscape_panels import COLOUR_MAP, FAINT, INK
from fedflat.reporting.figures.landscape_scale import LandscapeScale, common_line
from fedflat.reporting.figures.landscapes import draw_contours, draw_marks, draw_surface
from fedflat.reporting.figures.style import line_styles

VALUE = "train_loss"


def flat_minima_figure(numbers: dict[str, Any]) -> Figure:
    """One column per method."""
    landscapes = {name: Landscape.from_document(document) for name, document in numbers["landscapes"].items()}
    scale = LandscapeScale.over(landscapes.values(), VALUE)
    line = common_line(list(landscapes.values()), scale)
    count = len(landscapes)
    figure = Figure(figsize=(2.55 * count + 0.75, 5.6))
    left, right, gap = 0.018, 0.925, 0.016
    width = (right - left - gap * (count - 1)) / count
    height = width * figure.get_figwidth() / figure.get_figheight()
    styles = line_styles(landscapes)
    for column, (name, landscape) in enumerate(landscapes.items()):
        x = left + column * (width + gap)
        surface = figure.add_axes((x - 0.014, 0.525, width + 0.028, 0.42), projection="3d")
        draw_surface(surface, landscape, scale, styles, name)
        contours = figure.add_axes((x, 0.155, width, height))
        draw_contours(contours, landscape, scale, line)
        draw_marks(contours, landscape.marks, styles, name, size=5)
        contours.set_xticks([])
        contours.set_yticks([])
        _label_column(figure, x + width / 2, name, numbers["methods"][name])
    _add_colour_bar(figure, scale, line, height)
    radius = landscapes[next(iter(landscapes))].metadata["radius"]
    caption = _caption(numbers["about"], radius, line, scale)
    figure.text(left, 0.012, caption, fontsize=8.5, color=FAINT, va="bottom")
    return figure


def _label_column(figure: Figure, x: float, name: str, method: dict[str, Any]) -> None:
    eigenvalue = rf"$\lambda_{{\mathrm{{max}}}}$ = {method['eigenvalues'][0]:.3g}"
    accuracy = f"test accuracy {100 * method['accuracy']:.1f} %"
    figure.text(x, 0.955, name, ha="center", fontsize=14, fontweight="bold", color=INK)
    figure.text(x, 0.100, eigenvalue, ha="center", fontsize=12.5, color=INK)
    figure.text(x, 0.060, accuracy, ha="center", fontsize=10.5, color=FAINT)


def _add_colour_bar(figure: Figure, scale: LandscapeScale, line: float, height: float) -> None:
    axes = figure.add_axes((0.942, 0.155, 0.011, height))
    shades = ScalarMappable(LogNorm(scale.low, scale.high), COLOUR_MAP)
    bar = figure.colorbar(shades, cax=axes)
    bar.set_ticks(list(scale.bar_labels), labels=list(scale.bar_labels.values()))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.tick_params(labelsize=8.5, length=0, colors=FAINT)
    axes.axhline(line, color=INK, lw=1.5)
    bar.outline.set_visible(False)
    axes.set_title("training\nloss", fontsize=8.5, color=INK, loc="left", pad=10)


def _caption(about: dict[str, Any], radius: float, line: float, scale: LandscapeScale) -> str:
    where = f"{about['dataset']}, {about['model']}, {about['partition']}"
    setting = f"{where}, {about['rounds']} rounds, seed {about['seed']}"
    axes = f"filter-normalised random directions to ±{radius:g}; the dark line is loss {line:g} in every panel"
    return f"{setting}; {axes}{f'; {scale.notes}' if scale.not_finite else ''}."
