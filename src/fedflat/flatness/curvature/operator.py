"""A symmetric matrix defined by its matrix-vector products.

>>> Operator.of_matrix(torch.tensor([[2.0, 0.0], [0.0, 3.0]]))(torch.eye(2)).tolist()
[[2.0, 0.0], [0.0, 3.0]]
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedflat.errors import UserError, one_of
from fedflat.flatness.objective import Objective
from fedflat.randomness import generator

MATRICES = ("hessian", "gauss-newton", "empirical-fisher")
"""Matrices that describe the curvature of a loss."""


@dataclass
class Operator:
    """A symmetric P x P matrix that is given by its products with vectors; the products are counted."""

    apply: Callable[[Tensor], Tensor]
    """Function that maps b vectors, the rows of [b, P], to the products of the matrix with each of them, [b, P]."""
    size: int
    """Number of rows P of the matrix."""
    dtype: torch.dtype = torch.float32
    """Data type of the vectors."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    """Device of the vectors."""
    products: int = 0
    """Number of matrix-vector products computed so far."""

    @classmethod
    def of_matrix(cls, matrix: Tensor) -> Operator:
        """Return the operator of a dense symmetric matrix [P, P]."""
        return cls(lambda rows: rows @ matrix, len(matrix), matrix.dtype, matrix.device)

    @classmethod
    def of_hessian(cls, objective: Objective, w: Tensor | None = None) -> Operator:
        """Return the Hessian of an objective at the weights ``w`` [P] (default: the objective's weights)."""
        return cls(lambda rows: objective.hessian_products(w, rows), objective.size, objective.dtype, objective.device)

    @classmethod
    def of_objective(cls, objective: Objective, matrix: str = "hessian") -> Operator:
        """Return a curvature matrix at the objective's weights: ``hessian``, ``gauss-newton`` or ``empirical-fisher``.

        For cross-entropy, ``gauss-newton`` is the Fisher matrix.
        """
        if matrix not in MATRICES:
            raise one_of("curvature matrix", matrix, MATRICES)
        if matrix == "hessian":
            return cls.of_hessian(objective)

        def products(rows: Tensor) -> Tensor:
            return objective.gauss_newton_products(None, rows, empirical_fisher=matrix == "empirical-fisher")

        return cls(products, objective.size, objective.dtype, objective.device)

    def __call__(self, rows: Tensor) -> Tensor:
        """Multiply the matrix by each of ``rows`` [b, P]; raises a ``UserError`` if a product is not finite."""
        products = self.apply(rows)
        self.products += len(rows)
        if not bool(products.isfinite().all()):
            raise UserError("a Hessian-vector product of this model is not finite; use a model that did not diverge")
        return products

    def normal(self, seed: int, purpose: str, number: int = 0) -> Tensor:
        """Draw a standard normal vector [P]; the same arguments always give the same vector."""
        return self._to_tensor(generator(seed, purpose, number).standard_normal(self.size, dtype="float32"))

    def rademacher(self, seed: int, purpose: str, number: int = 0) -> Tensor:
        """Draw a vector [P] of random signs; the same arguments always give the same vector."""
        return self._to_tensor(generator(seed, purpose, number).integers(0, 2, self.size, dtype="int8") * 2.0 - 1.0)

    def _to_tensor(self, values: object) -> Tensor:
        return torch.as_tensor(values, dtype=self.dtype).to(self.device)
