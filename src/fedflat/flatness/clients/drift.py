"""Client drift: norms, distances and cosines of client updates, and disagreement of client gradients.

All functions take rows [clients, P] and process one row at a time, without copying the matrix.

>>> rows = torch.tensor([[2.0, 0.0], [0.0, 2.0]])
>>> update_drift(rows, rows.mean(0)).cosines.tolist()
[0.7071067690849304, 0.7071067690849304]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


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
    """cos(a, b) of two vectors; NaN if either is zero."""
    norms = a.norm() * b.norm()
    return torch.where(
        norms > 0, (a @ b) / norms.clamp(min=torch.finfo(norms.dtype).tiny), torch.full_like(norms, torch.nan)
    )


def update_drift(rows: Tensor, update: Tensor) -> UpdateDrift:
    """The drift of every client; ``rows`` holds the updates D_i, ``update`` is the server's update D."""
    return UpdateDrift(
        torch.stack([row.norm() for row in rows]),
        torch.stack([torch.dist(row, update) for row in rows]),
        torch.stack([cosine(row, update) for row in rows]),
    )


def disagreement(rows: Tensor, weights: Sequence[float] | None = None) -> Disagreement:
    """The disagreement of ``rows``; ``weights`` are the p_i of the mean (default: equal), pairs are unweighted."""
    count = len(rows)
    share = torch.tensor(
        [1 / count] * count if weights is None else list(weights), dtype=rows.dtype, device=rows.device
    )
    gram = torch.stack([rows @ row for row in rows])
    norms = gram.diagonal().clamp(min=0).sqrt()
    together = (share @ gram @ share).clamp(min=0)
    scale = norms.outer(norms)
    cosines = torch.where(
        scale > 0, gram / scale.clamp(min=torch.finfo(rows.dtype).tiny), torch.full_like(scale, torch.nan)
    )
    above = torch.triu(torch.ones_like(scale, dtype=torch.bool), 1)
    pairs = cosines[above]
    return Disagreement(
        norms.mean(), together.sqrt(), (share @ norms**2) / together, pairs.nanmean(), _share(pairs[~pairs.isnan()] < 0)
    )


def _share(flags: Tensor) -> Tensor:
    return flags.double().mean()
