"""Eigenvalues at the ends of a spectrum by Lanczos: full reorthogonalisation, thick restarts, and a second look for what was missed.

From one starting vector, Lanczos sees one direction of each eigenspace, and so finds a repeated eigenvalue once. Therefore, when all that
was asked for has converged, it is kept and the search goes on from a new random vector orthogonal to it, until the next eigenvalue outside
has converged too. If that belongs among those asked for, it is taken in, and the search goes on; if not, nothing was missed.

>>> matrix = torch.diag(torch.tensor([5.0, 3.0, 3.0, 3.0, -4.0] + 20 * [1.0], dtype=torch.float64))
>>> found = lanczos(Operator.of_matrix(matrix), Ends(4, 1))
>>> [round(value, 6) for value in found.values.tolist()], found.converged
([5.0, 3.0, 3.0, 3.0, -4.0], True)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedflat.errors import UserError
from fedflat.flatness.curvature.krylov import Krylov, Ritz
from fedflat.flatness.curvature.operator import Operator
from fedflat.flatness.precision import rounding

LOOK_EVERY = 5
"""Products between looks at what has converged."""
TOLERANCE = 1e-3


@dataclass(frozen=True)
class Ends:
    """Which eigenvalues are asked for: the largest, and the smallest."""

    high: int
    low: int = 0

    @property
    def count(self) -> int:
        """How many they are."""
        return self.high + self.low

    def chosen(self, values: np.ndarray) -> np.ndarray:
        """Their places among ascending values, from the largest to the smallest."""
        order = np.arange(len(values))[::-1]
        return (
            order if self.count >= len(order) else np.concatenate([order[: self.high], order[len(order) - self.low :]])
        )

    def and_next(self) -> Ends:
        """One more at each end that is asked for."""
        return Ends(self.high + bool(self.high), self.low + bool(self.low))


@dataclass(frozen=True)
class Largest:
    """The eigenvalues largest in magnitude."""

    count: int

    def chosen(self, values: np.ndarray) -> np.ndarray:
        """Their places among ascending values, from the largest magnitude to the smallest."""
        return np.argsort(-np.abs(values), kind="stable")[: self.count]

    def and_next(self) -> Largest:
        """One more."""
        return Largest(self.count + 1)


@dataclass(frozen=True)
class Eigenpairs:
    """Eigenvalues in the order in which they were asked for, with what is known of their quality."""

    values: Tensor
    """float64, on the CPU."""
    vectors: Tensor
    """Unit eigenvectors, as rows."""
    residuals: Tensor
    """|H v - lambda v| of each."""
    products: int
    converged: bool


def lanczos(
    operator: Operator,
    wanted: Ends | Largest,
    *,
    tolerance: float = TOLERANCE,
    room: int | None = None,
    most: int | None = None,
    seed: int = 0,
    tell: Callable[[int, int], None] = lambda products, found: None,
) -> Eigenpairs:
    """The eigenvalues that are asked for, each until its residual is below ``tolerance`` times its magnitude.

    ``room`` bounds the vectors in memory (by default three times as many as asked for, and 40), ``most`` the products; ``tell`` is called
    now and then with the products taken and the number of eigenvalues that have converged.
    """
    _check(operator, wanted, tolerance)
    room = room or 3 * wanted.count + 40
    if room < min(operator.size, wanted.count + 4):
        raise UserError(
            f"{room} vectors are too few for {wanted.count} eigenvalues; expected room for at least {wanted.count + 4}"
        )
    most = most or 20 * (room + wanted.count)
    before, looked, second, locked = operator.products, 0, False, np.zeros(0)
    with rounding(allowed=False), torch.no_grad():
        space = Krylov(operator, room, seed)
        while True:
            space.step()
            taken = operator.products - before
            if not space.full and taken < most and taken - looked < LOOK_EVERY:
                continue
            looked, ritz = taken, space.ritz()
            places = wanted.chosen(ritz.values)
            good = _good(ritz, tolerance, operator.dtype)[places]
            tell(taken, int(good.sum()))
            if space.complete or taken >= most:
                break
            if (
                good.all()
                and len(ritz.values) > wanted.count
                and (not second or _next_good(ritz, wanted, tolerance, operator.dtype))
            ):
                if second and _same(ritz, places, locked, operator.dtype):
                    break
                second, locked = True, ritz.values[places]
                space.shrink(ritz, places, anew=True)
            elif space.full:
                space.shrink(ritz, _worth_keeping(ritz, wanted, space), anew=False)
        vectors = space.combined(ritz.vectors[:, places])
    converged = bool(good.all()) and (space.complete or taken < most)
    values, residuals = (torch.from_numpy(np.ascontiguousarray(part[places])) for part in (ritz.values, ritz.residuals))
    return Eigenpairs(values, vectors, residuals, taken, converged)


def _good(ritz: Ritz, tolerance: float, dtype: torch.dtype) -> np.ndarray:
    """Which Ritz values have converged."""
    return np.asarray(ritz.ahead <= np.maximum(tolerance * np.abs(ritz.values), _floor(ritz, dtype)))


def _floor(ritz: Ritz, dtype: torch.dtype) -> float:
    """The rounding of products with a matrix of this norm, below which nothing is known."""
    return float(50 * torch.finfo(dtype).eps * np.abs(ritz.values).max())


def _next_good(ritz: Ritz, wanted: Ends | Largest, tolerance: float, dtype: torch.dtype) -> bool:
    """Whether the next eigenvalues outside are known to be outside: they have converged well, or lie clearly apart from all within."""
    inside = wanted.chosen(ritz.values)
    outside = np.setdiff1d(wanted.and_next().chosen(ritz.values), inside)
    rank = np.abs(ritz.values) if isinstance(wanted, Largest) else ritz.values
    apart = np.abs(rank[outside, None] - rank[inside]).min(axis=1) > 3 * ritz.ahead[outside]
    tight, loose = (_good(ritz, share, dtype)[outside] for share in (tolerance / 3, tolerance**0.5))
    return bool((tight | (loose & apart)).all())


def _same(ritz: Ritz, places: np.ndarray, before: np.ndarray, dtype: torch.dtype) -> bool:
    """Whether no eigenvalue has taken another's place: each moved by less than its own uncertainty."""
    return bool((np.abs(ritz.values[places] - before) <= 2 * ritz.residuals[places] + _floor(ritz, dtype)).all())


def _worth_keeping(ritz: Ritz, wanted: Ends | Largest, space: Krylov) -> np.ndarray:
    """Half the room beyond what is asked for goes to the next Ritz vectors, which would be lost and found again otherwise."""
    more = wanted
    while more.count < min(wanted.count + (space.room - wanted.count) // 2, len(ritz.values) - 2):
        more = more.and_next()
    return more.chosen(ritz.values)


def _check(operator: Operator, wanted: Ends | Largest, tolerance: float) -> None:
    if wanted.count < 1:
        raise UserError("no eigenvalue is asked for; expected at least 1")
    if wanted.count > operator.size:
        raise UserError(
            f"{wanted.count} eigenvalues are more than the {operator.size} parameters of this model; ask for fewer"
        )
    if not 0 < tolerance < 1:
        raise UserError(f"a tolerance of {tolerance:g} is not possible; expected a number between 0 and 1")
