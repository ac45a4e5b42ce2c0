"""Figures of landscapes: one common scale, clipped values are reported, and the page works offline."""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image
from torch import nn
from torch.nn.functional import cross_entropy

from fedflat.errors import UserError
from fedflat.flatness import Objective, landscape_of, plane_of
from fedflat.flatness.landscapes.grid import Landscape, Mark
from fedflat.reporting.figures.landscape_page import landscape_page
from fedflat.reporting.figures.landscape_scale import BASIN, LandscapeScale, common_line, shown_tick
from fedflat.reporting.figures.landscapes import (
    COLOUR_MAP,
    Panel,
    contours,
    lines,
    path_picture,
    plane_picture,
    surfaces,
)
from fedflat.reporting.figures.style import line_styles

AXIS = tuple(np.linspace(-1, 1, 11).tolist())


def bowl(depth: float, curvature: float) -> Landscape:
    x, y = np.meshgrid(AXIS, AXIS, indexing="ij")
    loss = depth + curvature * (x**2 + y**2)
    return Landscape(
        "around", (AXIS, AXIS), {"train_loss": loss, "test_error": np.minimum(loss / 10, 1)}, (Mark("m", (0.0, 0.0)),)
    )


def line(depth: float) -> Landscape:
    x = np.array(AXIS)
    return Landscape("around", (AXIS,), {"train_loss": depth + x**2}, (Mark("m", (0.0,)),))


def way() -> Landscape:
    t = np.linspace(0, 1, 5)
    return Landscape(
        "path",
        (tuple(t),),
        {"train_loss": t * (1 - t), "test_error": 0.1 + 0 * t},
        (Mark("a", (0.0,)), Mark("b", (1.0,))),
    )


PANELS = [Panel("FedAvg", bowl(0.1, 3.0), "sharp"), Panel("FedSAM", bowl(0.2, 1.0), "flat")]


def words(figure: Figure) -> str:
    texts = [
        text.get_text()
        for axes in figure.axes
        for text in [axes.title, axes.xaxis.label, axes.yaxis.label, *axes.texts]
    ]
    return "\n".join([*texts, *(text.get_text() for text in figure.texts)])


def pixels(figure: Figure) -> np.ndarray:
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=60)
    return np.asarray(Image.open(drawn).convert("RGB"))


def test_one_scale_spans_all_landscapes() -> None:
    together = LandscapeScale.over([panel.landscape for panel in PANELS], "train_loss")
    assert together == LandscapeScale.over([panel.landscape for panel in reversed(PANELS)], "train_loss")
    assert together.low == pytest.approx(0.1)
    steps = np.diff(np.log(together.levels))
    np.testing.assert_allclose(steps, steps[0])
    assert all(together.low * 0.999 <= tick <= together.high * 1.001 for tick in together.ticks)


def test_clipped_and_non_finite_values_are_counted_and_reported() -> None:
    values = np.ones((11, 11))
    values[:, 5:] = 2.0
    values[0, :4] = 1e6, math.inf, math.nan, 0.0
    landscape = Landscape("around", (AXIS, AXIS), {"train_loss": values})
    scale = LandscapeScale.over([landscape], "train_loss")
    assert (scale.above, scale.below, scale.not_finite, scale.total) == (1, 1, 2, 121)
    notes = ("above 2 are drawn as 2", "below 0.002 are drawn as 0.002")
    assert scale.notes == "; ".join([*(f"1 of 121 values {n}" for n in notes), "2 of 121 values are not finite (grey)"])
    figure = contours([Panel("FedAvg", landscape)])
    figure.draw_without_rendering()
    caption = next(text for text in figure.texts if "bold line" in text.get_text())
    assert caption.get_window_extent().x1 <= figure.bbox.x1  # wrapped, not cut off
    plane = plane_picture(replace(landscape, kind="plane"), ["train_loss"])
    assert plane.axes[0].get_xlabel().endswith("\n".join(scale.notes.split("; ")))  # one line each, below the panel
    bar = figure.axes[-1]
    page = landscape_page([Panel("FedAvg", landscape)])
    for label in ("≤ 0.002", "≥ 2"):
        assert label in [tick.get_text() for tick in bar.get_yticklabels()] and json.dumps(label) in page
    error = LandscapeScale.over([Landscape("around", (AXIS, AXIS), {"test_error": values / 10})], "test_error")
    assert error.notes.startswith("1 of 121 values above 20 % are drawn as 20 %")
    clipped = scale.clipped(values)
    assert clipped[0, 0] == scale.high
    assert np.isnan(clipped[0, 1])
    assert np.isnan(clipped[0, 2])


