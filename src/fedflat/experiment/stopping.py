"""Reasons to end a run before its last round: target, patience or divergence."""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fedflat.algorithms import Algorithm
from fedflat.data.scaling import scale_advice
from fedflat.display import counted, is_share
from fedflat.engines.problem.problem import Problem
from fedflat.errors import UserError
from fedflat.experiment.config import Config, StopSettings

ENDED_STATUSES = ("finished", "stopped", "diverged")
"""The statuses of a run that has ended and cannot be resumed."""

DIVERGENCE_CHECK_EVERY = 10
"""Rounds between checks for divergence on a GPU, where every evaluation also includes a check."""
SCANNED_ROWS = 1000
"""Examples that are checked at a time for infinite or NaN inputs."""
MAX_LOSS = 1e6
"""Mean training loss from which a run counts as diverged."""


class Verdict(NamedTuple):
    """How a run ended."""

    status: Literal["finished", "stopped", "diverged", "paused"]
    """In this order: all rounds done; ended by a stopping rule; diverged; or interrupted, and can be resumed."""
    reason: str = ""


def stopping_verdict(
    history: list[dict[str, Any]], stop: StopSettings, model: str, metric: str, lower_is_better: bool
) -> Verdict | None:
    """Apply the stopping rules after the newest evaluation; returns a verdict if the run stops, otherwise None.

    Args:
        history: the evaluations in order.
        stop: the stopping rules.
        model: name of the model that is judged.
        metric: name of the metric that it is judged by.
        lower_is_better: whether lower values of the metric are better.
    """
    sign = -1 if lower_is_better else 1  # multiplied by it, higher values are better
    newest = history[-1]
    test_value = newest["test"].get(model, {}).get(metric)
    if stop.target is not None and test_value is not None and sign * test_value >= sign * stop.target:
        return Verdict(
            "stopped", f"{metric} {test_value:.4f} reached the target {stop.target:g} after round {newest['round']}"
        )
    if stop.patience is not None:
        # Evaluations separated only by idle rounds see the same model; count the last.
        evaluations = {each["round"] - each.get("idle_rounds", 0): each for each in history}.values()
        values = [each["validation"][model][metric] for each in evaluations if model in each["validation"]]
        # A metric that was not finite is None.
        scores = [-math.inf if value is None else sign * value for value in values]
        evaluations_since_best = len(scores) - 1 - scores.index(max(scores)) if scores else 0
        if scores and evaluations_since_best >= stop.patience:
            waited = counted(stop.patience, "evaluation")
            return Verdict("stopped", f"validation {metric} has not improved for {waited} (round {newest['round']})")
    return None


def check_target(target: Any, metric: str) -> None:
    """Reject a target that is outside the range of ``metric``."""
    if isinstance(target, str) or not math.isfinite(target):
        raise UserError(f"the target {target} is invalid; expected a finite number, such as 0.9")
    if is_share(metric) and not 0 <= target <= 1:
        hint = f" (for {target:g} % write {target / 100:g})" if 1 < target <= 100 else ""
        raise UserError(f"the target {target:g} is invalid: {metric} lies between 0 and 1{hint}")


def describe_divergence(weights: Tensor, loss: float, algorithm: Algorithm, config: Config, problem: Problem) -> str:
    """Describe the symptom of a diverged run and its likely cause; empty for a healthy run.

    Args:
        weights: the server's weights.
        loss: mean training loss of the last round.
        algorithm: the running algorithm; its slots name parameters that may cause divergence.
        config: the run's config.
        problem: data, model and task, which are examined if the run diverged.
    """
    if torch.isfinite(weights).all() and math.isfinite(loss) and loss < MAX_LOSS:
        return ""
    if not torch.isfinite(weights).all():
        symptom = "the model is no longer finite"
    elif math.isfinite(loss):
        symptom = f"the training loss exploded to {loss:.3g}"
    else:
        symptom = "the training loss is no longer finite"
    cause = _cause_before_training(problem)
    if cause:
        return f"{symptom}; cause: {cause}"
    if advice := scale_advice(problem.data):
        return f"{symptom}; likely cause: {advice}"
    lr = config.training.lr
    clip = "" if config.training.clip is not None else ", or clip (training.clip=10)"
    too_high = f"the learning rate {lr:g} is too high for this problem: try {min(lr / 3, 1):.2g}{clip}"
    hints = [slot.divergence_hint() for _, slot in algorithm.slots()]
    return f"{symptom}; likely cause: {next(filter(None, hints), too_high)}"


def _cause_before_training(problem: Problem) -> str:
    """A cause that no learning rate can fix: inputs or an initial loss that are not finite; empty if there is none."""
    train = problem.data.train
    if train.inputs.is_floating_point():
        for start in range(0, len(train), SCANNED_ROWS):
            # float64 inputs may be infinite in the run's precision
            if not torch.as_tensor(train.inputs[start : start + SCANNED_ROWS]).to(problem.dtype).isfinite().all():
                return f"the training inputs of {problem.data.name} contain infinite or NaN values; remove them"
    examples = train.take(torch.arange(min(10, len(train))))
    weights, buffers, integer_buffers = problem.initial_state()
    with torch.random.fork_rng(devices=[]):
        all_buffers = {**problem.buffer_layout.views(buffers), **integer_buffers}
        output = problem.predict(weights, all_buffers, examples.inputs.to(problem.device))
        loss = problem.task.loss(output, examples.targets.to(problem.device))
    if not torch.isfinite(loss).all():
        return f"the loss of {type(problem.task).__name__} is not finite even for the initial model; check its formula"
    return ""
