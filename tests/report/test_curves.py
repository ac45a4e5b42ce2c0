"""Curves of few and of many runs are distinguishable, and their labels stay inside the figure."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from fedflat.flatness.landscapes.grid import Landscape
from fedflat.reporting.figures.bars import grouped_bars
from fedflat.reporting.figures.clients import constants_picture, gap_picture
from fedflat.reporting.figures.curves import curves, mark_targets
from fedflat.reporting.figures.flatness_log import log_picture
from fedflat.reporting.figures.landscapes import Panel, contours
from fedflat.reporting.figures.paper_figures import curve_figure, rank_figure
from fedflat.reporting.figures.style import COLOURS, late_limits, line_styles


def history(end: float, late: float = 1.0) -> list[dict[str, Any]]:
    """Accuracy that rises from 0.1 to its end."""
    return [
        {"round": r, "test": {"server": {"loss": 1.0, "accuracy": 0.1 + (end - 0.1) * (r / 200) ** late}}}
        for r in range(0, 201, 20)
    ]


def drawn(ends: list[float], metric: str = "accuracy") -> Figure:
    return curves(
        [(f"algorithm-{i} (active mean)", [history(end, 0.3)], "server") for i, end in enumerate(ends)], metric
    )


@pytest.mark.parametrize("count", [len(COLOURS), len(COLOURS) + 1, 100])
def test_everything_lies_inside_the_figure(count: int) -> None:
    figure = drawn([0.5 + 0.4 * i / count for i in range(count)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a legend that leaves no room for the curves only raises a warning
        FigureCanvasAgg(figure).draw()
    axes = figure.axes[0]
    (legend,) = [*figure.legends, *filter(None, [axes.get_legend()])]
    assert len(legend.get_texts()) == count
    whole, box = figure.bbox, legend.get_window_extent()
    assert whole.x0 <= box.x0 and box.x1 <= whole.x1 and whole.y0 <= box.y0 and box.y1 <= whole.y1
    assert whole.height < 800  # a long legend has columns
    assert axes.get_window_extent().width > 600 and axes.get_window_extent().height > 0.8 * whole.height
    assert (box.x0 > axes.get_window_extent().x1) == (
        count > len(COLOURS)
    )  # a long legend stands beside the curves, not over them


def test_the_legend_explains_bands_over_seeds() -> None:
    lines = [("fedavg", [history(0.5, 0.3), history(0.6, 0.3)], "server")]
    legend = curves(lines, "accuracy").axes[0].get_legend()
    assert legend is not None and "band: ± standard deviation" in legend.get_title().get_text()
    single_seed = drawn([0.5]).axes[0].get_legend()
    assert single_seed is not None and single_seed.get_title().get_text() == "number: last value in per cent"
    loss = drawn([0.5], "loss").axes[0].get_legend()
    assert loss is not None and loss.get_title().get_text() == "number: last value"


def test_bands_of_accuracies_end_at_100_percent() -> None:
    axes = curves([("fedavg", [history(0.8, 0.3), history(1.0, 0.3)], "server")], "accuracy").axes[0]
    band = np.concatenate([path.vertices for path in axes.collections[0].get_paths()])
    assert band[:, 1].max() == 100 and axes.get_ylim()[1] < 103


def test_bands_appear_only_where_their_line_is_visible() -> None:
    """The first line is outside the axis at the first point, but one end of its band is not."""
    early, late = 30.0, [2.0, 1.9, 1.8, 1.7, 1.6, 1.50]
    losses = {seed: [early * seed, *late] for seed in (0.01, 1)}
    histories = [
        [{"round": r, "test": {"server": {"rmse": value}}} for r, value in enumerate(values)]
        for values in losses.values()
    ]
    axes = curves([("fedavg", histories, "server")], "rmse").axes[0]
    assert axes.get_ylim()[1] < 10
    drawn_band = np.concatenate([path.vertices for path in axes.collections[0].get_paths()])
    assert drawn_band[:, 0].min() == 1
    legend = axes.get_legend()
    assert legend is not None and legend.get_texts()[0].get_text().endswith(" 1.500")


def test_the_direction_of_a_metric_decides_which_values_are_visible() -> None:
    """R² rises although it is no percentage, and only the run knows the direction of its task's own metric."""
    rising, falling = [-9.0, *[0.1, 0.2, 0.3] * 4], [9.0, *[0.3, 0.2, 0.1] * 4]
    for metric, values, lower_is_better in (("r2", rising, None), ("mine", falling, True), ("mine", rising, None)):
        points = [{"round": r, "test": {"server": {metric: value}}} for r, value in enumerate(values)]
        low, high = curves([("fedavg", [points], "server")], metric, "round", lower_is_better).axes[0].get_ylim()
        assert -1 < low < 0.1 and 0.3 < high < 1