@pytest.mark.parametrize("values", [np.zeros((11, 11)), np.full((11, 11), 3.0), np.where(np.eye(11) > 0, 1e-9, 5.0)])
def test_constant_and_tiny_values_still_have_a_scale(values: np.ndarray) -> None:
    scale = LandscapeScale.over([Landscape("around", (AXIS, AXIS), {"train_loss": values})], "train_loss")
    assert 0 < scale.low < scale.high
    assert len(scale.ticks) >= 1
    assert np.isfinite(scale.levels).all()


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0.0687, 0.117, [0.07, 0.08, 0.09, 0.1, 0.11]),
        (0.9, 30, [1, 2, 5, 10, 20]),
        (0.25, 1.7, [0.3, 0.5, 1]),
        (0.029, 0.061, [0.03, 0.04, 0.05, 0.06]),
    ],
)
def test_ticks_are_round_numbers(low: float, high: float, ticks: list[float]) -> None:
    assert LandscapeScale("train_loss", (low, high), 0, 0, 0, 1).ticks == pytest.approx(ticks)


def test_no_finite_values_and_unknown_quantities_are_rejected() -> None:
    empty = Landscape("around", (AXIS, AXIS), {"train_loss": np.full((11, 11), math.nan)})
    with pytest.raises(UserError, match="training loss is finite"):
        LandscapeScale.over([empty], "train_loss")
    with pytest.raises(UserError, match="'loss'"):
        LandscapeScale.over([bowl(1, 1)], "loss")


def test_the_common_line_crosses_every_landscape() -> None:
    some = [panel.landscape for panel in PANELS]
    level = common_line(some, LandscapeScale.over(some, "train_loss"))
    assert all(
        landscape.values["train_loss"].min() < level < landscape.values["train_loss"].max() for landscape in some
    )


def test_the_level_of_the_bold_contour_can_be_chosen() -> None:
    figure = contours(PANELS, level=0.7)
    assert all(axes.collections[-1].levels.tolist() == [0.7] for axes in figure.axes[:2])
    assert "bold line: training loss 0.7" in words(figure)
    with pytest.raises(UserError, match=r"level=9 is outside the scale; expected 0\.1 to "):
        contours(PANELS, level=9)


def test_the_marker_does_not_hide_a_small_basin() -> None:
    """A bold contour as wide as a twentieth of the panel surrounds the marker of the model."""
    axes = contours([Panel("FedAvg", bowl(0.1, 3.0))], level=0.1 + 3 * 0.1**2).axes[0]
    axes.figure.canvas.draw()
    basin = axes.collections[-1].get_paths()[0].get_extents(axes.transData)
    assert axes.lines[0].get_markersize() * axes.figure.dpi / 72 < 0.6 * basin.width


def test_colours_become_monotonically_lighter() -> None:
    """Low and high values are distinguishable in grey and with colour blindness."""
    lightness = COLOUR_MAP(np.linspace(0, 1, 50))[:, :3] @ np.array([0.2126, 0.7152, 0.0722])
    assert (np.diff(lightness) > 0).all()
    assert [position for position, _ in BASIN] == sorted(position for position, _ in BASIN)


def test_errors_are_in_per_cent() -> None:
    assert shown_tick(0.025, "train_error") == "2.5 %"


@pytest.mark.parametrize("draw", [contours, surfaces])
def test_panels_have_titles_and_values_and_share_one_colour_bar(draw: Callable[..., Figure]) -> None:
    figure = draw(PANELS, title="Four ways")
    said = words(figure)
    assert all(word in said for word in ("FedAvg", "FedSAM", "sharp", "flat", "training loss"))
    assert len(figure.axes) == 3
    assert len(np.unique(pixels(figure).reshape(-1, 3), axis=0)) > 100


def test_the_same_value_has_the_same_colour_in_every_panel() -> None:
    one, other = (axes.collections for axes in contours(PANELS).axes[:2])
    for mine, theirs in zip(one, other, strict=True):  # filled levels, fine lines, the common line
        np.testing.assert_array_equal(mine.levels, theirs.levels)
        assert (mine.norm.vmin, mine.norm.vmax) == (theirs.norm.vmin, theirs.norm.vmax)


