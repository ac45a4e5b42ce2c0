"""Why a run ends before its last round: a target reached, patience lost, or divergence."""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fedflat.algorithms import Algorithm
from fedflat.errors import UserError
from fedflat.experiment.config import Config, Stop
from fedflat.units import is_share

OVER = ("finished", "stopped", "diverged")
"""The statuses of a run that there is no going on with."""

EXPLODED = 1e6
"""A mean training loss beyond which nothing comes back."""


class Verdict(NamedTuple):
    """How a run ended."""

    status: Literal["finished", "stopped", "diverged", "paused"]
    """All rounds done; ended by a stopping rule; no longer finite; out of time and ready to go on."""
    reason: str = ""


def stop_early(history: list[dict[str, Any]], stop: Stop, model: str, metric: str) -> Verdict | None:
    """Whether the newest evaluation is a reason to stop."""
    newest = history[-1]
    value = newest["test"].get(model, {}).get(metric)
    if stop.target is not None and value is not None and value >= stop.target:
        return Verdict(
            "stopped", f"{metric} {value:.4f} reached the target {stop.target:g} after round {newest['round']}"
        )
    if stop.patience is not None:
        seen = [record["validation"][model][metric] for record in history if model in record["validation"]]
        best = max(range(len(seen)), key=lambda i: -math.inf if seen[i] is None else seen[i], default=0)
        if seen and len(seen) - 1 - best >= stop.patience:
            return Verdict(
                "stopped",
                f"validation {metric} has not improved for {stop.patience} evaluations (round {newest['round']})",
            )
    return None


def check_target(target: float, metric: str) -> None:
    """Refuse a target that a metric can never be compared with."""
    if not math.isfinite(target):
        raise UserError(f"the target {target} is not possible: it should be a finite number, such as 0.9")
    if is_share(metric) and not 0 <= target <= 1:
        meant = f" (for {target:g} % write {target / 100:g})" if 1 < target <= 100 else ""
        raise UserError(f"the target {target:g} cannot be one for {metric}, which lies between 0 and 1{meant}")


def diverged(weights: Tensor, loss: float, algorithm: Algorithm, config: Config) -> str:
    """What went wrong and the likely cause, in words; empty while all is well."""
    if bool(torch.isfinite(weights).all()) and math.isfinite(loss) and loss < EXPLODED:
        return ""
    what = f"the training loss exploded to {loss:.3g}" if math.isfinite(loss) else "the model is no longer finite"
    causes = [slot.divergence_hint() for _, slot in algorithm.slots() if slot.divergence_hint()]
    lr = config.training.lr
    clip = "" if config.training.clip is not None else ", or clip (training.clip=10)"
    high = f"the learning rate {lr:g} is too high for this problem: try {lr / 3:.2g}{clip}"
    return f"{what}; likely cause: {causes[0] if causes else high}"
