"""Vector figures of a report: curves, paired differences, ranks, the partition and flatness."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fedflat.reporting.figures.spectrum import format_eigenvalue_axes
from fedflat.reporting.figures.style import (
    LineStyle,
    add_legend,
    add_outer_legend,
    label_rounds,
    limit_to_late,
    marker_spacing,
    metric_label,
    open_frame,
    plotted_factor,
    wrapped,
)
from fedflat.reporting.page.document import AXES, SUMMARY_LABELS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from fedflat.flatness.landscapes.grid import Landscape

MAX_LINES = 16
"""Maximum number of rows in a figure; the best are shown."""
ROW_CHARACTERS = 30
"""Characters in a line of a row's label."""

Values = Mapping[str, Any]


def figures_of(
    section: Values, by: str, landscapes: Mapping[str, Landscape] | None = None, targets: Sequence[float] = ()
) -> dict[str, Figure]:
    """Draw all figures of a report's section, and return them by name.

    Args:
        section: a section of ``report_document``: the runs with one dataset and partition.
        by: summary value by which runs are compared: ``mean_last``, ``last``, ``best`` or ``at_best_validation``.
        landscapes: the section's two-dimensional landscapes by name; default: none.
        targets: values of the metric that curves show as horizontal lines.
    """
    from fedflat.reporting.figures.curves import mark_targets
    from fedflat.reporting.figures.partition import partition_picture

    figures: dict[str, Figure] = {}
    if _plotted_rows(section):
        figures = {f"curves-{axis}": curve_figure(section, axis) for axis in AXES}
        for figure in figures.values():
            mark_targets(figure, targets, section["metric"])
    if any(difference["pair"] for difference in section["differences"]):
        figures["differences"] = difference_figure(section, by)
    if section["ranks"]:
        figures["ranks"] = rank_figure(section)
    counts = section["partition"]["class_counts"]  # examples per client and class
    classes = [str(label) for label in range(len(counts[0]))]
    figures["partition"] = partition_picture(counts, classes, section["name"])
    return figures | _flatness_figures(section, landscapes or {})


def _flatness_figures(section: Values, landscapes: Mapping[str, Landscape]) -> dict[str, Figure]:
    """Draw the section's flatness measurements, if it has any: flatness over rounds, spectra and landscapes."""
    from fedflat.reporting.figures.flatness_log import log_picture
    from fedflat.reporting.figures.landscape_panels import panels_of
    from fedflat.reporting.figures.landscapes import contours, surfaces

    styles = {row["label"]: LineStyle(row["style"]) for row in section["rows"]}
    figures = {}
    if section["views"]["log"]:
        logs: dict[str, dict[str, list[tuple[int, float]]]] = {}
        for name, quantity in section["views"]["log"].items():
            for line in quantity["lines"]:
                label = section["rows"][line["row"]]["label"]
                logs.setdefault(label, {})[name] = list(zip(line["x"], line["y"], strict=True))
        figures["flatness-log"] = log_picture(logs, styles)
    if section["views"]["spectra"]:
        figures["spectra"] = eigenvalue_figure(section["views"]["spectra"])
    if section["views"]["rises"]:
        figures["sharpness"] = rise_figure(section["views"]["rises"])
    panels = panels_of(landscapes)
    if panels:
        figures |= {"contours": contours(panels, styles=styles), "surfaces": surfaces(panels, styles=styles)}
    return figures


def eigenvalue_figure(spectra: Sequence[Values]) -> Figure:
    """Plot the largest eigenvalues of each model, on a logarithmic axis if all are positive.

    ``spectra`` is the report's list of spectra, with label, description, style and eigenvalues of each model.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.2, 3.8), layout="constrained")
    axes = figure.subplots()
    for spectrum in spectra[:MAX_LINES]:
        description = f" ({spectrum['described']})" if spectrum["described"] else ""
        ranks, style = range(1, len(spectrum["eigenvalues"]) + 1), LineStyle(spectrum["style"])
        axes.plot(
            ranks,
            spectrum["eigenvalues"],
            **style.line,
            markevery=marker_spacing(len(ranks)),
            lw=1.5,
            label=f"{spectrum['label']}{description}",
        )
    is_log = all(eigenvalue > 0 for spectrum in spectra for eigenvalue in spectrum["eigenvalues"])
    format_eigenvalue_axes(axes, {spectrum["matrix"] for spectrum in spectra}, is_log)
    _style(axes)
    add_legend(axes, fontsize=8)
    return figure


def rise_figure(rises: Mapping[str, Sequence[Values]]) -> Figure:
    """Plot the rise of the loss over the radius rho: one panel per kind of sharpness, one line per model.

    ``rises`` holds the lines by kind, each with label, style, radii ``x``, rises ``y`` and, for means over seeds,
    standard deviations ``std``, which become error bars.
    """
    from matplotlib.figure import Figure

    from fedflat.reporting.figures.sharpness import scale_rises

    figure = Figure(figsize=(max(6.2, 3.4 * len(rises)), 3.8), layout="constrained")
    for axes, (kind, lines) in zip(figure.subplots(1, len(rises), squeeze=False)[0], rises.items(), strict=True):
        for line in lines[:MAX_LINES]:
            bars = None
            if "std" in line:  # on a logarithmic axis, a bar must end above 0
                y, std = np.array(line["y"], dtype=float), np.array(line["std"], dtype=float)
                bars = [np.where(std < y, std, np.maximum(0.9 * y, 0)), std]
            style = LineStyle(line["style"]).line
            axes.errorbar(line["x"], line["y"], bars, **style, lw=1.5, elinewidth=1, label=line["label"])
        axes.set_title(kind, loc="left", fontsize=9.5)
        scale_rises(axes)
        _style(axes)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    add_outer_legend(figure, handles=handles, labels=labels, fontsize=8, ncols=2)
    return figure


def _plotted_rows(section: Values) -> list[int]:
    """Return the numbers of up to ``MAX_LINES`` rows with curves: best rank first, or in table order without ranks."""
    if section["ranks"]:
        numbers = [line["row"] for line in section["ranks"]["lines"]]
    else:
        numbers = [row["number"] for row in section["rows"]]
    return [number for number in numbers if section["curves"][number]["metrics"]][:MAX_LINES]


def curve_figure(section: Values, axis: str) -> Figure:
    """Plot the metric of a section over ``axis``, one of ``AXES`` (rounds or a cost).

    Lines are means over seeds, and bands show one standard deviation.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.2, 3.8), layout="constrained")
    axes, metric = figure.subplots(), section["metric"]
    scale, bounds, last_round = plotted_factor(metric), [], 0
    for number in _plotted_rows(section):
        curve = section["curves"][number]
        values = curve["metrics"].get(metric)
        if values is None:
            continue
        x = np.array(curve["over"][axis], dtype=float)
        mean, std = (scale * np.array(values[name], dtype=float) for name in ("mean", "std"))
        style, label = _style_of(section, number), section["rows"][number]["label"]
        axes.plot(x, mean, **style.line, markevery=marker_spacing(len(x)), lw=1.5, label=label)
        lower, upper = mean - std, np.minimum(mean + std, 100 if scale == 100 else np.inf)
        axes.fill_between(x, lower, upper, color=style.colour, alpha=0.13, lw=0)
        bounds += [lower, upper]
        last_round = max(last_round, round(x[-1]))
    axes.set_xlabel(AXES[axis] + limit_to_late(axes, bounds, section["lower_is_better"]))
    if axis == "round" and last_round:
        label_rounds(axes, last_round)
    axes.set_ylabel(metric_label(metric))
    _style(axes)
    add_legend(axes, fontsize=8)
    return figure


