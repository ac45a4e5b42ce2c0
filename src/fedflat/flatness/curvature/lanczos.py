"""Extreme eigenvalues by Lanczos with full reorthogonalisation, thick restarts and a check for repeated eigenvalues.

``Krylov`` is the orthonormal basis V that Lanczos grows, one product with the matrix H per vector. The eigenvalues of
the small matrix T = V H V' (Ritz values) approximate those of H. ``lanczos`` grows and restarts a basis until the
requested eigenvalues have converged.

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
from fedflat.flatness.precision import tf32_allowed

COLUMNS = 1 << 20
"""Number of columns of the basis [size, P] that are combined at a time; all at once would need a second basis."""
CHECK_EVERY = 5
"""Products between convergence checks."""
TOLERANCE = 1e-3
"""Default relative residual at which an eigenvalue counts as converged."""


class Ritz(NamedTuple):
    """Approximate eigenpairs (Ritz pairs) from a basis of ``size`` vectors, in ascending order of the values."""

    values: np.ndarray
    """[size]."""
    vectors: np.ndarray
    """Ritz vectors as columns, in coordinates of the basis, [size, size]."""
    residuals: np.ndarray
    """|H v - lambda v| of each pair, [size]."""
    reducible: np.ndarray
    """The part of the residuals that further steps can reduce; the rest was inherited at a restart."""


class Krylov:
    """The orthonormal basis V that Lanczos grows, one vector per product with a symmetric matrix H.

    The eigenvalues and eigenvectors of the small matrix T = V H V' (Ritz pairs) approximate those of H. A full basis is
    restarted, i.e. reduced to a few Ritz vectors, whose residuals |H v - lambda v| later vectors inherit.

    Args:
        operator: the matrix H.
        room: maximum number of vectors in the basis; at most the number P of rows of H.
        seed: seed of random vectors.
        first: the vector to start from, [P]; default: a random one.

    Attributes:
        size: number of vectors in the basis so far.
    """

    def __init__(self, operator: Operator, room: int, seed: int = 0, first: Tensor | None = None) -> None:
        """Allocate ``room`` basis vectors and set the first one; ``first`` [P] need not have norm 1."""
        self.operator, self.room = operator, min(room, operator.size)
        self.size = 0
        self._seed, self._draws = seed, 0
        # The basis, and in the row after it the next vector to be added.
        self._rows = torch.zeros(self.room + 1, operator.size, dtype=operator.dtype, device=operator.device)
        self._projection = np.zeros((self.room, self.room))  # T
        self._inherited = np.zeros(self.room)  # residuals of the vectors kept at the last restart
        self._beta = 0.0  # norm of the last product's part outside the basis
        self._scale = 0.0  # largest entry of the projection so far
        self._rows[0] = self._random_vector() if first is None else first / first.norm()

    @property
    def is_full(self) -> bool:
        """Whether the basis has reached ``room`` vectors."""
        return self.size == self.room

    @property
    def is_complete(self) -> bool:
        """Whether the basis spans the whole space, so Ritz values are exact."""
        return self.size == self.operator.size

    @property
    def is_invariant(self) -> bool:
        """Whether the basis spans an invariant subspace."""
        return self._beta == 0.0

    @property
    def projection(self) -> np.ndarray:
        """T, the projection of H onto the basis, [size, size]."""
        return self._projection[: self.size, : self.size]

    def step(self) -> None:
        """Append the next vector to the basis, and compute the vector that follows it from one product with H.

        The product H v of the appended vector v is split into a part in the basis and a remainder orthogonal to it. The
        coefficients of the first part are the next column of the projection T. The normalised remainder is the vector
        that follows. Its norm, ``_beta``, is 0 if H maps the basis into itself, i.e. if the basis is invariant.
        """
        basis = self._rows[: self.size + 1]  # its last row is the vector to append
        remainder = self.operator(basis[-1:])[0]
        coefficients = torch.zeros_like(basis[:, 0])
        for _ in range(2):  # once leaves rounding errors, twice is orthogonal to working precision
            correction = basis @ remainder
            remainder = remainder - correction @ basis
            coefficients += correction
        column = coefficients.double().cpu().numpy()
        self._projection[: self.size + 1, self.size] = self._projection[self.size, : self.size + 1] = column
        self._scale = max(self._scale, float(np.abs(column).max()))
        self.size += 1
        if self.is_complete:  # the basis spans the whole space, so the remainder is rounding error
            self._beta = 0.0
        else:
            self._set_next_row(remainder, float(np.linalg.norm(column)))

    def _set_next_row(self, remainder: Tensor, norm_in_basis: float) -> None:
        """Set the vector that the next step appends: the normalised ``remainder`` [P], or a random one if it is 0.

        ``norm_in_basis`` is the norm of the product's part in the basis, whose rounding error is in the remainder.
        """
        self._beta = float(remainder.norm())
        eps = torch.finfo(remainder.dtype).eps
        if self._beta <= 10 * eps * self._scale:  # only rounding error is left: the subspace is invariant
            self._beta = 0.0
            self._rows[self.size] = self._random_vector()
        elif self._beta <= eps**0.5 * norm_in_basis:  # partly rounding error, which normalising would amplify
            self._rows[self.size] = self._orthonormalise(remainder / self._beta)
        else:
            self._rows[self.size] = remainder / self._beta

    def ritz(self) -> Ritz:
        """Return Ritz values, vectors and residuals of the current basis.

        The residual of a Ritz vector v, |H v - lambda v|, has two parts. One is ``_beta`` times the last coordinate of
        v, which further steps reduce. The other is inherited from the vectors that were kept at a restart.
        """
        values, vectors = np.linalg.eigh(self.projection)
        reducible = self._beta * np.abs(vectors[-1])
        return Ritz(values, vectors, np.hypot(reducible, self._inherited_residuals(vectors)), reducible)

    def to_full_space(self, vectors: np.ndarray) -> Tensor:
        """Convert vectors from coordinates in the basis, the columns of [size, k], to weight space, as rows [k, P]."""
        parts = torch.split(self._rows[: self.size], COLUMNS, dim=1)  # some columns at a time, as in ``restart``
        return torch.cat([_combine_rows(vectors, part) for part in parts], dim=1)

    def restart(self, ritz: Ritz, selected: np.ndarray, *, from_random: bool) -> None:
        """Reduce the basis to selected Ritz vectors, which makes room for further steps.

        Args:
            ritz: the Ritz pairs of the current basis.
            selected: indices of the pairs to keep, [k].
            from_random: whether to continue from a random vector, to find eigenvectors that are orthogonal to
                everything so far. Otherwise the next vector stays the one that the last step computed.
        """
        count, next_row = len(selected), self._rows[self.size].clone()
        vectors = ritz.vectors[:, selected]
        for part in torch.split(self._rows[: self.size], COLUMNS, dim=1):  # in parts, to avoid a second basis
            part[:count] = _combine_rows(vectors, part)
        # Without the next vector, further steps can no longer reduce the residuals along it.
        inherited = ritz.residuals[selected] if from_random else self._inherited_residuals(vectors)
        self._inherited[:] = 0
        self._inherited[:count] = inherited
        self._projection[:] = 0
        self._projection[range(count), range(count)] = ritz.values[selected]
        self.size = count
        self._rows[count] = self._random_vector() if from_random else next_row

    def _inherited_residuals(self, vectors: np.ndarray) -> np.ndarray:
        """Return the residuals [k] that ``vectors`` inherit from the inaccurate vectors kept at the last restart.

        ``vectors`` [size, k] holds coordinates in the basis, one column per vector.
        """
        if self.is_complete or not self._inherited.any():
            return np.zeros(vectors.shape[1])
        return np.asarray(np.linalg.norm(vectors * self._inherited[: self.size, None], axis=0))

    def _random_vector(self) -> Tensor:
        """Draw a random unit vector orthogonal to the basis."""
        row = self.operator.normal(self._seed, "lanczos", self._draws)
        self._draws += 1  # so that every call returns a different vector
        return self._orthonormalise(row / row.norm())

    def _orthonormalise(self, row: Tensor) -> Tensor:
        """Return ``row`` orthogonalised against the basis and normalised."""
        basis = self._rows[: self.size]
        for _ in range(2):  # once leaves rounding errors, twice is orthogonal to working precision
            row = row - (basis @ row) @ basis
            row = row / row.norm()
        return row


def _combine_rows(vectors: np.ndarray, rows: Tensor) -> Tensor:
    """Return k combinations [k, n] of ``rows`` [size, n]; coefficients are the columns of ``vectors`` [size, k]."""
    return torch.from_numpy(np.ascontiguousarray(vectors.T)).to(rows) @ rows


@dataclass(frozen=True)
class Ends:
    """A request for the ``high`` largest and the ``low`` smallest eigenvalues."""

    high: int
    """How many of the largest eigenvalues are requested."""
    low: int = 0
    """How many of the smallest eigenvalues are requested."""

    @property
    def count(self) -> int:
        """Total number of requested eigenvalues."""
        return self.high + self.low

    def select(self, values: np.ndarray) -> np.ndarray:
        """Return the indices of the requested values, largest value first; ``values`` is sorted in ascending order."""
        descending = np.arange(len(values))[::-1]
        if self.count >= len(values):  # both ends together cover all values
            return descending
        return np.concatenate([descending[: self.high], descending[len(values) - self.low :]])

    def extended(self) -> Ends:
        """Return a request for one more eigenvalue at each requested end of the spectrum."""
        return Ends(self.high + bool(self.high), self.low + bool(self.low))


@dataclass(frozen=True)
class Largest:
    """A request for the ``count`` eigenvalues of largest magnitude."""

    count: int
    """Number of requested eigenvalues."""

    def select(self, values: np.ndarray) -> np.ndarray:
        """Return the indices of the requested values in ``values`` (in ascending order), largest magnitude first."""
        return np.argsort(-np.abs(values), kind="stable")[: self.count]

    def extended(self) -> Largest:
        """Return a request for one more eigenvalue."""
        return Largest(self.count + 1)


@dataclass(frozen=True)
class Eigenpairs:
    """The k requested eigenvalues of a P x P matrix H with their eigenvectors, in the requested order."""

    values: Tensor
    """Eigenvalues, shape [k], float64, on the CPU."""
    vectors: Tensor
    """Unit eigenvectors as rows, shape [k, P]."""
    residuals: Tensor
    """Norm of H v - lambda v for each eigenvalue lambda and eigenvector v, shape [k]."""
    products: int
    """Number of matrix-vector products that were computed."""
    converged: bool
    """Whether every residual is below the tolerance."""


def lanczos(
    operator: Operator,
    wanted: Ends | Largest,
    *,
    tolerance: float = TOLERANCE,
    room: int | None = None,
    max_products: int | None = None,
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda products, converged: None,
) -> Eigenpairs:
    """Compute eigenpairs of a large symmetric matrix from its products with vectors.

    The search takes a few Lanczos steps at a time, then checks whether all requested eigenvalues have converged, i.e.
    have residuals below ``tolerance`` times their magnitude. A basis without room for further steps is reduced to its
    best vectors. Lanczos finds a repeated eigenvalue only once per starting vector. After convergence, the search
    therefore restarts from a random vector, and it ends when such a restart changes none of the eigenvalues.

    Args:
        operator: the symmetric matrix.
        wanted: the eigenvalues to find: ``Ends`` (largest and smallest) or ``Largest`` (in magnitude).
        tolerance: relative residual at which an eigenvalue counts as converged.
        room: maximum number of basis vectors in memory; default: 3 * count + 40.
        max_products: products with the matrix after which the search stops in any case; default: 20 * (room + count).
        seed: seed of the starting vectors.
        progress: called with (products, converged eigenvalues) at every convergence check.
    """
    room = room or 3 * wanted.count + 40
    max_products = max_products or 20 * (room + wanted.count)
    _check_request(operator, wanted, tolerance, room)
    products, dtype = 0, operator.dtype
    previous_values: np.ndarray | None = None  # requested eigenvalues before the last restart from a random vector
    with tf32_allowed(False), torch.no_grad():
        space = Krylov(operator, room, seed)
        while True:
            steps = min(CHECK_EVERY, space.room - space.size, max_products - products)
            for _ in range(steps):
                space.step()
            products += steps
            ritz = space.ritz()  # the current approximations of eigenpairs
            selected = wanted.select(ritz.values)
            converged = _have_converged(ritz, tolerance, dtype)[selected]
            progress(products, int(converged.sum()))
            if space.is_complete or products >= max_products:  # a complete basis spans the whole space
                break
            all_found = converged.all() and len(ritz.values) > wanted.count  # the next eigenvalue must be known, too
            if all_found and previous_values is not None:
                # A missed copy of a repeated eigenvalue may still appear among the next eigenvalues.
                all_found = _next_are_excluded(ritz, wanted, tolerance, dtype)
            if all_found:
                if previous_values is not None and _are_unchanged(ritz, selected, previous_values, dtype):
                    break  # the last restart found no missed copy of a repeated eigenvalue
                previous_values = ritz.values[selected]
                space.restart(ritz, selected, from_random=True)
            elif space.is_full:  # make room for further steps
                space.restart(ritz, _worth_keeping(ritz, wanted, space), from_random=False)
        vectors = space.to_full_space(ritz.vectors[:, selected])
    return Eigenpairs(
        torch.from_numpy(ritz.values[selected]),
        vectors,
        torch.from_numpy(ritz.residuals[selected]),
        products,
        converged=bool(converged.all()) and (space.is_complete or products < max_products),
    )


def _check_request(operator: Operator, wanted: Ends | Largest, tolerance: float, room: int) -> None:
    """Raise a ``UserError`` for arguments of ``lanczos`` that are invalid or cannot be fulfilled."""
    if wanted.count < 1:
        raise UserError("no eigenvalue requested; expected at least 1")
    if wanted.count > operator.size:
        raise UserError(f"{wanted.count} eigenvalues requested, but the model has only {operator.size} parameters")
    if not 0 < tolerance < 1:
        raise UserError(f"tolerance={tolerance:g} is invalid; expected a number between 0 and 1")
    if room < min(operator.size, wanted.count + 4):
        raise UserError(
            f"room={room} is too small for {wanted.count} eigenvalues; expected at least {wanted.count + 4}"
        )


def _have_converged(ritz: Ritz, tolerance: float, dtype: torch.dtype) -> np.ndarray:
    """Return for each Ritz value, an approximate eigenvalue, whether it has converged, [size].

    The part of its residual that further steps can reduce must be below ``tolerance`` times its magnitude, or below
    the rounding error of products in ``dtype``.
    """
    return np.asarray(ritz.reducible <= np.maximum(tolerance * np.abs(ritz.values), _rounding_error(ritz, dtype)))


def _rounding_error(ritz: Ritz, dtype: torch.dtype) -> float:
    """Return a bound on the rounding error of a product: 50 times ``dtype``'s epsilon times the norm of the matrix.

    The norm is estimated by the largest magnitude of a Ritz value (an approximate eigenvalue).
    """
    return float(50 * torch.finfo(dtype).eps * np.abs(ritz.values).max())


def _next_are_excluded(ritz: Ritz, wanted: Ends | Largest, tolerance: float, dtype: torch.dtype) -> bool:
    """Whether the eigenvalues that follow the requested ones are certain not to belong to them.

    If 5 are requested, for example, the sixth largest must have converged to a third of the tolerance. If it is clearly
    separated from all requested eigenvalues, a looser tolerance suffices: the square root.
    """
    requested = wanted.select(ritz.values)
    following = np.setdiff1d(wanted.extended().select(ritz.values), requested)
    values = np.abs(ritz.values) if isinstance(wanted, Largest) else ritz.values  # as the request compares them
    distances = np.abs(values[following, None] - values[requested]).min(axis=1)
    separated = distances > 3 * ritz.reducible[following]
    tight = _have_converged(ritz, tolerance / 3, dtype)[following]
    loose = _have_converged(ritz, tolerance**0.5, dtype)[following]
    return bool((tight | (loose & separated)).all())


def _are_unchanged(ritz: Ritz, selected: np.ndarray, previous: np.ndarray, dtype: torch.dtype) -> bool:
    """Whether every selected eigenvalue has changed by no more than its uncertainty since a previous search.

    Args:
        ritz: the current Ritz pairs.
        selected: indices of the requested eigenvalues among them, [k].
        previous: the values that the previous search found, [k].
        dtype: precision of the products.
    """
    changes = np.abs(ritz.values[selected] - previous)
    return bool((changes <= 2 * ritz.residuals[selected] + _rounding_error(ritz, dtype)).all())


def _worth_keeping(ritz: Ritz, wanted: Ends | Largest, space: Krylov) -> np.ndarray:
    """Return the indices of the Ritz pairs (approximate eigenpairs) to keep at a restart of a full basis.

    They are the requested pairs and their neighbours, which fill half of the remaining room: more neighbours speed up
    convergence, but leave fewer steps until the next restart. At least two pairs are dropped, so the basis can grow.
    """
    count = min(wanted.count + (space.room - wanted.count) // 2, len(ritz.values) - 2)
    request = wanted
    while request.count < count:
        request = request.extended()
    return request.select(ritz.values)