@pytest.mark.parametrize("values", [[0.1, 0.5, 0.6, 0.7, 0.58, 0.8], [0.1, *[0.5, 0.8] * 20]])
def test_the_legend_does_not_cover_the_curves(values: list[float]) -> None:
    points = [{"round": r, "test": {"server": {"accuracy": a}}} for r, a in enumerate(values)]
    figure = curves([("fedavg", [points], "server")], "accuracy")
    FigureCanvasAgg(figure).draw()
    (axes,) = figure.axes
    legend = axes.get_legend()
    assert legend is not None
    assert not legend.get_window_extent().count_contains(axes.transData.transform(axes.lines[0].get_xydata()))


def test_targets_are_marked_inside_the_axis() -> None:
    figure = drawn([0.80, 0.81])
    limits, lines = figure.axes[0].get_ylim(), len(figure.axes[0].lines)
    mark_targets(figure, [0.7, 0.3], "accuracy")
    (target,) = figure.axes[0].lines[lines:]
    assert list(target.get_ydata()) == [70, 70] and figure.axes[0].get_ylim() == limits


@pytest.mark.parametrize("last", [1, 3, 20, 23, 99, 150])
def test_round_labels_are_integers_and_include_the_last_round(last: int) -> None:
    rounds = [{"round": r, "test": {"server": {"accuracy": 0.5 + r / 500}}} for r in range(1, last + 1)]
    ticks = curves([("fedavg", [rounds], "server")], "accuracy").axes[0].get_xticks()
    assert not (ticks % 1).any() and ticks[-1] == last and (np.diff(ticks) > 0).all()
    assert 2 <= len(ticks) <= 10


def test_forty_lines_are_distinct_and_the_legend_is_sorted_by_last_value() -> None:
    figure = drawn([0.5 + 0.4 * (7 * i % 40) / 40 for i in range(40)])
    looks = {(line.get_color(), line.get_linestyle(), line.get_marker()) for line in figure.axes[0].lines}
    assert len(looks) == 40
    ends = [float(text.get_text().split()[-1]) for text in figure.legends[0].get_texts()]
    assert ends == sorted(ends, reverse=True)


def test_early_values_near_the_others_stay_visible() -> None:
    late = [0.80, 0.85, 0.9, 0.9]
    low, _ = late_limits([np.array([0.75, 0.78, *late])], lower_is_better=False) or (1, 1)
    assert low < 0.75
    low, _ = late_limits([np.array([0.70, 0.78, *late])], lower_is_better=False) or (0, 0)
    assert low > 0.75


def test_collapsed_runs_do_not_compress_the_axis() -> None:
    figure = drawn([0.1, 0.1] + [0.7 + 0.01 * i for i in range(18)])
    low, high = figure.axes[0].get_ylim()
    assert low > 30 and 85 < high < 90
    assert [text.get_text().split()[-1] for text in figure.legends[0].get_texts()][-2:] == ["10.0", "10.0"]
    few = drawn([0.1, 0.8])
    assert few.axes[0].get_ylim()[0] < 10  # with two curves, the range includes both


def test_each_algorithm_has_one_colour_and_marker() -> None:
    demo = ["fedavg", "fedavg+wima(window=20)", "fedsam", "scaffold", "fedswa", "fedmoswa"]
    styles = line_styles(demo)
    assert len({style.colour for style in styles.values()}) == len({style.marker for style in styles.values()}) == 6
    for name in ("scaffold", "fedmoswa"):
        (alone,) = line_styles([f"{name}, seed 3"]).values()
        assert alone == styles[name] == line_styles(reversed(demo))[name]
    variants = line_styles(["fedsam, round 3", "fedsam", "fedavg, lr=0.1", "fedavg (seed 1)"])
    assert (variants["fedsam"], variants["fedavg, lr=0.1"]) == (styles["fedsam"], styles["fedavg"])
    assert len({style.colour for style in variants.values()}) == 4
    seeds = line_styles(f"{name} (seed {seed})" for seed in range(3) for name in demo)
    assert len(set(seeds.values())) == 18
    assert all(seeds[f"{name} (seed {seed})"].colour == styles[name].colour for seed in range(3) for name in demo)
    figure = curves([(name, [history(0.8)], "server") for name in demo], "accuracy")
    drawn_styles = [(line.get_color(), line.get_marker()) for line in figure.axes[0].lines]
    assert drawn_styles == [(style.colour, style.marker) for style in styles.values()]
    assert len({(style.colour, style.marker) for style in line_styles(map(str, range(64))).values()}) == 64


def test_the_range_shows_late_differences_and_the_best_value() -> None:
    low, high = drawn([0.80, 0.81]).axes[0].get_ylim()
    assert 50 < low < 60 and 81 < high < 83  # the curves are at 59 % after a third of the rounds
    falling = np.array([9.0, 4.0, 1.0, 0.5, 0.4, 0.6])
    low, high = late_limits([falling], lower_is_better=True)
    assert 0.3 < low < 0.4 and 1.0 < high < 1.2
    peak = np.array([0.1, 0.9, 0.5, 0.5, 0.5, 0.6])
    assert late_limits([peak], lower_is_better=False)[1] > 0.9
    assert late_limits([], lower_is_better=False) is None


