"""The figure of the flatness study: rank correlations of all measures with the gap, with intervals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flatness_analysis import CONTROLS
from matplotlib.figure import Figure

PANELS = {"across": "all models", "partial": "controlling for training loss", "within": "within families"}
MARKERS = "os^Dv"
DATASET_NAMES = {"digits": "digits", "fashion_mnist": "Fashion-MNIST", "cifar10": "CIFAR-10 (check)"}
"""In the order of the legend."""


def correlation_figure(cells: Mapping[str, Any], comparison: str) -> Figure | None:
    """One panel per kind of correlation; one row per measure; one marker per dataset and level of heterogeneity.

    Filled markers have a Holm-adjusted p-value below 5 %. None if no cell has this comparison.
    """
    shown = [cell for cell in cells.values() if cell["comparison"] == comparison]
    if not shown:
        return None
    shown.sort(key=lambda cell: [*DATASET_NAMES].index(cell["dataset"]))
    measures = list(shown[0]["across"]["gap"])
    measures.sort(key=lambda name: name in CONTROLS)
    figure = Figure(figsize=(10, 0.34 * len(measures) + 1.3), layout="constrained")
    axes = figure.subplots(1, len(PANELS), sharey=True)
    for panel, (kind, title) in zip(axes, PANELS.items(), strict=True):
        panel.axvline(0, color="0.6", lw=0.8)
        for number, cell in enumerate(shown):
            shift = 0.6 * ((number + 0.5) / len(shown) - 0.5)
            for row, measure in enumerate(measures):
                _draw_interval(panel, row + shift, cell[kind]["gap"][measure], number)
        panel.set(xlim=(-1, 1), title=title, xlabel="rank correlation with the gap")
        panel.grid(axis="y", alpha=0.2)
        panel.axhline(len(measures) - len(CONTROLS) - 0.5, color="0.6", lw=0.8)
    axes[0].set_yticks(range(len(measures)), [name.replace("_", " ") for name in measures])
    axes[0].invert_yaxis()
    labels = [f"{DATASET_NAMES[cell['dataset']]}, α = {cell['alpha']:g}" for cell in shown]
    handles = [axes[0].plot([], [], MARKERS[number], color=f"C{number}", ms=4)[0] for number in range(len(shown))]
    figure.legend(handles, labels, loc="outside lower center", ncols=len(shown), frameon=False)
    return figure


def _draw_interval(panel: Any, y: float, row: Mapping[str, float | None], number: int) -> None:
    """A correlation with its 95 % interval, unless it is not defined."""
    if row["value"] is None:
        return
    colour = f"C{number}"
    is_significant = (row.get("holm") if row.get("holm") is not None else 1.0) < 0.05
    panel.plot([row["low"], row["high"]], [y, y], color=colour, lw=1)
    panel.plot(row["value"], y, MARKERS[number], color=colour, ms=4, mfc=colour if is_significant else "white")
