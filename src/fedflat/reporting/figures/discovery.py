"""Figure of a search over algorithms: importance of the slots, and the Pareto fronts of metric and cost."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from fedflat.display import with_unit
from fedflat.experiment.campaign.sweep_file import PLACEHOLDER
from fedflat.reporting.figures.style import COLOURS, add_outer_legend, open_frame, plotted_factor

COSTS = {"bytes": "bytes sent", "backward_passes": "backward passes"}
"""The costs of a run, with their names in figures and tables."""


def discovery_figure(document: dict[str, Any]) -> Figure:
    """Plot the importance of every slot at each rung, and all candidates with both Pareto fronts.

    Args:
        document: the results, as in ``discover.json``.
    """
    figure = Figure(figsize=(13.5, 4.2), layout="constrained")
    importance, *fronts = figure.subplots(1, 3)
    _draw_importance(importance, document["importance"])
    scale = plotted_factor(document["metric"])
    for axes, (cost, label) in zip(fronts, COSTS.items(), strict=True):
        for number, (name, candidates) in enumerate(document["candidates"].items()):
            style = {"color": COLOURS[number % len(COLOURS)], "lw": 0.8, "alpha": 0.5}
            for candidate in candidates:
                costs, scores = candidate["costs"], candidate["scores"]
                evaluated = [rounds for rounds in costs if rounds in scores]
                values = [scale * scores[rounds] for rounds in evaluated]
                axes.plot([costs[rounds][cost] for rounds in evaluated], values, **style)
            axes.plot([], [], label=PLACEHOLDER.sub("...", name), **style)
        front = document["pareto"][cost]
        values = [scale * point["score"] for point in front]
        axes.plot([point[cost] for point in front], values, "k.-", lw=1.6, drawstyle="steps-post", label="Pareto front")
        axes.set_xlabel(label)
        axes.xaxis.set_major_formatter(EngFormatter())
        axes.set_ylabel(f"validation {with_unit(document['metric'])}")
        open_frame(axes)
    handles, labels = fronts[0].get_legend_handles_labels()
    add_outer_legend(figure, handles=handles, labels=labels, ncols=4)
    return figure


def _draw_importance(axes: Any, rungs: list[dict[str, Any]]) -> None:
    """Draw one group of bars per slot, with one bar per rung."""
    names = list(rungs[-1]["shares"])[::-1] if rungs else []
    for number, rung in enumerate(rungs):
        height = 0.8 / len(rungs)
        shares = [100 * rung["shares"].get(name, 0.0) for name in names]
        positions = np.arange(len(names)) - number * height
        axes.barh(positions, shares, height, color=COLOURS[number % len(COLOURS)], label=f"{rung['rounds']} rounds")
    axes.set_yticks(range(len(names)), [name.rpartition(".")[2] for name in names])
    missing = "fANOVA needs\nmore candidates, varied slots, or scikit-learn"
    axes.set_xlabel("share of the variance (fANOVA, %)" if rungs else missing)
    if rungs:
        axes.legend(fontsize=8, frameon=False)
    open_frame(axes)
