"""A curve of low loss between two models (Garipov et al. 2018).

The quadratic Bezier curve from a to b with the control point c is

    w(t) = (1 - t)^2 a + 2 t (1 - t) c + t^2 b,    0 <= t <= 1

c is trained to minimise the mean of the loss over t, drawn uniformly. Two models that a straight line separates by a
barrier are often connected by such a curve without one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fedflat.errors import UserError
from fedflat.flatness.batches import batch_sizes
from fedflat.flatness.landscapes.grid import Landscape
from fedflat.flatness.landscapes.path import bezier_point, path_landscape
from fedflat.flatness.landscapes.points import loss_of, models_of
from fedflat.flatness.objective import Objective
from fedflat.randomness import generator

LEARNING_RATE = 0.01
BETA_1, BETA_2, EPSILON = 0.9, 0.999, 1e-8
"""Adam's usual constants. The update is written out because importing ``torch.optim`` takes seconds."""


def curve_of(
    objective: Objective,
    models: dict[str, Tensor | nn.Module],
    *,
    steps: int = 500,
    lr: float = LEARNING_RATE,
    seed: int = 0,
    **options: Any,
) -> Landscape:
    """Train a Bezier curve between two models, and evaluate the loss of an objective on it.

    Args:
        objective: the loss as a function of the weights, of a model without BatchNorm statistics.
        models: both end points by name: modules, or flat vectors of weights [P].
        steps: training steps of the control point.
        lr: learning rate of the first step; it decays linearly to 0.
        seed: seed of positions and batches in training.
        options: keyword arguments of ``path_landscape``, such as ``points``.
    """
    points, buffers = models_of(objective, models, "one curve")
    if buffers.names:
        raise_for_statistics()
    if len(points) != 2:
        raise UserError(f"a curve needs two models, got {len(points)}")
    a, b = points.values()
    control = bezier_control(objective, a.weights, b.weights, steps=steps, lr=lr, seed=seed)
    return path_landscape(points, loss_of(objective), control=control, **options)


def raise_for_statistics() -> None:
    """Raise a ``UserError`` for models with BatchNorm statistics, which the control point does not have."""
    raise UserError(
        "a trained curve is not defined for models with BatchNorm statistics, which its control point lacks; "
        "use a model without BatchNorm, e.g. mlp or cnn"
    )


def bezier_control(
    objective: Objective, a: Tensor, b: Tensor, *, steps: int = 500, lr: float = LEARNING_RATE, seed: int = 0
) -> Tensor:
    """Train the control point c [P] of a Bezier curve from ``a`` to ``b`` [P] with Adam, starting half way.

    Every step draws a position t and a batch of the objective, with probability proportional to its size. The gradient
    with respect to c is 2 t (1 - t) times that of the batch's loss at w(t).

    Args:
        objective: the loss as a function of the weights; its batches are those of training.
        a, b: weights of both ends.
        steps: number of training steps.
        lr: learning rate of the first step; it decays linearly to 0.
        seed: seed of positions and batches.
    """
    if steps < 1 or not 0 < lr < float("inf"):
        raise UserError(f"steps={steps}, lr={lr:g} is invalid; expected at least 1 step and a learning rate above 0")
    rng = generator(seed, "curve")
    control, sizes = (a + b) / 2, batch_sizes(objective.batches)
    shares = [size / sum(sizes) for size in sizes]  # so that every example has the same weight
    mean, square = torch.zeros_like(control), torch.zeros_like(control)  # Adam's moments
    for step in range(steps):
        t, batch = float(rng.uniform()), objective.batches[int(rng.choice(len(shares), p=shares))]
        gradient = 2 * t * (1 - t) * objective.with_data([batch]).gradient(bezier_point(a, b, control, t))
        mean, square = torch.lerp(gradient, mean, BETA_1), torch.lerp(gradient**2, square, BETA_2)
        deviation = (square / (1 - BETA_2 ** (step + 1))).sqrt() + EPSILON
        control = control - lr * (1 - step / steps) * mean / (1 - BETA_1 ** (step + 1)) / deviation
    if not bool(control.isfinite().all()):
        raise UserError(f"the training of the curve diverged; use a learning rate below {lr:g}")
    return control