def test_non_finite_values_are_grey_and_reported() -> None:
    broken = bowl(0.1, 1.0)
    broken.values["train_loss"][:4, :] = math.nan
    figure = contours([Panel("broken", broken)])
    assert "44 of 121 values are not finite (grey)" in figure.get_supxlabel()
    image = pixels(figure).astype(int)
    grey = (np.abs(image - np.array([0xC9, 0xC4, 0xBD])) < 3).all(2)
    assert grey.mean() > 0.1
    assert "not finite" in surfaces([Panel("broken", broken)]).get_supxlabel()


def test_a_plane_names_its_models() -> None:
    plane = bowl(0.1, 1.0)
    plane = Landscape(
        "plane",
        plane.axes,
        plane.values,
        (Mark("global", (0.0, 0.0)), Mark("client", (0.5, 0.0)), Mark("far", (0.1, 0.8), 0.3)),
    )
    figure = plane_picture(plane)
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["global", "client", "far (0.3 from the plane)"]
    assert {"training loss", "test error"} <= {axes.get_title(loc="left") for axes in figure.axes}


def test_lines_and_paths() -> None:
    assert len(lines([Panel("a", line(0.1)), Panel("b", line(0.2))]).axes[0].lines) == 2
    figure = path_picture(way())
    assert [axes.get_title(loc="right") for axes in figure.axes] == ["barrier 0.25", "no barrier"]


def test_wrong_dimensions_are_rejected() -> None:
    with pytest.raises(UserError, match="2 dimensions, but a has 1"):
        contours([Panel("a", line(0.1))])
    with pytest.raises(UserError, match="no landscape"):
        lines([])


def test_panels_wrap_into_rows() -> None:
    figure = contours([Panel(str(n), bowl(0.1 * (n + 1), 1.0)) for n in range(5)])
    visible = [axes for axes in figure.axes if axes.get_visible()]
    assert len(visible) == 6
    assert len({round(axes.get_subplotspec().rowspan.start) for axes in visible[:5]}) == 2


def test_models_have_the_styles_of_their_algorithms() -> None:
    fedavg, fedsam = line_styles(["FedAvg", "FedSAM"]).values()
    marks = [axes.lines[-1] for draw in (contours, surfaces) for axes in draw(PANELS).axes[:2]]
    ends = path_picture(replace(way(), marks=(Mark("FedSAM", (0.0,)), Mark("FedAvg", (1.0,))))).axes[0].lines[-2:]
    for mark, style in zip([*marks, *ends], (fedavg, fedsam, fedavg, fedsam, fedsam, fedavg), strict=True):
        assert (mark.get_color(), mark.get_marker()) == (style.colour, style.marker)
    plane = replace(bowl(0.1, 3.0), kind="plane", marks=tuple(Mark(name, (0.1, 0.1)) for name in ("FedSAM", "FedAvg")))
    for draw in (contours, surfaces):  # given styles hold for the models of planes, too
        axes = draw([Panel("plane", plane)], styles={"FedSAM": fedavg, "FedAvg": fedsam}).axes[0]
        assert [mark.get_color() for mark in axes.lines[-2:]] == [fedavg.colour, fedsam.colour]


def test_figures_describe_their_models() -> None:
    around = replace(bowl(0.1, 3.0), metadata={"described": "server model, seed 0, round 9"})
    assert "server model, seed 0, round 9" in words(around.plot())
    descriptions = {"a": "server model, seed 0, round 9", "b": "wima model, seed 1, round 9"}
    path = replace(way(), metadata={"descriptions": descriptions})
    plane = replace(around, kind="plane", marks=(Mark("a", (0.0, 0.0)), Mark("b", (1.0, 0.0), distance=0.5)))
    plane = replace(plane, metadata={"descriptions": descriptions})
    for figure, note in (
        (path.plot(), ""),
        (plane.plot(), " (0.5 from the plane)"),
        (surfaces([Panel("", plane)]), ""),
    ):
        first, second = (text.get_text() for text in figure.legends[0].get_texts())
        assert first == "a (server model, seed 0, round 9)"
        assert second.startswith("b (wima model, seed 1, round 9)") and second.endswith(note)
    assert "a: server model, seed 0, round 9; b: wima" in landscape_page([Panel("", plane)])
    same = replace(plane, metadata={"descriptions": dict.fromkeys("ab", "server model, seed 0, round 9")})
    assert plane_picture(same).legends[0].get_title().get_text() == "server model, seed 0, round 9"


