"""Trace of a Hessian by Hutchinson's estimator: for Rademacher vectors z, E[z . H z] = tr H.

Known eigenvectors are deflated first, because they contribute most of the variance. With their projector Q,

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
    progress: Callable[[int], None] = lambda done: None,
) -> Estimate:
    """The trace with its confidence interval from ``draws`` products; ``values`` [k] and ``vectors`` [k, P] are
    deflated.
    """
    check_draws(draws)
    samples = []
    with rounding(allowed=False), torch.no_grad():
        for number in range(draws):
            probe = operator.signs(seed, "trace", number)
            if vectors is not None:
                probe -= (vectors @ probe) @ vectors
            samples.append((probe @ operator(probe[None])[0]).double())
            progress(number + 1)
    known = 0.0 if values is None else float(values.sum())
    return estimate(torch.stack(samples).tolist(), known)


def check_draws(draws: int) -> None:
    """Reject fewer than two draws, which give no interval."""
    if draws < 2:
        raise UserError(f"draws={draws} is invalid; a confidence interval needs at least 2")
