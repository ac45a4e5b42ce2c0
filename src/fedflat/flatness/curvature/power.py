"""Power iteration with deflation, the method behind published figures (Caldarola et al. 2022, appendix C.4).

    v <- H' v / |H' v|,   H' = H - sum_i lambda_i v_i v_i',   lambda = v . H' v

It finds the eigenvalue of largest magnitude first. The published 20 iterations seldom converge for close eigenvalues,
and their errors propagate to all later eigenvalues. The residuals show how large the errors are. Use Lanczos for
accurate values.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from fedflat.errors import UserError
from fedflat.flatness.curvature.lanczos import Eigenpairs
from fedflat.flatness.curvature.operator import Operator
from fedflat.flatness.precision import tf32_allowed


def power(
    operator: Operator,
    count: int,
    *,
    iterations: int = 20,
    change: float = 1e-4,
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda products, found: None,
) -> Eigenpairs:
    """Compute ``count`` eigenpairs in the order in which the iteration finds them, roughly by decreasing magnitude.

    The pairs found so far are deflated: their components are subtracted from every product, so that the iteration
    converges to the next one.

    Args:
        operator: the symmetric matrix.
        count: number of eigenpairs.
        iterations: maximum number of products per eigenvalue.
        change: relative change of an eigenvalue below which the iteration stops.
        seed: seed of the starting vectors.
        progress: called with (products, eigenvalues found) after each eigenvalue.
    """
    if not 1 <= count <= operator.size:
        raise UserError(
            f"cannot compute {count} eigenvalues of a model with {operator.size} parameters; "
            f"expected 1 to {operator.size}"
        )
    if iterations < 1:
        raise UserError(f"iterations={iterations} is invalid; expected at least 1")
    products, all_converged = 0, True
    values, residuals = torch.zeros(count, dtype=torch.float64), torch.zeros(count, dtype=torch.float64)
    vectors = torch.zeros(count, operator.size, dtype=operator.dtype, device=operator.device)
    with tf32_allowed(False), torch.no_grad():
        for number in range(count):
            vector = operator.normal(seed, "power", number)
            vector /= vector.norm()
            previous_value, relative_change = 0.0, float("inf")
            for _ in range(iterations):
                product = operator(vector[None])[0]
                products += 1
                earlier = vectors[:number]  # to be deflated
                product -= ((earlier @ vector) * values[:number].to(product)) @ earlier
                value, length = float(vector @ product), float(product.norm())
                # Store the vector before the update, because the residual belongs to it.
                vectors[number], values[number] = vector, value
                residuals[number] = float((product - value * vector).norm())
                relative_change = abs(value - previous_value) / abs(value) if value else float("inf")
                if relative_change < change or length == 0:  # the length is 0 if no other eigenvalue is left
                    break
                previous_value, vector = value, product / length
            all_converged &= relative_change < change or length == 0
            progress(products, number + 1)
    return Eigenpairs(values, vectors, residuals, products, all_converged)
