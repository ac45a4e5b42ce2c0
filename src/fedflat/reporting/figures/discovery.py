"""Figure of a search over algorithms: importance of the slots, and the Pareto fronts of metric and cost."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.figure import Figure

from fedflat.display import is_share, with_unit
from fedflat.reporting.figures.style import COLOURS, open_frame

COST_LABELS = {"bytes": "bytes sent", "backward_passes": "backward passes"}


def discovery_figure(document: dict[str, Any]) -> Figure:
    """Plot the importance of every slot at each rung, and all complete candidates with both Pareto fronts.

    Args:
        document: the results, as in ``discover.json``.
    """
    figure = Figure(figsize=(13.5, 4.2), layout="constrained")
    importance, *fronts = figure.subplots(1, 3)
    _draw_importance(importance, document["importance"])
    scale = 100 if is_share(document["metric"]) else 1
    for axes, (cost, label) in zip(fronts, COST_LABELS.items(), strict=True):
        for number, (name, candidates) in enumerate(document["candidates"].items()):
            complete = [candidate for candidate in candidates if candidate["state"] == "complete"]
            points = [(candidate[cost], scale * candidate["score"]) for candidate in complete]
            axes.scatter(*np.array(points).reshape(-1, 2).T, s=14, color=COLOURS[number % len(COLOURS)], label=name)
        front = [(candidate[cost], scale * candidate["score"]) for candidate in document["pareto"][cost]]
        axes.plot(*np.array(front).reshape(-1, 2).T, drawstyle="steps-post", color="#4a4a4a", lw=1)
        axes.set_xlabel(label)
        axes.set_ylabel(f"validation {with_unit(document['metric'])}")
        open_frame(axes)
    fronts[0].legend(fontsize=8, frameon=False)
    return figure


def _draw_importance(axes: Any, rungs: list[dict[str, Any]]) -> None:
    """Draw one group of bars per slot, with one bar per rung."""
    names = list(rungs[-1]["shares"])[::-1] if rungs else []
    for number, rung in enumerate(rungs):
        height = 0.8 / len(rungs)
        shares = [100 * rung["shares"].get(name, 0.0) for name in names]
        positions = np.arange(len(names)) - number * height
        axes.barh(positions, shares, height, color=COLOURS[number % len(COLOURS)], label=f"{rung['rounds']} rounds")
    axes.set_yticks(range(len(names)), names)
    axes.set_xlabel("importance of the slot (fANOVA, %)" if rungs else "too few candidates for fANOVA")
    if rungs:
        axes.legend(fontsize=8, frameon=False)
    open_frame(axes)
