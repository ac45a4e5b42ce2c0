"""Extreme eigenvalues by Lanczos with full reorthogonalisation, thick restarts and a check for repeated eigenvalues.

``lanczos`` grows and restarts a ``Krylov`` basis until the requested eigenvalues have converged.

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
from fedflat.flatness.precision import tf32_allowed

CHECK_EVERY = 5
"""Products between convergence checks."""
TOLERANCE = 1e-3
"""Default relative residual at which an eigenvalue counts as converged."""


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

    def scales(self, values: np.ndarray) -> np.ndarray:
        """Return the magnitude to which the tolerance of each value is relative, [size]; ``values`` is ascending.

        It is the value's own magnitude. At the low end it is the largest magnitude of all, because the smallest
        eigenvalue of a Hessian is often near 0, where its own magnitude would ask for needless digits.
        """
        scales: np.ndarray = np.abs(values)
        if self.low:
            scales[: self.low + 1] = scales.max()  # including the next value, which shows that none was missed
        return scales

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

    def scales(self, values: np.ndarray) -> np.ndarray:
        """Return the magnitude to which the tolerance of each value is relative, its own, [size]."""
        return np.asarray(np.abs(values))

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
    """Norm of H v - lambda v for each eigenvalue lambda and eigenvector v, shape [k].

    At least the rounding error of a product for Lanczos.
    """
    products: int
    """Number of matrix-vector products that were computed."""
    converged: bool
    """Whether every residual is below the tolerance. Lanczos: also whether rounding errors are."""


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
    have residuals below ``tolerance`` times their magnitude (times the largest magnitude for the smallest eigenvalues
    of ``Ends``). A basis without room for further steps is reduced to its best vectors. Lanczos finds a repeated
    eigenvalue only once per starting vector. After convergence, the search therefore restarts from a random vector, and
    it ends when such a restart changes none of the eigenvalues.

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
            converged = _have_converged(ritz, wanted, tolerance, dtype)[selected]
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
    values, rounding_error = ritz.values[selected], max(_rounding_error(ritz, dtype), space.rounding_error)
    # Next to a much larger eigenvalue, rounding errors of products exceed the tolerance of a small one, unless it is 0.
    is_zero = np.abs(values) <= 4 * rounding_error  # the rounding errors of several products add up
    is_resolved = bool((is_zero | (rounding_error <= tolerance * wanted.scales(ritz.values)[selected])).all())
    return Eigenpairs(
        torch.from_numpy(values),
        vectors,
        torch.from_numpy(np.maximum(ritz.residuals[selected], rounding_error)),
        products,
        converged=bool(converged.all()) and is_resolved and (space.is_complete or products < max_products),
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


def _have_converged(ritz: Ritz, wanted: Ends | Largest, tolerance: float, dtype: torch.dtype) -> np.ndarray:
    """Return for each Ritz value, an approximate eigenvalue, whether it needs no further steps, [size].

    The part of its residual that further steps can reduce must be below ``tolerance`` times the magnitude that
    ``wanted`` chooses, or below the rounding error of products in ``dtype``.
    """
    bounds = np.maximum(tolerance * wanted.scales(ritz.values), 50 * _rounding_error(ritz, dtype))
    return np.asarray(ritz.reducible <= bounds)


def _rounding_error(ritz: Ritz, dtype: torch.dtype) -> float:
    """Estimate the rounding error of a product: ``dtype``'s epsilon times the norm of the matrix.

    The norm is estimated by the largest magnitude of a Ritz value (an approximate eigenvalue).
    """
    return float(torch.finfo(dtype).eps * np.abs(ritz.values).max())


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
    tight = _have_converged(ritz, wanted, tolerance / 3, dtype)[following]
    loose = _have_converged(ritz, wanted, tolerance**0.5, dtype)[following]
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
    return bool((changes <= 2 * ritz.residuals[selected] + 50 * _rounding_error(ritz, dtype)).all())


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