def difference_figure(section: Values, by: str) -> Figure:
    """Plot the differences of rows from the baseline, paired by seed.

    Each row has a marker at the mean, a small circle per seed, a thick line for the bootstrap interval and a thin one
    for Student's t interval. ``by`` names the compared summary value.
    """
    scale = plotted_factor(section["metric"])
    differences = [difference for difference in section["differences"] if difference["pair"]][:MAX_LINES]
    figure, axes = _row_axes([difference["label"] for difference in differences])
    for y, difference in enumerate(differences):
        pair, style = difference["pair"], _style_of(section, difference["row"])
        colour = style.colour
        intervals = ((pair["interval"], 5.0, 0.35), (pair["t_interval"], 1.0, 1.0))  # bounds, line width, opacity
        for bounds, width, alpha in intervals:
            if bounds:
                x = scale * np.array(bounds)
                axes.plot(x, [y, y], color=colour, lw=width, alpha=alpha, solid_capstyle="round")
        seeds = scale * np.array(pair["differences"])
        axes.plot(seeds, [y] * len(seeds), "o", ms=3, mfc="none", color=colour)
        axes.plot([scale * pair["mean"]], [y], style.marker, ms=5, color=colour)
    axes.axvline(0, color="#222222", lw=0.9)
    baseline = section["rows"][section["baseline"]]["label"]
    unit = " (percentage points)" if scale == 100 else ""
    axes.set_xlabel(f"difference from {baseline}{unit},\n{SUMMARY_LABELS[by]}", fontsize=9)
    return figure


def rank_figure(section: Values) -> Figure:
    """Plot the mean ranks of a section, the ranks at each seed, and Nemenyi's critical difference."""
    ranks = section["ranks"]
    lines: Sequence[Values] = ranks["lines"][:MAX_LINES]
    figure, axes = _row_axes([line["label"] for line in lines])
    for y, line in enumerate(lines):
        style = _style_of(section, line["row"])
        axes.plot(line["each"], [y] * len(line["each"]), "o", ms=3, mfc="none", color=style.colour)
        axes.plot([line["mean"]], [y], style.marker, ms=5.5, color=style.colour)
    critical, largest_difference = ranks["critical"], len(ranks["lines"]) - 1
    if critical is not None and critical < largest_difference:
        # A bar above the rows, as long as the critical difference.
        axes.plot([1, 1 + critical], [-0.8, -0.8], color="#222222", lw=1.2, marker="|")
        axes.text(1, -1.0, f"critical difference {critical:.2f}", fontsize=8, va="bottom", color="#444444")
        axes.set_ylim(len(lines) - 0.5, -1.8)
    axes.set_xlabel("mean rank over seeds, 1 is best", fontsize=9)
    return figure


def _row_axes(labels: Sequence[str]) -> tuple[Figure, Axes]:
    """Create a figure in which row y, counted from the top, is labelled ``labels[y]``."""
    from matplotlib.figure import Figure

    labels = [wrapped(label, ROW_CHARACTERS) for label in labels]
    row_height = 0.17 + 0.15 * max(label.count("\n") + 1 for label in labels)
    figure = Figure(figsize=(6.2, 0.9 + row_height * max(3, len(labels))), layout="constrained")
    axes = figure.subplots()
    axes.set_yticks(range(len(labels)), labels, fontsize=9)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    _style(axes)
    axes.tick_params(axis="y", length=0)
    return figure, axes


def _style(axes: Axes) -> None:
    open_frame(axes)
    axes.tick_params(which="both", labelsize=8.5)


def _style_of(section: Values, number: int) -> LineStyle:
    """Return the style of a row."""
    return LineStyle(section["rows"][number]["style"])
