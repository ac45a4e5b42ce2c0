"""Measures over clients and rounds: drift of client updates, disagreement of client gradients, forgetting.

Measures of drift and disagreement take rows [clients, P] and process one row at a time, without copying the matrix.

>>> rows = torch.tensor([[2.0, 0.0], [0.0, 2.0]])
>>> update_drift(rows, rows.mean(0)).cosines.tolist()
[0.7071067690849304, 0.7071067690849304]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedflat.errors import UserError


class UpdateDrift(NamedTuple):
    """Client updates D_i compared with the server's update D, each [clients]."""

    lengths: Tensor
    """||D_i||."""
    distances: Tensor
    """||D_i - D||."""
    cosines: Tensor
    """cos(D_i, D); NaN if either is zero."""


class Disagreement(NamedTuple):
    """Disagreement of client vectors v_i with weights p_i."""

    mean_norm: Tensor
    """The mean of ||v_i||."""
    norm_of_mean: Tensor
    """||sum_i p_i v_i||."""
    diversity: Tensor
    """sum_i p_i ||v_i||^2 / ||sum_i p_i v_i||^2: 1 if all agree, unbounded if they cancel (B^2 of Li et al. 2020)."""
    pairwise_cosine: Tensor
    """The mean of cos(v_i, v_j) over pairs i < j; NaN for fewer than two clients."""
    conflicting: Tensor
    """The fraction of pairs with a negative cosine."""


def cosine(a: Tensor, b: Tensor) -> Tensor:
    """Return cos(a, b) of two vectors; NaN if either is zero."""
    return _divide(a @ b, a.norm() * b.norm())


def update_drift(rows: Tensor, update: Tensor) -> UpdateDrift:
    """Compare every client's update with the server's.

    Args:
        rows: the clients' updates D_i, [clients, P].
        update: the server's update D, [P].
    """
    return UpdateDrift(
        lengths=torch.stack([row.norm() for row in rows]),
        distances=torch.stack([torch.dist(row, update) for row in rows]),
        cosines=torch.stack([cosine(row, update) for row in rows]),
    )


def disagreement(rows: Tensor, weights: Sequence[float] | None = None) -> Disagreement:
    """Measure how far client vectors v_i, such as gradients, disagree: by their norms and by the cosines of pairs.

    The diversity is the mean squared norm divided by the squared norm of the mean; it is 1 if all vectors are equal.

    Args:
        rows: the vectors v_i, [clients, P].
        weights: weights p_i of the clients in the mean vector and in the diversity, which sum to 1; default: equal. The
            mean norm and statistics of pairs are not weighted.
    """
    count = len(rows)
    if weights is None:
        weights = [1 / count] * count
    p = torch.tensor(list(weights), dtype=rows.dtype, device=rows.device)
    gram = torch.stack([rows @ row for row in rows])  # inner products v_i . v_j; all results follow from them
    norms = gram.diagonal().clamp(min=0).sqrt()
    squared_norm_of_mean = (p @ gram @ p).clamp(min=0)
    cosines = _divide(gram, norms.outer(norms))
    above_diagonal = torch.triu(torch.ones_like(cosines, dtype=torch.bool), 1)
    pair_cosines = cosines[above_diagonal]
    defined_cosines = pair_cosines[~pair_cosines.isnan()]  # the cosine with a zero vector is NaN
    return Disagreement(
        mean_norm=norms.mean(),
        norm_of_mean=squared_norm_of_mean.sqrt(),
        diversity=(p @ norms**2) / squared_norm_of_mean,
        pairwise_cosine=pair_cosines.nanmean(),
        conflicting=(defined_cosines < 0).double().mean(),
    )


def _divide(numerators: Tensor, denominators: Tensor) -> Tensor:
    """Divide elementwise; NaN where the denominator is not positive."""
    tiny = torch.finfo(denominators.dtype).tiny
    return torch.where(denominators > 0, numerators / denominators.clamp(min=tiny), torch.nan)


@dataclass(frozen=True)
class Forgetting:
    """Forgetting of each part, a class or a client; a_t is its accuracy at measurement t, and T the last one."""

    lost: list[float]
    """The best earlier accuracy minus the last: max over s < T of a_s - a_T; negative if the last one is the best."""
    swing: list[float]
    """The mean of |a_t - a_(t-1)| over consecutive measurements."""
    lowest: list[float]
    """The lowest accuracy after the part first reached half of its best."""


def forgetting(accuracies: Sequence[Sequence[float]]) -> Forgetting:
    """Measure the forgetting of each part, where a part is a class or a client.

    Args:
        accuracies: ``accuracies[round][part]``, of at least two rounds, in order (as in Caldarola et al. 2022, Fig. 3).

    >>> forgetting([[0.2, 0.9], [0.8, 0.1], [0.5, 0.6]]).lost
    [0.30000000000000004, 0.30000000000000004]
    """
    values = np.asarray(accuracies, dtype=float)
    if values.ndim != 2 or len(values) < 2:
        raise UserError("forgetting needs accuracies of at least two rounds; measure more often (flatness.every)")
    lost = values[:-1].max(0) - values[-1]  # best earlier accuracy minus the last one
    swing = np.abs(np.diff(values, axis=0)).mean(0)  # mean change between consecutive rounds
    lowest = []  # lowest accuracy after a part first reached half of its best
    for accuracy in values.T:
        first_at_half = int(np.argmax(accuracy >= accuracy.max() / 2))  # argmax finds the first True
        lowest.append(float(accuracy[first_at_half:].min()))
    return Forgetting(lost.tolist(), swing.tolist(), lowest)
