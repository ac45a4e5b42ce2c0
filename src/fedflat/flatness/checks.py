"""Checks a loss before it is measured (finite, deterministic, a mean), and models before they are compared."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedflat.errors import UserError
from fedflat.flatness.batches import Batch, count_examples, draw_positions, map_tensors, select_examples

if TYPE_CHECKING:
    from fedflat.flatness.objective import Objective

MAX_LOSS_RATIO = 1.1
"""Largest ratio of two training losses at which models are compared, as in the flatness study."""


def describe_unequal_losses(losses: Mapping[str, float], *, has_runs: bool = True) -> str:
    """Return a warning if training losses differ too much to compare the flatness of models; otherwise empty.

    Args:
        losses: the training loss of each model by name; losses that are not finite are ignored.
        has_runs: whether at least one of the models is that of a run, which can be measured after other rounds.

    >>> describe_unequal_losses({"fedavg": 0.1, "fedsam": 0.12, "fedcm": 0.25})[:98]
    'Losses on the measured training examples range from 0.1 (fedavg) to 0.25 (fedcm), a factor of 2.5.'
    """
    names = sorted((name for name, loss in losses.items() if math.isfinite(loss)), key=losses.__getitem__)
    if not names or losses[names[0]] <= 0 or losses[names[-1]] <= MAX_LOSS_RATIO * losses[names[0]]:
        return ""
    lowest, highest = losses[names[0]], losses[names[-1]]
    ratio = f"{highest / lowest:.3g}"
    if float(ratio) <= MAX_LOSS_RATIO:  # rounded to the threshold
        ratio = f"slightly more than {MAX_LOSS_RATIO}"
    advice = "Report the losses with the flatness, and call no model flatter."
    if has_runs:
        advice = (
            "Compare saved models with similar losses: train with --save-every N, choose rounds with `fedflat flatness "
            "gap RUN`, which lists the losses, and measure RUN:server@ROUND."
        )
    return (
        f"Losses on the measured training examples range from {lowest:.3g} ({names[0]}) to {highest:.3g} "
        f"({names[-1]}), a factor of {ratio}. Above a factor of {MAX_LOSS_RATIO}, differences in "
        f"flatness are inconclusive, because curvature changes with the loss. {advice}"
    )


def describe_unequal_sizes(sizes: Mapping[str, int]) -> str:
    """Return a warning if models differ in their numbers of parameters, given by name; otherwise empty.

    >>> describe_unequal_sizes({"fedavg": 1914, "model": 8970})
    'fedavg has 1,914 parameters, model has 8,970. The flatness of different architectures is not comparable.'
    """
    if len(set(sizes.values())) < 2:
        return ""
    smallest, largest = min(sizes, key=sizes.__getitem__), max(sizes, key=sizes.__getitem__)
    return (
        f"{smallest} has {sizes[smallest]:,} parameters, {largest} has {sizes[largest]:,}. "
        "The flatness of different architectures is not comparable."
    )


def check_objective(objective: Objective) -> None:
    """Raise a ``UserError`` unless loss and gradient are finite and deterministic, and the loss is a mean."""
    loss = float(objective.loss())
    if not math.isfinite(loss):
        raise UserError(f"the loss is {loss}, so its curvature is undefined; use a model that did not diverge")
    heaviest = objective.batch_shares.index(max(objective.batch_shares))
    one_batch = objective.with_data([objective.batches[heaviest]])
    first, second = one_batch.loss_and_gradient(), one_batch.loss_and_gradient()
    first_loss, first_gradient = first
    if not bool(first_gradient.isfinite().all()):
        raise UserError("the gradient is not finite, so the curvature is undefined; use a model that did not diverge")
    # Between two passes, GPU reductions in a different order change the last digits, dropout the leading ones.
    tolerance = 1e-4 if objective.dtype == torch.float64 else 1e-2
    for before, after in zip(first, second, strict=True):  # the losses, then the gradients
        if float((before - after).norm()) > tolerance * float(before.norm()) + torch.finfo(objective.dtype).eps:
            raise UserError(
                f"the loss is not deterministic ({float(first_loss):.6g}, then {float(second[0]):.6g}); "
                "disable randomness in its forward pass and its data, such as dropout or augmentation"
            )
    check_mean(objective)


def _drawn_batch(objective: Objective) -> Batch:
    """Draw as many examples as the first batch has from all batches, and return them as one batch."""
    first = objective.batches[0]
    positions = draw_positions(objective.examples, count_examples(first[1]), seed=0)
    try:
        return select_examples(objective.batches, positions)[0]
    except (RuntimeError, TypeError, KeyError, ValueError):  # batches of other shapes, such as texts of other lengths
        return first


def check_mean(objective: Objective) -> None:
    """Raise a ``UserError`` if the loss of a batch is the sum over its examples, or another weighting of them.

    As many examples as in the first batch are drawn from all batches, because data may be sorted by class. Their loss
    is compared with the mean of the losses of their first third and of the rest. A mean with other weights than the
    objective's, e.g. with class weights, is accepted if there is only one batch, or if an example has several targets:
    images of a segmentation have different numbers of labelled pixels.
    """
    inputs, targets = _drawn_batch(objective)
    count = count_examples(targets)
    if count < 2:
        return

    def part(rows: slice) -> Batch:
        return map_tensors(inputs, lambda tensor: tensor[rows]), map_tensors(targets, lambda tensor: tensor[rows])

    third = max(1, count // 3)
    parts = part(slice(third)), part(slice(third, None))
    whole, mean = (float(objective.with_data(batches).loss()) for batches in ([(inputs, targets)], parts))
    if not math.isfinite(whole) or math.isclose(whole, mean, rel_tol=1e-3):
        return
    if math.isclose(whole, sum(float(objective.with_data([part]).loss()) for part in parts), rel_tol=1e-3):
        raise UserError("the loss is a sum over the batch; expected the mean over its examples (reduction='mean')")
    if len(objective.batches) > 1 and isinstance(targets, Tensor) and targets.ndim == 1:
        raise UserError(
            "the loss of a batch is not the mean over its examples with the weights of the objective, so it would "
            "depend on the batch size; for class weights W, pass flatness.Objective(..., weight=lambda targets: "
            f"W[targets].sum()), or use one batch of {objective.examples} examples"
        )
