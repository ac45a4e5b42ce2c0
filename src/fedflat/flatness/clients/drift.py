"""Where clients go, seen from the mean: lengths, distances and cosines of updates, and how far gradients disagree.

Everything takes rows [clients, P] and goes through them one by one, so that nothing of their size is copied.

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
    """Each client's update beside the global one."""

    lengths: Tensor
    """||D_i||: how far the client moved."""
    distances: Tensor
    """||D_i - D||: how far from where the server moved."""
    cosines: Tensor
    """cos(D_i, D); not a number where either is zero."""


class Disagreement(NamedTuple):
    """How far vectors of several clients pull in different directions."""

    mean_norm: Tensor
    """The mean of ||v_i||."""
    norm_of_mean: Tensor
    """||sum_i p_i v_i||."""
    diversity: Tensor
    """sum_i p_i ||v_i||^2 / ||sum_i p_i v_i||^2: 1 where all agree, and without bound where they cancel (Li et al. 2020, B^2)."""
    pairwise_cosine: Tensor
    """The mean of cos(v_i, v_j) over pairs i < j; not a number for fewer than two."""
    conflicting: Tensor
    """The share of pairs with a negative cosine."""


def cosine(one: Tensor, other: Tensor) -> Tensor:
    """cos(a, b) of two vectors; not a number, which is no signal, where either is zero."""
    norms = one.norm() * other.norm()
    return torch.where(
        norms > 0, (one @ other) / norms.clamp(min=torch.finfo(norms.dtype).tiny), torch.full_like(norms, torch.nan)
    )


def update_drift(rows: Tensor, update: Tensor) -> UpdateDrift:
    """The drift of every client: D_i is row i and D the server's update in the same round."""
    return UpdateDrift(
        torch.stack([row.norm() for row in rows]),
        torch.stack([torch.dist(row, update) for row in rows]),
        torch.stack([cosine(row, update) for row in rows]),
    )


def disagreement(rows: Tensor, weights: Sequence[float] | None = None) -> Disagreement:
    """How far the rows disagree, weighted by p_i (equal unless given) in the mean and counted once each in the pairs."""
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
