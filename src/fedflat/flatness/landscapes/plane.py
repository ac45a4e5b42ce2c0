"""The plane through three models, with the orthonormal basis of Caldarola et al. (2022), appendix C.3.

    u = (b - a) / ||b - a||,    v = r / ||r||,  r = (c - a) - <c - a, u> u,    P(x, y) = a + x u + y v

The first model lies at (0, 0), the second at (||b - a||, 0), and distances in the plane equal distances between
weights. Coordinates are computed in float64.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedflat.errors import UserError
from fedflat.flatness.landscapes.grid import (
    Landscape,
    Mark,
    Measure,
    Model,
    Progress,
    evaluate_models,
    silent,
    with_values,
)
from fedflat.flatness.landscapes.points import loss_of, models_of
from fedflat.flatness.objective import Objective

COLLINEAR = 1e-5
"""Sine of the angle between two sides below which three models count as collinear."""


@dataclass(frozen=True)
class Plane:
    """A plane through three weight vectors."""

    origin: Tensor
    u: Tensor
    v: Tensor
    corners: tuple[tuple[float, float], ...]
    """The coordinates of the three models."""

    @classmethod
    def through(cls, a: Tensor, b: Tensor, c: Tensor) -> Plane:
        """The plane through three weight vectors; raises a ``UserError`` if they do not span one."""
        origin, first, second = a.double(), b.double() - a.double(), c.double() - a.double()
        one, two = first.norm(), second.norm()
        if min(float(one), float(two), float((first - second).norm())) == 0:
            raise UserError("two of the three models are identical and span no plane; use three different models")
        u = first / one
        along = second @ u
        rest = second - along * u
        across = rest.norm()
        if float(across) <= COLLINEAR * float(two):
            raise UserError(
                "the three models are collinear and span no plane; use fedflat flatness path for the line between them"
            )
        return cls(origin, u, rest / across, ((0.0, 0.0), (float(one), 0.0), (float(along), float(across))))

    def coordinates(self, weights: Tensor) -> tuple[float, float]:
        """Coordinates of the orthogonal projection of ``weights`` onto the plane."""
        offset = weights.double() - self.origin
        return float(offset @ self.u), float(offset @ self.v)

    def distance(self, weights: Tensor) -> float:
        """Distance of ``weights`` from the plane."""
        x, y = self.coordinates(weights)
        return float((weights.double() - self.at(x, y)).norm())

    def at(self, x: float, y: float) -> Tensor:
        """The weights at (x, y): a + x u + y v, [P] float64."""
        return self.origin + x * self.u + y * self.v

    def shares(self, x: float, y: float) -> tuple[float, float, float]:
        """Barycentric coordinates of (x, y): weights of the three models, which sum to 1."""
        (_, _), (bx, _), (cx, cy) = self.corners
        third = y / cy
        second = (x - third * cx) / bx
        return 1 - second - third, second, third


def plane_landscape(
    models: Mapping[str, Model],
    measure: Measure,
    *,
    points: int = 41,
    margin: float = 0.25,
    progress: Progress = silent,
) -> Landscape:
    """Evaluate ``measure`` on the plane through the first three models; further models are projected onto it.

    Buffers are interpolated with the same barycentric coordinates as the weights.

    Args:
        models: at least three models by name.
        measure: maps a model to scalars.
        points: grid points per side.
        margin: extension of the grid beyond the models, as a fraction of their extent.
        progress: called with (points evaluated, total).
    """
    names = list(models)
    if len(names) < 3:
        raise UserError(f"a plane needs three models, got {len(names)}")
    if points < 2:
        raise UserError(f"points={points} is invalid; expected at least 2 per side")
    three = [models[name] for name in names[:3]]
    plane = Plane.through(*(model.weights for model in three))
    marks = [Mark(name, corner) for name, corner in zip(names, plane.corners, strict=False)]
    marks += [
        Mark(name, plane.coordinates(models[name].weights), plane.distance(models[name].weights)) for name in names[3:]
    ]
    xs, ys = (spread_axis([mark.at[i] for mark in marks], points, margin) for i in (0, 1))
    values = evaluate_models(measure, _points(plane, three, xs, ys), points**2, progress)
    made = {"plane_through": names[:3], "margin": margin, "distances": _distances(three, names)}
    grids = {quantity: column.reshape(points, points) for quantity, column in values.items()}
    return Landscape("plane", (xs, ys), grids, with_values(measure, marks, models.values()), made)


def spread_axis(positions: Sequence[float], points: int, margin: float) -> tuple[float, ...]:
    """Evenly spaced positions over the range of ``positions``, extended by the fraction ``margin`` on both sides."""
    low, high = min(positions), max(positions)
    room = margin * (high - low)
    return tuple(float(x) for x in np.linspace(low - room, high + room, points))


def plane_of(objective: Objective, models: Mapping[str, Tensor | nn.Module], **options: Any) -> Landscape:
    """The loss of an objective on the plane through three modules or flat vectors; ``options`` as in
    ``plane_landscape``.
    """
    return plane_landscape(models_of(objective, models), loss_of(objective), **options)


def _points(plane: Plane, three: Sequence[Model], xs: Sequence[float], ys: Sequence[float]) -> Iterator[Model]:
    dtype = three[0].weights.dtype
    buffers = torch.stack([model.buffers for model in three])
    for x, y in product(xs, ys):
        shares = torch.tensor(plane.shares(x, y), dtype=buffers.dtype, device=buffers.device)
        yield Model(plane.at(x, y).to(dtype), shares @ buffers)


def _distances(three: Sequence[Model], names: Sequence[str]) -> dict[str, float]:
    pairs = ((0, 1), (0, 2), (1, 2))
    return {
        f"{names[i]} to {names[j]}": float((three[i].weights.double() - three[j].weights.double()).norm())
        for i, j in pairs
    }
