"""The trace of a Hessian by Hutchinson's estimator: for random signs z, E[z . H z] = tr H.

Eigenvectors that are known are taken out first, since they hold most of the variance: with Q their span,

    tr H = sum_i v_i . H v_i + tr (1 - Q) H (1 - Q).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fedflat.errors import UserError
from fedflat.flatness.curvature.operator import Operator
from fedflat.flatness.estimate import Estimate, estimate
from fedflat.flatness.precision import rounding

DRAWS = 30


def hutchinson(
    operator: Operator,
    *,
    draws: int = DRAWS,
    seed: int = 0,
    values: Tensor | None = None,
    vectors: Tensor | None = None,
    tell: Callable[[int], None] = lambda done: None,
) -> Estimate:
    """The trace with its confidence interval, from as many products as there are draws; ``values`` and ``vectors`` are known eigenpairs."""
    check_draws(draws)
    found = []
    with rounding(allowed=False), torch.no_grad():
        for number in range(draws):
            probe = operator.signs(seed, "trace", number)
            if vectors is not None:
                probe -= (vectors @ probe) @ vectors
            found.append((probe @ operator(probe[None])[0]).double())
            tell(number + 1)
    known = 0.0 if values is None else float(values.sum())
    return estimate(torch.stack(found).tolist(), known)


def check_draws(draws: int) -> None:
    """One draw has no interval."""
    if draws < 2:
        raise UserError(f"an interval needs at least 2 draws, not {draws}")