def test_without_data_the_figure_is_empty() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of matplotlib, about an empty legend
        for count in (1, 20):
            assert not curves([(str(i), [[]], "server") for i in range(count)], "accuracy").axes[0].lines


def is_readable(figure: Figure) -> bool:
    """Whether titles and legends lie inside the figure, and no legend covers most of a panel."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a legend that leaves no room for the panels only raises a warning
        figure.draw_without_rendering()
    panels = [axes.get_window_extent() for axes in figure.axes if axes.get_legend()]
    legends = [axes.get_legend().get_window_extent() for axes in figure.axes if axes.get_legend()]
    titles = [axes.title for axes in figure.axes if axes.get_title()] + figure.texts
    boxes = [*legends, *(item.get_window_extent() for item in [*titles, *figure.legends])]
    is_free = all(
        legend.width < 0.8 * panel.width and legend.height < 0.8 * panel.height
        for legend, panel in zip(legends, panels, strict=True)
    )
    whole = figure.bbox.padded(2)
    return (
        is_free
        and all(whole.x0 <= box.x0 and whole.y0 <= box.y0 for box in boxes)
        and all(box.x1 <= whole.x1 and box.y1 <= whole.y1 for box in boxes)
    )


LONG = "fedmoswa(rho=0.05,alpha=0.9,momentum=0.95,variant=released)+wima(window=20)+swa(start=0.75,every=5)"


def test_figures_have_room_for_many_and_for_long_names() -> None:
    names = [LONG, *(f"algorithm-{i}" for i in range(9))]
    losses = [{"round": r, "train_loss": 1.0, "test_loss": 1.0 + r} for r in (0, 5)]
    square = Landscape("around", ((-1.0, 0.0, 1.0),) * 2, {"train_loss": np.array([[2.0, 1.0, 2.0]] * 3)})
    constants = {"lipschitz": 1e3, "smoothness": 1.0, "noise": 1e-9, "heterogeneity": 0.0}
    figures = {
        "curves": curves([(LONG, [history(0.5, 0.3)], "server")], "accuracy"),
        "gap": gap_picture(dict.fromkeys(names, losses), "title"),
        "constants": constants_picture([{"round": 0, "constants": constants}], f"{LONG}, seed 0"),
        "contours": contours([Panel(name, square) for name in names[:2]]),
    }
    assert [name for name, figure in figures.items() if not is_readable(figure)] == []
    (axes,) = figures["constants"].axes
    assert any(label.get_text() for label in axes.get_yticklabels())  # also over many decades


def test_labels_of_rows_leave_room_for_the_ranks() -> None:
    lines = [{"label": LONG, "row": 0, "each": [1, 2], "mean": 1.5}] * 4
    figure = rank_figure({"rows": [{"style": 0}], "ranks": {"lines": lines, "critical": None}})
    figure.draw_without_rendering()
    (axes,) = figure.axes
    labels = [label.get_window_extent() for label in axes.get_yticklabels()]
    assert axes.get_window_extent().width > figure.bbox.width / 2 and min(box.x0 for box in labels) >= 0
    assert all(upper.y0 >= lower.y1 for upper, lower in itertools.pairwise(labels))
    assert axes.xaxis.label.get_window_extent().x1 <= figure.bbox.x1


@pytest.mark.parametrize("draw", ["comparison", "report"])
def test_bands_are_inside_the_axis(draw: str) -> None:
    mean, std = np.linspace(0.4, 0.7, 11), np.full(11, 0.2)
    if draw == "comparison":
        histories = [
            [{"round": r, "test": {"server": {"accuracy": a + sign * 0.14}}} for r, a in enumerate(mean)]
            for sign in (-1, 1)
        ]
        figure = curves([("fedavg", histories, "server")], "accuracy")
    else:
        curve = {"metrics": {"accuracy": {"mean": mean, "std": std}}, "over": {"round": np.arange(11)}}
        rows = [{"number": 0, "label": "fedavg", "style": 0}]
        section = {"metric": "accuracy", "lower_is_better": False, "rows": rows, "ranks": None, "curves": [curve]}
        figure = curve_figure(section, "round")
    assert figure.axes[0].get_ylim()[1] > 90


def test_bars_with_the_same_colour_have_different_patterns() -> None:
    bars = grouped_bars(["a"], {str(row): {"a": (1.0, None)} for row in range(20)}, "accuracy").axes[0].patches
    assert len({(bar.get_facecolor(), bar.get_hatch()) for bar in bars}) == 20


def test_a_single_round_has_a_whole_number() -> None:
    at_start = [("fedavg", [history(0.5)[:1]], "server")]
    for figure in (curves(at_start, "accuracy"), log_picture({"fedavg": {"lambda_max": [(0, 1.0)]}})):
        (axes,) = figure.axes
        low, high = axes.get_xlim()
        assert [tick for tick in axes.get_xticks() if low <= tick <= high] == [0]
