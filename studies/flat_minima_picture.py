"""The picture of the study of flat minima, from its numbers: surfaces above, contours below, one scale, curvature beside each."""

from __future__ import annotations

from typing import Any

from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from fedflat.flatness.landscapes.grid import Landscape
from fedflat.reporting.figures.landscape_scale import Scale, common_line, shown_tick
from fedflat.reporting.figures.landscapes import COLOUR_MAP, FAINT, INK, draw_contours, draw_marks, draw_surface

VALUE = "train_loss"


def picture(numbers: dict[str, Any]) -> Figure:
    """A column for each method."""
    found = {name: Landscape.from_document(document) for name, document in numbers["landscapes"].items()}
    scale = Scale.over(found.values(), VALUE)
    line = common_line(list(found.values()), scale)
    count = len(found)
    figure = Figure(figsize=(2.55 * count + 0.75, 5.6))
    left, right, gap = 0.018, 0.925, 0.016
    width = (right - left - gap * (count - 1)) / count
    height = width * figure.get_figwidth() / figure.get_figheight()
    for number, (name, landscape) in enumerate(found.items()):
        x = left + number * (width + gap)
        solid = figure.add_axes((x - 0.014, 0.525, width + 0.028, 0.42), projection="3d")
        draw_surface(solid, landscape, scale)
        flat = figure.add_axes((x, 0.155, width, height))
        draw_contours(flat, landscape, scale, line)
        draw_marks(flat, landscape.marks, alone=True)
        flat.set_xticks([])
        flat.set_yticks([])
        _words(figure, x + width / 2, name, numbers["methods"][name])
    _bar(figure, scale, line, height)
    radius = found[next(iter(found))].made["radius"]
    figure.text(left, 0.012, _caption(numbers["about"], radius, line, scale), fontsize=8.5, color=FAINT, va="bottom")
    return figure


def _words(figure: Figure, x: float, name: str, figures: dict[str, Any]) -> None:
    figure.text(x, 0.955, name, ha="center", fontsize=14, fontweight="bold", color=INK)
    figure.text(
        x,
        0.100,
        rf"$\lambda_{{\mathrm{{max}}}}$ = {figures['eigenvalues'][0]:.3g}",
        ha="center",
        fontsize=12.5,
        color=INK,
    )
    figure.text(x, 0.060, f"test accuracy {100 * figures['accuracy']:.1f} %", ha="center", fontsize=10.5, color=FAINT)


def _bar(figure: Figure, scale: Scale, line: float, height: float) -> None:
    axes = figure.add_axes((0.942, 0.155, 0.011, height))
    shades = ScalarMappable(LogNorm(scale.low, scale.high), COLOUR_MAP)
    bar = figure.colorbar(shades, cax=axes, extend="max" if scale.cut_off else "neither")
    bar.set_ticks(scale.ticks)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda tick, _: shown_tick(tick, scale.value)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.tick_params(labelsize=8.5, length=0, colors=FAINT)
    axes.axhline(line, color=INK, lw=1.5)
    bar.outline.set_visible(False)
    axes.set_title("training\nloss", fontsize=8.5, color=INK, loc="left", pad=10 if scale.cut_off else 6)


def _caption(about: dict[str, Any], radius: float, line: float, scale: Scale) -> str:
    where = f"{about['data']}, {about['model']}, {about['partition']}, {about['rounds']} rounds, seed {about['seed']}"
    how = f"filter-normalised random directions to ±{radius:g}; the dark line is loss {line:g} in every panel"
    return f"{where}; {how}{f'; {scale.notes}' if scale.not_finite else ''}."
