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
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedflat.errors import UserError
from fedflat.flatness.curvature.operator import Operator
from fedflat.flatness.precision import rounding

COLUMNS = 1 << 20
"""Basis columns combined at a time, to avoid allocating a second basis."""


class Ritz(NamedTuple):
    """Ritz values in ascending order with their residual norms."""

    values: np.ndarray
    vectors: np.ndarray
    """Ritz vectors as columns, in coordinates of the basis."""
    residuals: np.ndarray
    ahead: np.ndarray
    """The part of the residuals that further steps can reduce."""


class Krylov:
    """A basis of at most ``room`` vectors, started from ``first`` or from a random vector."""

    def __init__(self, operator: Operator, room: int, seed: int = 0, first: Tensor | None = None) -> None:
        self.operator, self.room = operator, min(room, operator.size)
        self._seed, self._drawn = seed, 0
        self._rows = torch.zeros(self.room + 1, operator.size, dtype=operator.dtype, device=operator.device)
        self._seen = np.zeros((self.room, self.room))
        self._carried = np.zeros(self.room)
        self._beta = self._scale = 0.0
        self.size = 0
        self._rows[0] = self._random() if first is None else first / first.norm()

    @property
    def full(self) -> bool:
        """Whether the basis has reached ``room`` vectors."""
        return self.size == self.room

    @property
    def complete(self) -> bool:
        """Whether the basis spans the whole space, so Ritz values are exact."""
        return self.size == self.operator.size

    @property
    def invariant(self) -> bool:
        """Whether the basis spans an invariant subspace."""
        return self._beta == 0.0

    @property
    def seen(self) -> np.ndarray:
        """T, the projection of H onto the basis."""
        return self._seen[: self.size, : self.size]

    def step(self) -> None:
        """Append the next vector to the basis and compute the following one from its product with H."""
        basis = self._rows[: self.size + 1]
        left = self.operator(basis[-1:])[0]
        onto = torch.zeros_like(basis[:, 0])
        for _ in range(2):
            part = basis @ left
            left = left - part @ basis
            onto += part
        seen = onto.double().cpu().numpy()
        self._seen[: self.size + 1, self.size] = self._seen[self.size, : self.size + 1] = seen
        self._scale = max(self._scale, float(np.abs(seen).max()))
        self.size += 1
        if self.complete:
            self._beta = 0.0
            return
        self._beta = float(left.norm())
        if (
            self._beta <= 10 * torch.finfo(left.dtype).eps * self._scale
        ):  # only rounding error is left: the subspace is invariant
            self._beta = 0.0
            self._rows[self.size] = self._random()
        elif self._beta <= torch.finfo(left.dtype).eps ** 0.5 * np.linalg.norm(seen):  # partly rounding error
            self._rows[self.size] = self._orthogonal(left / self._beta)
        else:
            self._rows[self.size] = left / self._beta

    def ritz(self) -> Ritz:
        """Ritz values, vectors and residuals of the current basis."""
        values, vectors = np.linalg.eigh(self.seen)
        ahead = self._beta * np.abs(vectors[-1])
        return Ritz(values, vectors, np.hypot(ahead, self._left_behind(vectors)), ahead)

    def combined(self, vectors: np.ndarray) -> Tensor:
        """Vectors given in terms of the basis, as rows."""
        return torch.cat(
            [_combined(vectors, part) for part in torch.split(self._rows[: self.size], COLUMNS, dim=1)], dim=1
        )

    def shrink(self, ritz: Ritz, chosen: np.ndarray, anew: bool) -> None:
        """Keep some Ritz vectors as the basis, and go on from the next vector, or with ``anew`` from a random one."""
        count, following = len(chosen), self._rows[self.size].clone()
        vectors = ritz.vectors[:, chosen]
        for part in torch.split(self._rows[: self.size], COLUMNS, dim=1):
            part[:count] = _combined(vectors, part)
        carried = ritz.residuals[chosen] if anew else self._left_behind(vectors)
        self._carried[:], self._seen[:] = 0, 0
        self._carried[:count] = carried
        self._seen[range(count), range(count)] = ritz.values[chosen]
        self.size = count
        self._rows[count] = self._random() if anew else following

    def _left_behind(self, vectors: np.ndarray) -> np.ndarray:
        """Residuals inherited from the last restart."""
        none = self.complete or not self._carried.any()
        return (
            np.zeros(vectors.shape[1]) if none else np.linalg.norm(vectors * self._carried[: self.size, None], axis=0)
        )

    def _random(self) -> Tensor:
        row = self.operator.normal(self._seed, "lanczos", self._drawn)
        self._drawn += 1
        return self._orthogonal(row / row.norm())

    def _orthogonal(self, row: Tensor) -> Tensor:
        """``row`` orthogonalised against the basis and normalised."""
        basis = self._rows[: self.size]
        for _ in range(2):
            row = row - (basis @ row) @ basis
            row = row / row.norm()
        return row


def _combined(vectors: np.ndarray, part: Tensor) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(vectors.T)).to(part) @ part


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
