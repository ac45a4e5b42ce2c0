"""A symmetric matrix that is known by its products with vectors alone.

>>> Operator.of_matrix(torch.tensor([[2.0, 0.0], [0.0, 3.0]]))(torch.eye(2)).tolist()
[[2.0, 0.0], [0.0, 3.0]]
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedflat.errors import UserError
from fedflat.flatness.batches import generator
from fedflat.flatness.objective import Objective


@dataclass
class Operator:
    """Products of a symmetric matrix with the rows of another, counted."""

    apply: Callable[[Tensor], Tensor]
    """From rows [b, P] to the products of the matrix with each of them, [b, P]."""
    size: int
    dtype: torch.dtype = torch.float32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    products: int = 0
    """How many products were taken so far."""

    @classmethod
    def of_matrix(cls, matrix: Tensor) -> Operator:
        """A matrix that is there as a whole."""
        return cls(lambda rows: rows @ matrix, len(matrix), matrix.dtype, matrix.device)

    @classmethod
    def of_hessian(cls, objective: Objective, w: Tensor | None = None) -> Operator:
        """The Hessian of an objective at w, by default at the model's own weights."""
        return cls(lambda rows: objective.hessian_products(w, rows), objective.size, objective.dtype, objective.device)

    def __call__(self, rows: Tensor) -> Tensor:
        """The products with some rows."""
        found = self.apply(rows)
        self.products += len(rows)
        if not bool(found.isfinite().all()):
            raise UserError(
                "a Hessian product of this model is not finite, so that it has no curvature; take a model that did not diverge"
            )
        return found

    def normal(self, seed: int, purpose: str, number: int = 0) -> Tensor:
        """A vector of standard normal numbers, a function of its arguments."""
        return self._placed(generator(seed, purpose, number).standard_normal(self.size, dtype="float32"))

    def signs(self, seed: int, purpose: str, number: int = 0) -> Tensor:
        """A vector of random signs."""
        return self._placed(generator(seed, purpose, number).integers(0, 2, self.size, dtype="int8") * 2.0 - 1.0)

    def _placed(self, values: object) -> Tensor:
        return torch.as_tensor(values, dtype=self.dtype).to(self.device)
