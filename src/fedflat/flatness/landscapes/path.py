"""The straight line between two models, w(t) = (1 - t) a + t b, and the loss barrier on it.

The barrier is the largest rise of the loss above the linear interpolation of its values at the ends,

    max_t [ L(w(t)) - (1 - t) L(a) - t L(b) ],    0 <= t <= 1

(Entezari et al. 2022, definition 1; for equally good ends, the error barrier of Frankle et al. 2020). Two models
without a barrier lie in the same basin: their average is as good as they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor, nn

from fedflat.errors import UserError
from fedflat.flatness.landscapes.grid import (
    Landscape,
    Mark,
    Measure,
    Model,
    Progress,
    Values,
    check_grid_size,
    evaluate_models,
    measure_marks,
    silent,
)
from fedflat.flatness.landscapes.points import loss_of, models_of
from fedflat.flatness.objective import Objective


@dataclass(frozen=True)
class Barrier:
    """The largest rise of the loss on a path above the straight line between its end values, and where it occurs."""

    height: float
    """Largest rise of the loss above the straight line between its values at both ends of the path."""
    at: float
    """Position of this rise on the path, from 0 (first model) to 1 (second model)."""


def path_landscape(
    models: dict[str, Model],
    measure: Measure,
    *,
    points: int = 41,
    beyond: float = 0.0,
    control: Tensor | None = None,
    progress: Progress = silent,
) -> Landscape:
    """Evaluate ``measure`` on the line from the first model (t = 0) to the second (t = 1), interpolating buffers too.

    Args:
        models: two models by name.
        measure: maps a model to scalars.
        points: number of points.
        beyond: extension past both ends, in units of t.
        control: control point [P] of a quadratic Bezier curve, which then replaces the line; default: none.
        progress: called with (points evaluated, total).
    """
    if len(models) != 2:
        raise UserError(f"a path needs two models, got {len(models)}")
    if points < 2 or not 0 <= beyond < math.inf:
        raise UserError(f"points={points}, beyond={beyond:g} is invalid; expected at least 2 points and beyond >= 0")
    check_grid_size(points)
    (a_name, a), (b_name, b) = models.items()
    positions = np.linspace(-beyond, 1 + beyond, points)
    # The two models themselves are always evaluated, because the height of a barrier is relative to their losses.
    is_end = np.isclose(positions, 0.0) | np.isclose(positions, 1.0)  # up to rounding errors
    axis = (*sorted([*positions[~is_end].tolist(), 0.0, 1.0]),)
    values = evaluate_models(measure, _interpolate(a, b, axis, control), len(axis), progress)
    distance = float((b.weights.double() - a.weights.double()).norm())
    marks = measure_marks(measure, [Mark(a_name, (0.0,)), Mark(b_name, (1.0,))], [a, b])
    metadata = {"distance": distance, "beyond": beyond, "curved": control is not None}
    return Landscape("path", (axis,), values, marks, metadata)


def path_of(objective: Objective, models: dict[str, Tensor | nn.Module], **options: Any) -> Landscape:
    """Evaluate the loss of an objective on the straight line between two models.

    Floating-point buffers, such as BatchNorm statistics, are interpolated like the weights.

    Args:
        objective: the loss as a function of the weights.
        models: both end points by name: modules, or flat vectors of weights [P] with the objective's buffers.
        options: keyword arguments of ``path_landscape``.
    """
    points, buffers = models_of(objective, models, "one path")
    return path_landscape(points, loss_of(objective, buffers), **options)


def _interpolate(a: Model, b: Model, axis: Sequence[float], control: Tensor | None = None) -> Iterator[Model]:
    """Yield the model (1 - t) a + t b, or with ``control`` that on a Bezier curve, for every position t of ``axis``."""
    for t in axis:
        buffers = (1 - t) * a.buffers + t * b.buffers
        if control is None:
            yield Model((1 - t) * a.weights + t * b.weights, buffers)
        else:
            yield Model(bezier_point(a.weights, b.weights, control, t), buffers)


def bezier_point(a: Tensor, b: Tensor, control: Tensor, t: float) -> Tensor:
    """Return the point (1 - t)^2 a + 2 t (1 - t) control + t^2 b of a quadratic Bezier curve; all tensors are [P]."""
    return (1 - t) ** 2 * a + 2 * t * (1 - t) * control + t**2 * b


def barrier(positions: Sequence[float], values: Values) -> Barrier:
    """Return the barrier on a path between two models: the largest rise above the line between the end values.

    Args:
        positions: positions on the path, from 0 (first model) to 1 (second model); those outside are ignored.
        values: the loss at each position.

    Returns:
        Height and position of the barrier; the height is infinite if a value between the ends is not finite.

    >>> barrier((0.0, 0.25, 0.5, 0.75, 1.0), np.array([1.0, 1.5, 4.0, 2.0, 3.0]))
    Barrier(height=2.0, at=0.5)
    """
    all_positions = np.array(positions)
    start, end = np.interp([0.0, 1.0], all_positions, values)
    is_between = (all_positions >= -1e-9) & (all_positions <= 1 + 1e-9)  # a path may extend beyond its ends
    t = all_positions[is_between]
    rise = values[is_between] - ((1 - t) * start + t * end)
    if not np.isfinite(rise).all():
        return Barrier(float("inf"), float(t[~np.isfinite(rise)][0]))
    highest = int(rise.argmax())
    return Barrier(max(float(rise[highest]), 0.0), float(t[highest]))
