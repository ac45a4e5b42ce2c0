"""The orthonormal basis V that Lanczos grows, one product with the matrix H per vector.

The eigenvalues of the small matrix T = V H V' (Ritz values) approximate those of H.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedflat.flatness.curvature.operator import Operator

COLUMNS = 1 << 20
"""Number of columns of the basis [size, P] that are combined at a time; all at once would need a second basis."""


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
        room: maximum number of vectors in the basis; at most P, the number of rows of H.
        seed: seed of random vectors.
        first: the vector to start from, [P]; default: a random one.

    Attributes:
        size: number of vectors in the basis so far.
        rounding_error: largest remainder of a product that was taken for rounding error. Residuals can be this wrong.
    """

    def __init__(self, operator: Operator, room: int, seed: int = 0, first: Tensor | None = None) -> None:
        """Allocate ``room`` basis vectors and set the first one; ``first`` [P] need not have norm 1."""
        self.operator, self.room = operator, min(room, operator.size)
        self.size, self.rounding_error = 0, 0.0
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
            self.rounding_error, self._beta = max(self.rounding_error, self._beta), 0.0
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
