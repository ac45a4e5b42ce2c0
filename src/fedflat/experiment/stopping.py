"""Rules that end a run before its last round: target, patience and divergence."""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fedflat.algorithms import Algorithm
from fedflat.errors import UserError
from fedflat.experiment.config import Config, StopSettings
from fedflat.units import is_share

OVER = ("finished", "stopped", "diverged")
"""The statuses of a run that has ended and cannot be resumed."""

EXPLODED = 1e6
"""Mean training loss above which a run counts as diverged."""


class Verdict(NamedTuple):
    """How a run ended."""

    status: Literal["finished", "stopped", "diverged", "paused"]
    """All rounds done; ended by a stopping rule; not finite; or interrupted and resumable."""
    reason: str = ""


def stop_early(history: list[dict[str, Any]], stop: StopSettings, model: str, metric: str) -> Verdict | None:
    """The verdict of the stopping rules after the newest evaluation; None to continue."""
    newest = history[-1]
    value = newest["test"].get(model, {}).get(metric)
    if stop.target is not None and value is not None and value >= stop.target:
        return Verdict(
            "stopped", f"{metric} {value:.4f} reached the target {stop.target:g} after round {newest['round']}"
        )
    if stop.patience is not None:
        scores = [record["validation"][model][metric] for record in history if model in record["validation"]]
        best = max(range(len(scores)), key=lambda i: -math.inf if scores[i] is None else scores[i], default=0)
        if scores and len(scores) - 1 - best >= stop.patience:
            return Verdict(
                "stopped",
                f"validation {metric} has not improved for {stop.patience} evaluations (round {newest['round']})",
            )
    return None


def check_target(target: float, metric: str) -> None:
    """Reject a target that is outside the range of ``metric``."""
    if not math.isfinite(target):
        raise UserError(f"the target {target} is invalid; expected a finite number, such as 0.9")
    if is_share(metric) and not 0 <= target <= 1:
        hint = f" (for {target:g} % write {target / 100:g})" if 1 < target <= 100 else ""
        raise UserError(f"the target {target:g} is invalid: {metric} lies between 0 and 1{hint}")


def diverged(weights: Tensor, loss: float, algorithm: Algorithm, config: Config) -> str:
    """What diverged and its likely cause; empty for a healthy run.

    Args:
        weights: the server's weights.
        loss: mean training loss of the last round.
        algorithm: the running algorithm; its slots name parameters that may cause divergence.
        config: the run's config.
    """
    if bool(torch.isfinite(weights).all()) and math.isfinite(loss) and loss < EXPLODED:
        return ""
    symptom = f"the training loss exploded to {loss:.3g}" if math.isfinite(loss) else "the model is no longer finite"
    causes = [slot.divergence_hint() for _, slot in algorithm.slots() if slot.divergence_hint()]
    lr = config.training.lr
    clip = "" if config.training.clip is not None else ", or clip (training.clip=10)"
    too_high = f"the learning rate {lr:g} is too high for this problem: try {lr / 3:.2g}{clip}"
    return f"{symptom}; likely cause: {causes[0] if causes else too_high}"
