"""The plane through three models, with the orthonormal basis of Caldarola et al. (2022), appendix C.3.

    u = (b - a) / ||b - a||,    v = r / ||r||,  r = (c - a) - <c - a, u> u,    P(x, y) = a + x u + y v

The first model lies at (0, 0), the second at (||b - a||, 0), and distances in the plane equal distances between
weights. Coordinates are computed in float64.
"""

from __future__ import annotations

import math
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
    check_grid_size,
    evaluate_models,
    measure_marks,
    silent,
)
from fedflat.flatness.landscapes.points import loss_of, models_of
from fedflat.flatness.objective import Objective

COLLINEAR = 1e-5
"""Sine of the angle between two sides below which three models count as collinear."""


@dataclass(frozen=True)
class Plane:
    """A plane through three models a, b and c (weight vectors).

    The point (x, y) has the weights a + x u + y v, where u points from a to b, and v is orthogonal to u.
    """

    origin: Tensor
    """Weights of the first model a, which is the origin of the plane; shape [P], float64."""
    u: Tensor
    """Unit vector that points from the first model to the second, shape [P]."""
    v: Tensor
    """Unit vector orthogonal to u, on the side of the third model, shape [P]."""
    corners: tuple[tuple[float, float], ...]
    """Coordinates (x, y) of the three models."""

    @classmethod
    def through(cls, a: Tensor, b: Tensor, c: Tensor) -> Plane:
        """Return the plane through three weight vectors [P], with ``a`` at (0, 0) and ``b`` on the x axis.

        Raises a ``UserError`` if two of them are equal or all lie on one line.
        """
        origin, ab, ac = a.double(), b.double() - a.double(), c.double() - a.double()
        if min(float(side.norm()) for side in (ab, ac, ab - ac)) == 0:
            raise UserError("two of the three models are identical and span no plane; use three different models")
        u = ab / ab.norm()
        c_along_u = ac @ u
        rest = ac - c_along_u * u
        c_along_v = rest.norm()
        if float(c_along_v) <= COLLINEAR * float(ac.norm()):
            raise UserError(
                "the three models are collinear and span no plane; use fedflat flatness path for the line between them"
            )
        corners = ((0.0, 0.0), (float(ab.norm()), 0.0), (float(c_along_u), float(c_along_v)))
        return cls(origin, u, rest / c_along_v, corners)

    def coordinates(self, weights: Tensor) -> tuple[float, float]:
        """Return the coordinates (x, y) of the orthogonal projection of ``weights`` [P] onto the plane."""
        offset = weights.double() - self.origin
        return float(offset @ self.u), float(offset @ self.v)

    def distance(self, weights: Tensor) -> float:
        """Return the Euclidean distance of ``weights`` [P] from the plane."""
        x, y = self.coordinates(weights)
        return float((weights.double() - self.at(x, y)).norm())

    def at(self, x: float, y: float) -> Tensor:
        """Return the weights at (x, y): a + x u + y v, [P] float64."""
        return self.origin + x * self.u + y * self.v

    def barycentric(self, x: float, y: float) -> tuple[float, float, float]:
        """Return the shares of the models a, b and c, which sum to 1, such that their weighted mean is at (x, y)."""
        _, (bx, _), (cx, cy) = self.corners
        c_share = y / cy
        b_share = (x - c_share * cx) / bx
        return 1 - b_share - c_share, b_share, c_share


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
    if not 0 <= margin < math.inf:
        raise UserError(f"margin={margin:g} is invalid; expected a finite number of at least 0")
    check_grid_size(points**2)
    corner_models = [models[name] for name in names[:3]]
    plane = Plane.through(*(model.weights for model in corner_models))
    marks = [Mark(name, corner) for name, corner in zip(names[:3], plane.corners, strict=True)]
    for name in names[3:]:
        projected = models[name].weights
        marks.append(Mark(name, plane.coordinates(projected), plane.distance(projected)))
    xs = spread_axis([mark.position[0] for mark in marks], points, margin)
    ys = spread_axis([mark.position[1] for mark in marks], points, margin)
    values = evaluate_models(measure, _grid_models(plane, corner_models, xs, ys), points**2, progress)
    grids = {quantity: column.reshape(points, points) for quantity, column in values.items()}
    weights = [model.weights.double() for model in corner_models]
    distances = {
        f"{names[i]} to {names[j]}": float((weights[i] - weights[j]).norm()) for i, j in ((0, 1), (0, 2), (1, 2))
    }
    metadata = {"plane_through": names[:3], "margin": margin, "distances": distances}
    return Landscape("plane", (xs, ys), grids, measure_marks(measure, marks, models.values()), metadata)


def plane_of(objective: Objective, models: Mapping[str, Tensor | nn.Module], **options: Any) -> Landscape:
    """Evaluate the loss of an objective on the plane through three models; further models are projected onto it.

    Floating-point buffers, such as BatchNorm statistics, are interpolated with the same shares as the weights.

    Args:
        objective: the loss as a function of the weights.
        models: modules, or flat vectors of weights [P] with the objective's buffers, by name.
        options: keyword arguments of ``plane_landscape``.
    """
    points, buffers = models_of(objective, models)
    return plane_landscape(points, loss_of(objective, buffers), **options)


def spread_axis(positions: Sequence[float], points: int, margin: float) -> tuple[float, ...]:
    """Return evenly spaced points over the range of ``positions``, extended by ``margin`` times its length per side."""
    low, high = min(positions), max(positions)
    extension = margin * (high - low)
    return tuple(np.linspace(low - extension, high + extension, points).tolist())


def _grid_models(
    plane: Plane, corner_models: Sequence[Model], xs: Sequence[float], ys: Sequence[float]
) -> Iterator[Model]:
    """Yield the model at every grid point (x, y), with buffers interpolated between those of the corner models.

    Args:
        plane: the plane through the corner models.
        corner_models: the three models that span the plane.
        xs: the grid's x coordinates.
        ys: its y coordinates.
    """
    dtype = corner_models[0].weights.dtype
    buffers = torch.stack([model.buffers for model in corner_models])
    for x, y in product(xs, ys):
        shares = torch.tensor(plane.barycentric(x, y), dtype=buffers.dtype, device=buffers.device)
        yield Model(plane.at(x, y).to(dtype), shares @ buffers)
