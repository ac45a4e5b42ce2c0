"""The landscape around one model along filter-normalised random directions, L(w + x d_1 + y d_2) (Li et al. 2018)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

from torch import Tensor

from fedflat.errors import UserError
from fedflat.flatness.landscapes.directions import OneDimensional, directions_around
from fedflat.flatness.landscapes.grid import (
    Landscape,
    Mark,
    Measure,
    Model,
    Progress,
    check_grid_size,
    evaluate_models,
    measure_marks,
    silent,
)
from fedflat.flatness.landscapes.points import loss_of, models_of, require_objective
from fedflat.flatness.objective import Objective
from fedflat.models.layout import Layout


def landscape_around(
    layout: Layout,
    model: Model,
    measure: Measure,
    *,
    name: str = "model",
    dimensions: int = 2,
    radius: float = 1.0,
    points: int = 41,
    seed: int = 0,
    one_dimensional: OneDimensional = "zero",
    progress: Progress = silent,
) -> Landscape:
    """Evaluate ``measure`` on a line or a square around a model, along random filter-normalised directions.

    Only weights change; all points use the model's buffers.

    Args:
        layout: parameter layout of the model.
        model: the centre.
        measure: maps a model to scalars.
        name: label of the centre.
        dimensions: 1 (line) or 2 (square).
        radius: half the side of the square, in filter norms; at distance 1, every filter has moved by its own norm.
        points: grid points per side.
        seed: seed of the directions.
        one_dimensional: ``zero`` keeps one-dimensional tensors (e.g. biases) fixed, ``scaled`` moves them like filters.
        progress: called with (points evaluated, total).
    """
    if dimensions not in (1, 2):
        raise UserError(f"dimensions={dimensions} is invalid; expected 1 or 2")
    check_grid_size(points**dimensions)
    axis = symmetric_axis(radius, points)
    directions = directions_around(layout, model.weights, seed, dimensions, one_dimensional)
    axes = (axis,) * dimensions
    values = evaluate_models(measure, _grid_models(model, directions, axes), points**dimensions, progress)
    return Landscape(
        "around",
        axes,
        {quantity: column.reshape((points,) * dimensions) for quantity, column in values.items()},
        measure_marks(measure, [Mark(name, (0.0,) * dimensions)], [model]),
        {"directions": "random, filter-normalised", "one_dimensional": one_dimensional, "radius": radius, "seed": seed},
    )


def landscape_of(objective: Objective, **options: Any) -> Landscape:
    """Evaluate the loss of an objective on a line or square around its weights.

    ``options`` are the keyword arguments of ``landscape_around``.
    """
    require_objective(objective)
    points, _ = models_of(objective, {"model": objective.weights})
    return landscape_around(objective.layout, points["model"], loss_of(objective), **options)


def symmetric_axis(radius: float, points: int) -> tuple[float, ...]:
    """Return evenly spaced positions from -radius to radius; with an odd number of points the middle one is exactly 0.

    >>> symmetric_axis(1.0, 5)
    (-1.0, -0.5, 0.0, 0.5, 1.0)
    """
    if points < 2:
        raise UserError(f"points={points} is invalid; expected at least 2 per side")
    if not 0 < radius < math.inf:
        raise UserError(f"radius={radius:g} is invalid; expected a finite number above 0")
    return tuple(radius * ((2 * number - (points - 1)) / (points - 1)) for number in range(points))


def _grid_models(model: Model, directions: Sequence[Tensor], axes: Sequence[Sequence[float]]) -> Iterator[Model]:
    """Yield the model w + x d_1 + y d_2 for every grid point (x, y), row by row.

    Args:
        model: w, the centre; its buffers are kept.
        directions: d_1 and, for a square, d_2, each [P].
        axes: the positions along each direction.
    """
    for position in product(*axes):
        weights = model.weights.clone()
        for step, direction in zip(position, directions, strict=True):
            weights.add_(direction, alpha=step)
        yield Model(weights, model.buffers)
