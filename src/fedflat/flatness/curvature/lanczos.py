"""Extreme eigenvalues by Lanczos with full reorthogonalisation, thick restarts and a check for repeated eigenvalues.

From one starting vector, Lanczos finds a repeated eigenvalue only once. Therefore, once all requested eigenvalues have
converged, their vectors are kept and the search restarts from a random vector orthogonal to them, until the next
eigenvalue has converged too. If it belongs to the requested ones, the search continues; otherwise nothing was missed.

>>> matrix = torch.diag(torch.tensor([5.0, 3.0, 3.0, 3.0, -4.0] + 20 * [1.0], dtype=torch.float64))
>>> pairs = lanczos(Operator.of_matrix(matrix), Ends(4, 1))
>>> [round(value, 6) for value in pairs.values.tolist()], pairs.converged
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

CHECK_EVERY = 5
"""Products between convergence checks."""
TOLERANCE = 1e-3


@dataclass(frozen=True)
class Ends:
    """Requests the ``high`` largest and the ``low`` smallest eigenvalues."""

    high: int
    low: int = 0

    @property
    def count(self) -> int:
        """Number of requested eigenvalues."""
        return self.high + self.low

    def chosen(self, values: np.ndarray) -> np.ndarray:
        """Indices of the requested values among ascending ``values``, largest first."""
        order = np.arange(len(values))[::-1]
        return (
            order if self.count >= len(order) else np.concatenate([order[: self.high], order[len(order) - self.low :]])
        )

    def and_next(self) -> Ends:
        """The request extended by one at each requested end."""
        return Ends(self.high + bool(self.high), self.low + bool(self.low))


@dataclass(frozen=True)
class Largest:
    """Requests the ``count`` eigenvalues of largest magnitude."""

    count: int

    def chosen(self, values: np.ndarray) -> np.ndarray:
        """Indices of the requested values among ascending ``values``, largest magnitude first."""
        return np.argsort(-np.abs(values), kind="stable")[: self.count]

    def and_next(self) -> Largest:
        """The request extended by one."""
        return Largest(self.count + 1)


@dataclass(frozen=True)
class Eigenpairs:
    """Eigenpairs in the requested order, with residuals."""

    values: Tensor
    """[k] float64, on the CPU."""
    vectors: Tensor
    """[k, P], unit eigenvectors as rows."""
    residuals: Tensor
    """[k], |H v - lambda v| of each pair."""
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
    progress: Callable[[int, int], None] = lambda products, found: None,
) -> Eigenpairs:
    """Compute the requested eigenpairs until every residual is below ``tolerance`` times the eigenvalue's magnitude.

    Args:
        operator: the symmetric matrix.
        wanted: ``Ends`` or ``Largest``.
        tolerance: relative residual at which an eigenvalue counts as converged.
        room: maximum number of basis vectors in memory; default: 3 * count + 40.
        most: maximum number of products; default: 20 * (room + count).
        seed: seed of the starting vectors.
        progress: called with (products, converged eigenvalues) at every convergence check.
    """
    _check(operator, wanted, tolerance)
    room = room or 3 * wanted.count + 40
    if room < min(operator.size, wanted.count + 4):
        raise UserError(
            f"room={room} is too small for {wanted.count} eigenvalues; expected at least {wanted.count + 4}"
        )
    most = most or 20 * (room + wanted.count)
    before, checked, second, locked = operator.products, 0, False, np.zeros(0)
    with rounding(allowed=False), torch.no_grad():
        space = Krylov(operator, room, seed)
        while True:
            space.step()
            taken = operator.products - before
            if not space.full and taken < most and taken - checked < CHECK_EVERY:
                continue
            checked, ritz = taken, space.ritz()
            places = wanted.chosen(ritz.values)
            good = _good(ritz, tolerance, operator.dtype)[places]
            progress(taken, int(good.sum()))
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
    """Rounding error of products with a matrix of this norm."""
    return float(50 * torch.finfo(dtype).eps * np.abs(ritz.values).max())


def _next_good(ritz: Ritz, wanted: Ends | Largest, tolerance: float, dtype: torch.dtype) -> bool:
    """Whether the next eigenvalues are certainly not requested: converged tightly, or clearly separated."""
    inside = wanted.chosen(ritz.values)
    outside = np.setdiff1d(wanted.and_next().chosen(ritz.values), inside)
    rank = np.abs(ritz.values) if isinstance(wanted, Largest) else ritz.values
    apart = np.abs(rank[outside, None] - rank[inside]).min(axis=1) > 3 * ritz.ahead[outside]
    tight, loose = (_good(ritz, share, dtype)[outside] for share in (tolerance / 3, tolerance**0.5))
    return bool((tight | (loose & apart)).all())


def _same(ritz: Ritz, places: np.ndarray, before: np.ndarray, dtype: torch.dtype) -> bool:
    """Whether every eigenvalue moved by less than its uncertainty since ``before``."""
    return bool((np.abs(ritz.values[places] - before) <= 2 * ritz.residuals[places] + _floor(ritz, dtype)).all())


def _worth_keeping(ritz: Ritz, wanted: Ends | Largest, space: Krylov) -> np.ndarray:
    """Indices kept at a restart: the requested ones and further Ritz vectors for half of the remaining room."""
    more = wanted
    while more.count < min(wanted.count + (space.room - wanted.count) // 2, len(ritz.values) - 2):
        more = more.and_next()
    return more.chosen(ritz.values)


def _check(operator: Operator, wanted: Ends | Largest, tolerance: float) -> None:
    if wanted.count < 1:
        raise UserError("no eigenvalue requested; expected at least 1")
    if wanted.count > operator.size:
        raise UserError(f"{wanted.count} eigenvalues requested, but the model has only {operator.size} parameters")
    if not 0 < tolerance < 1:
        raise UserError(f"tolerance={tolerance:g} is invalid; expected a number between 0 and 1")