def test_the_names_on_a_path_do_not_overlap_and_rounding_is_no_barrier() -> None:
    straight = replace(way(), values={"test_error": np.array([0.1, 0.15, 0.2 + 1e-17, 0.25 + 3e-17, 0.3])})
    figure = path_picture(replace(straight, marks=(Mark("a" * 40, (0.0,)), Mark("b" * 30, (1.0,)))))
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a" * 40, "b" * 30]
    assert figure.axes[0].get_title(loc="right") == "no barrier" and not figure.axes[0].texts


def test_the_page_contains_everything_once() -> None:
    page = landscape_page(PANELS, title="FedAvg & FedSAM")
    assert not re.search(r"<script[^>]+src=", page)
    assert page.count("plotly.js v") == 1
    assert page.count("Plotly.newPlot(") == 4
    assert page.count('"displaylogo": false, "showSendToCloud": false') == 4
    assert page.count("direction 1 (filter norms)") == page.count("direction 2 (filter norms)") == 4
    fedavg, fedsam = line_styles(["FedAvg", "FedSAM"]).values()
    for colour, symbol in ((fedavg.colour, "circle"), (fedsam.colour, "square")):
        assert page.count(f'"color":"{colour}"') == page.count(f'"symbol":"{symbol}"') == 2
    assert "<h1>FedAvg &amp; FedSAM</h1>" in page
    assert "FedSAM" in page


def test_the_page_says_that_surfaces_lack_some_markers() -> None:
    page = landscape_page([Panel("fedmoswa", bowl(0.1, 1.0))])
    surface, contours = page.split("Plotly.newPlot(")[1:]
    assert '"symbol":"circle"' in surface and '"symbol":"triangle-up"' in contours
    assert "Surfaces mark models with triangles and stars by circles." in page
    assert "by circles" not in landscape_page(PANELS)


def test_the_page_states_what_it_omits() -> None:
    broken = bowl(0.1, 1.0)
    broken.values["train_loss"][0, 0] = math.inf
    page = landscape_page([Panel("broken", broken)])
    assert "1 of 121 values are not finite" in page
    assert "Infinity" not in page.split("Plotly.newPlot(")[1]


def test_lines_have_a_page_too() -> None:
    steep = line(0.3)
    steep.values["train_loss"][0] = 1e6
    page = landscape_page([Panel("FedAvg", line(0.1), "server model, round 9"), Panel("FedSAM", steep)])
    assert "are drawn as" not in page  # lines show values beyond the scale of contours
    assert "FedAvg\\u003cbr\\u003eserver model, round 9" in page and "distance along the direction" in page
    for style, symbol in zip(line_styles(["FedAvg", "FedSAM"]).values(), ("circle", "square"), strict=True):
        assert f'"color":"{style.colour}"' in page and f'"symbol":"{symbol}"' in page
    with pytest.raises(UserError, match="cannot share a page"):
        landscape_page([Panel("a", line(0.1)), PANELS[0]])


def test_landscapes_of_modules_have_units_and_marked_models() -> None:
    torch.manual_seed(0)
    modules = {name: nn.Linear(4, 3) for name in ("global", "client", "averaged")}
    objective = Objective(modules["global"], cross_entropy, (torch.randn(9, 4), torch.arange(9) % 3))
    around = landscape_of(objective, points=3)
    axes = contours([Panel("global", around, "a caption")]).axes[0]
    assert axes.get_xlabel() == "direction 1 (filter norms)\na caption"
    assert axes.get_ylabel() == "direction 2 (filter norms)"
    assert "Plotly.newPlot(" in landscape_page([Panel("global", around)])
    plane = plane_of(objective, modules, points=3)
    axes = plane.plot().axes[0]
    assert axes.get_xlabel().startswith("x (distance in weight space)") and "weight space" in axes.get_ylabel()
    surface = surfaces([Panel("plane", plane)])
    drawn = {line.get_label(): line.get_data_3d() for line in surface.axes[0].get_lines()}
    assert [text.get_text() for text in surface.legends[0].get_texts()] == list(drawn) == list(modules)
    for mark in plane.marks:
        assert [float(values[0]) for values in drawn[mark.name]][:2] == pytest.approx(mark.position)
    with pytest.raises(UserError, match=r"Linear; expected an Objective.*flatness.landscape\(module, loss, data\)"):
        landscape_of(modules["global"])
