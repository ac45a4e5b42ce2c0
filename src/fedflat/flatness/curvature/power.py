"""Eigenvalues by power iteration with deflation, as published figures were made (Caldarola et al. 2022, appendix C.4: 20 iterations).

    v <- H' v / |H' v|,   H' = H - sum_i lambda_i v_i v_i',   lambda = v . H' v

It finds the largest in magnitude first. Twenty iterations seldom converge where eigenvalues lie close together, and errors carry over to
all that follow: the residuals say by how much. For exact values there is Lanczos.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from fedflat.errors import UserError
from fedflat.flatness.curvature.lanczos import Eigenpairs
from fedflat.flatness.curvature.operator import Operator
from fedflat.flatness.precision import rounding


def power(
    operator: Operator,
    count: int,
    *,
    iterations: int = 20,
    change: float = 1e-4,
    seed: int = 0,
    tell: Callable[[int, int], None] = lambda products, found: None,
) -> Eigenpairs:
    """``count`` eigenvalues, largest in magnitude first as the iteration found them.

    Each takes at most ``iterations`` products, fewer once an eigenvalue moves by less than the share ``change`` of itself.
    """
    if not 1 <= count <= operator.size:
        raise UserError(
            f"{count} eigenvalues of a model with {operator.size} parameters are not possible; ask for 1 to {operator.size}"
        )
    if iterations < 1:
        raise UserError(f"{iterations} iterations are not possible; expected at least 1")
    before, settled = operator.products, True
    values, residuals = torch.zeros(count, dtype=torch.float64), torch.zeros(count, dtype=torch.float64)
    vectors = torch.zeros(count, operator.size, dtype=operator.dtype, device=operator.device)
    with rounding(allowed=False), torch.no_grad():
        for number in range(count):
            vector = operator.normal(seed, "power", number)
            vector /= vector.norm()
            last, moved = 0.0, float("inf")
            for _ in range(iterations):
                product = operator(vector[None])[0]
                known = vectors[:number]
                product -= ((known @ vector) * values[:number].to(product)) @ known
                value, length = float(vector @ product), float(product.norm())
                # A vector's residual belongs to the vector that was multiplied, so it is that one which is kept.
                vectors[number], values[number] = vector, value
                residuals[number] = float((product - value * vector).norm())
                moved = abs(value - last) / abs(value) if value else float("inf")
                if moved < change or length == 0:
                    break
                last, vector = value, product / length
            settled &= moved < change
            tell(operator.products - before, number + 1)
    return Eigenpairs(values, vectors, residuals, operator.products - before, settled)
