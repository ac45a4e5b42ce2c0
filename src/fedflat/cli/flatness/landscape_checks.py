"""Warnings about landscapes that show little or do not belong to the recorded run."""

from __future__ import annotations

import warnings
from math import isclose, isfinite
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedflat.experiment.analysis.run_model import RunModel
    from fedflat.flatness.landscapes.grid import Landscape

LOSS_TOLERANCE = 0.02
"""Relative difference to the recorded loss up to which there is no warning, e.g. because the run trained in bf16."""
HUGE = 1000
"""A loss is huge if it exceeds the model's own loss by this factor; figures show three decades."""


def warn_about_landscape(name: str, model: RunModel, grid: Landscape, value: str, all_examples: bool) -> None:
    """Warn if the model's loss is not finite or not the recorded one, or if huge losses dominate the landscape.

    Args:
        name: name of the model, for messages.
        model: the model at the centre.
        grid: the landscape around it.
        value: name of the plotted value, e.g. ``train_loss``.
        all_examples: whether the landscape was evaluated on all examples, as evaluations of a run are.
    """
    import numpy as np

    from fedflat.reporting.figures.landscape_scale import shown_value

    centre = grid.marks[0].values
    bad = [shown_value(key) for key, loss in centre.items() if key.endswith("loss") and not isfinite(loss)]
    if bad:
        warnings.warn(
            f"{name}: the loss of the model itself is not finite ({', '.join(bad)}); choose another model, e.g. one of "
            "an earlier round (RUN:server@50)",
            stacklevel=2,
        )
        return
    recorded = recorded_test_loss(model) if all_examples else None
    if recorded is not None and "test_loss" in centre:
        loss = centre["test_loss"]
        if not isclose(loss, recorded, rel_tol=LOSS_TOLERANCE, abs_tol=1e-6):
            warnings.warn(
                f"{name}: the test loss of the model is {loss:.4g} here, but the run recorded {recorded:.4g}; check "
                "that its dataset and plugins have not changed since",
                stacklevel=2,
            )
    values = grid.values[value]
    median = float(np.median(np.where(np.isfinite(values), values, np.inf)))
    if value.endswith("loss") and median > HUGE * max(centre[value], 0.0):
        what = f"over {HUGE:,} times that of the model" if isfinite(median) else "not finite"
        warnings.warn(
            f"{name}: the {shown_value(value)} is {what} on most of the grid, so the figure shows little of the "
            "minimum; use a smaller --radius (the scale is already logarithmic)",
            stacklevel=2,
        )


def recorded_test_loss(model: RunModel) -> float | None:
    """Return the test loss that the run recorded for a model; None if it was not evaluated on the same data.

    A run may evaluate on fewer examples, and with other BatchNorm statistics if clients keep their own.
    """
    config, history = model.record.config, model.record.history
    if config.evaluation.examples is not None or model.problem.batch_statistics:
        return None
    folder = model.record.folder
    rounds = model.rounds if model.rounds is not None or folder is None else folder.status().get("rounds")
    losses = [entry["test"].get(model.name, {}).get("loss") for entry in history if entry["round"] == rounds]
    return float(losses[0]) if losses and losses[0] is not None else None
