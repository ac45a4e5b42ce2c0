"""Vector figures of a report: curves, paired differences, ranks and the partition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fedflat.reporting.page.document import AXES, FIGURES
from fedflat.units import is_share

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#b0508a", "#a67c00", "#3f9bd1", "#6f4aa0", "#4a4a4a")
"""Colour-blind safe (after Okabe and Ito); the same as on the page."""
DASHES = ("-", "--", ":", "-.")
MOST_LINES = 16
"""Maximum number of rows in a figure; the best are shown."""

Values = Mapping[str, Any]


def figures_of(section: Values, by: str) -> dict[str, Figure]:
    """All figures of a section, by name."""
    from fedflat.reporting.figures.partition import partition_picture

    found = {f"curves-{axis}": curve_figure(section, axis) for axis in AXES if _lines(section)}
    if any(one["pair"] for one in section["differences"]):
        found["differences"] = difference_figure(section, by)
    if section["ranks"]:
        found["ranks"] = rank_figure(section["ranks"])
    shown = section["partition"]["shown"]
    found["partition"] = partition_picture(shown, [str(label) for label in range(len(shown[0]))], section["name"])
    return found


def _lines(section: Values) -> list[int]:
    """The plotted rows, best first."""
    order = (
        [line["row"] for line in section["ranks"]["lines"]]
        if section["ranks"]
        else [row["number"] for row in section["rows"]]
    )
    return [number for number in order if section["curves"][number]["metrics"]][:MOST_LINES]


def curve_figure(section: Values, axis: str) -> Figure:
    """The metric of a section over rounds or cost: mean over seeds, and a band of one standard deviation."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.2, 3.8), layout="constrained")
    axes, metric = figure.subplots(), section["metric"]
    scale = 100 if is_share(metric) else 1
    for number in _lines(section):
        curve = section["curves"][number]
        values = curve["metrics"].get(metric)
        if values is None:
            continue
        x = np.array(curve["over"][axis], dtype=float)
        mean, std = (scale * np.array(values[name], dtype=float) for name in ("mean", "std"))
        axes.plot(x, mean, color=_colour(number), ls=_dash(number), lw=1.5, label=section["rows"][number]["label"])
        axes.fill_between(x, mean - std, mean + std, color=_colour(number), alpha=0.13, lw=0)
    axes.set_xlabel(AXES[axis])
    axes.set_ylabel(f"test {metric}" + (" (%)" if scale == 100 else ""))
    _quiet(axes)
    axes.legend(frameon=False, fontsize=8)
    return figure


def difference_figure(section: Values, by: str) -> Figure:
    """Paired differences to the baseline: mean, each seed, bootstrap and Student's interval."""
    scale = 100 if is_share(section["metric"]) else 1
    some = [one for one in section["differences"] if one["pair"]][:MOST_LINES]
    figure, axes = _rows([one["label"] for one in some])
    for place, one in enumerate(some):
        pair, colour = one["pair"], _colour(one["row"])
        for bounds, width, alpha in ((pair["interval"], 5.0, 0.35), (pair["t_interval"], 1.0, 1.0)):
            if bounds:
                axes.plot(
                    scale * np.array(bounds),
                    [place, place],
                    color=colour,
                    lw=width,
                    alpha=alpha,
                    solid_capstyle="round",
                )
        axes.plot(
            scale * np.array(pair["differences"]),
            [place] * len(pair["differences"]),
            "o",
            ms=3,
            mfc="none",
            color=colour,
        )
        axes.plot([scale * pair["mean"]], [place], "o", ms=5, color=colour)
    axes.axvline(0, color="#222222", lw=0.9)
    base = section["rows"][section["baseline"]]["label"]
    axes.set_xlabel(
        f"difference from {base}, {FIGURES[by]}{' (percentage points)' if scale == 100 else ''}", fontsize=9
    )
    return figure


def rank_figure(ranks: Values) -> Figure:
    """Mean ranks, with each seed's, and Nemenyi's critical difference."""
    lines: Sequence[Values] = ranks["lines"][:MOST_LINES]
    figure, axes = _rows([line["label"] for line in lines])
    for place, line in enumerate(lines):
        axes.plot(line["each"], [place] * len(line["each"]), "o", ms=3, mfc="none", color=_colour(line["row"]))
        axes.plot([line["mean"]], [place], "o", ms=5.5, color=_colour(line["row"]))
    if ranks["critical"] is not None and ranks["critical"] < len(ranks["lines"]) - 1:
        axes.plot([1, 1 + ranks["critical"]], [-0.8, -0.8], color="#222222", lw=1.2, marker="|")
        axes.text(1, -1.0, f"critical difference {ranks['critical']:.2f}", fontsize=8, va="bottom", color="#444444")
        axes.set_ylim(len(lines) - 0.5, -1.8)
    axes.set_xlabel("mean rank over seeds, 1 is best", fontsize=9)
    return figure


def _rows(labels: Sequence[str]) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.2, 0.9 + 0.32 * max(3, len(labels))), layout="constrained")
    axes = figure.subplots()
    axes.set_yticks(range(len(labels)), labels, fontsize=9)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    _quiet(axes)
    axes.tick_params(axis="y", length=0)
    return figure, axes


def _quiet(axes: Axes) -> None:
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8.5)


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def _dash(number: int) -> str:
    return DASHES[number // len(COLOURS) % len(DASHES)]
