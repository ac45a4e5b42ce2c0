"""An orthonormal Krylov basis of a symmetric matrix H, and the projection of H onto it.

With the basis V (as rows), T = V H V' and the next vector q, orthogonal to V,

    H V' = V' T + beta q e' + carried,

where e selects the last vector and ``carried`` is the remainder of a restart from vectors that were not exactly
invariant. A Ritz pair (theta, y = V' s) with T s = theta s has the residual |H y - theta y| = beta |s_last|, at no
cost. Every new vector is orthogonalised twice against the whole basis; otherwise Lanczos finds the largest
eigenvalues repeatedly.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedflat.flatness.curvature.operator import Operator

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
