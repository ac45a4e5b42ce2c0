"""The straight line between two models, w(t) = (1 - t) a + t b, and the barrier on it.

The barrier is how far the loss on the way rises above the straight line between its values at the ends,

    max_t [ L(w(t)) - (1 - t) L(a) - t L(b) ],    0 <= t <= 1

(Entezari et al. 2022, definition 1; where both ends are equally good this is the error barrier of Frankle et al. 2020). Two models with no
barrier lie in one basin: their average is as good as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor, nn

from fedflat.errors import UserError
from fedflat.flatness.landscapes.grid import Landscape, Mark, Measure, Model, Tell, Values, silent, survey, with_values
from fedflat.flatness.landscapes.points import loss_of, models_of
from fedflat.flatness.objective import Objective


@dataclass(frozen=True)
class Barrier:
    """The highest rise above the line between the ends, and the share of the way at which it is."""

    height: float
    at: float


def path_landscape(
    models: dict[str, Model], measure: Measure, *, points: int = 41, beyond: float = 0.0, tell: Tell = silent
) -> Landscape:
    """What is measured on the line from the first model (t = 0) to the second (t = 1), and ``beyond`` them; buffers go the same way."""
    if len(models) != 2:
        raise UserError(f"a path leads from one model to another, but here are {len(models)}")
    if points < 2 or beyond < 0:
        raise UserError(
            f"a path of {points} points reaching {beyond:g} beyond its ends is not possible; expected at least 2 points, and 0 or more"
        )
    (first, a), (second, b) = models.items()
    evenly = np.linspace(-beyond, 1 + beyond, points)
    apart = [end for end in (0.0, 1.0) if not np.isclose(evenly, end).any()]  # barriers rise above the ends themselves
    axis = tuple(sorted(map(float, [*evenly, *apart])))
    values = survey(measure, _between(a, b, axis), len(axis), tell)
    distance = float((b.weights.double() - a.weights.double()).norm())
    marks = with_values(measure, [Mark(first, (0.0,)), Mark(second, (1.0,))], [a, b])
    return Landscape("path", (axis,), values, marks, {"distance": distance, "beyond": beyond})


def path_of(objective: Objective, models: dict[str, Tensor | nn.Module], **options: Any) -> Landscape:
    """The loss of an objective on the way from one module or flat vector to another; ``options`` are ``path_landscape``'s."""
    return path_landscape(models_of(objective, models), loss_of(objective), **options)


def _between(a: Model, b: Model, axis: Sequence[float]) -> Iterator[Model]:
    for t in axis:
        yield Model((1 - t) * a.weights + t * b.weights, (1 - t) * a.buffers + t * b.buffers)


def barrier(shares: Sequence[float], values: Values) -> Barrier:
    """The barrier of values along a path; without end where one of them on the way is not finite.

    >>> barrier((0.0, 0.25, 0.5, 0.75, 1.0), np.array([1.0, 1.5, 4.0, 2.0, 3.0]))
    Barrier(height=2.0, at=0.5)
    """
    t = np.array(shares)
    within = (t >= -1e-9) & (t <= 1 + 1e-9)
    t, on_the_way = t[within], values[within]
    ends = np.interp([0.0, 1.0], np.array(shares), values)
    rise = on_the_way - ((1 - t) * ends[0] + t * ends[1])
    if not np.isfinite(rise).all():
        return Barrier(float("inf"), float(t[~np.isfinite(rise)][0]))
    highest = int(rise.argmax())
    return Barrier(max(float(rise[highest]), 0.0), float(t[highest]))
