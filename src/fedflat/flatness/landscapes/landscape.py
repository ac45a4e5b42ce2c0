"""The landscape around one model, along random directions normalised filter by filter: L(w + x d_1 + y d_2) (Li et al. 2018)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

from torch import Tensor

from fedflat.errors import UserError
from fedflat.flatness.landscapes.directions import OneDimensional, directions_around
from fedflat.flatness.landscapes.grid import Landscape, Mark, Measure, Model, Tell, silent, survey, with_values
from fedflat.flatness.landscapes.points import loss_of, models_of
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
    tell: Tell = silent,
) -> Landscape:
    """What is measured around a model on a line (one dimension) or a square (two) of half-width ``radius``.

    The radius is in filter norms: at 1 every filter has been moved by as much as its own length. Buffers keep their values.
    """
    if dimensions not in (1, 2):
        raise UserError(f"a landscape has 1 or 2 dimensions, not {dimensions}")
    axis = symmetric_axis(radius, points)
    directions = directions_around(layout, model.weights, seed, dimensions, one_dimensional)
    moved = _moved(model, directions, [axis] * dimensions)
    values = survey(measure, moved, points**dimensions, tell)
    return Landscape(
        "around",
        (axis,) * dimensions,
        {what: found.reshape((points,) * dimensions) for what, found in values.items()},
        with_values(measure, [Mark(name, (0.0,) * dimensions)], [model]),
        {"directions": "random, filter-normalised", "one_dimensional": one_dimensional, "radius": radius, "seed": seed},
    )


def landscape_of(objective: Objective, **options: Any) -> Landscape:
    """The loss of an objective around its model's weights; ``options`` are ``landscape_around``'s."""
    (model,) = models_of(objective, {"model": objective.weights}).values()
    return landscape_around(objective.layout, model, loss_of(objective), **options)


def symmetric_axis(radius: float, points: int) -> tuple[float, ...]:
    """Evenly spaced positions from -radius to radius; with an odd number of them the middle one is exactly 0.

    >>> symmetric_axis(1.0, 5)
    (-1.0, -0.5, 0.0, 0.5, 1.0)
    """
    if points < 2:
        raise UserError(f"a landscape of {points} points a side is not possible; expected at least 2")
    if not radius > 0:
        raise UserError(f"a landscape of radius {radius:g} is not possible; expected a number above 0")
    return tuple(radius * ((2 * number - (points - 1)) / (points - 1)) for number in range(points))


def _moved(model: Model, directions: Sequence[Tensor], axes: Sequence[Sequence[float]]) -> Iterator[Model]:
    for position in product(*axes):
        weights = model.weights.clone()
        for step, direction in zip(position, directions, strict=True):
            weights.add_(direction, alpha=step)
        yield Model(weights, model.buffers)
