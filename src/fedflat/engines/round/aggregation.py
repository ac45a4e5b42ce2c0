"""How the server combines what a cohort sends. Sums are taken in cohort order over fixed blocks, whoever computed the rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedflat.errors import UserError

Centre = Literal["mean", "median", "trimmed", "clipped"]
BLOCK = 8
"""Clients per block: a partial sum is always over the same clients, so results do not depend on the number of workers."""


@dataclass(frozen=True)
class Aggregation:
    """The mean of what clients send, by sample counts or uniformly; or a robust centre, which needs every row.

    The median and the trimmed mean are taken coordinate by coordinate and weigh all clients alike (Yin et al. 2018); clipped is the
    mean of rows that are shortened to a multiple of their median norm.
    """

    weighting: Literal["samples", "uniform"] = "samples"
    centre: Centre = "mean"
    trim: float = 0.1
    """The share of the clients cut off at each end, for the trimmed mean."""
    longest: float = 1.0
    """The longest row that clipping leaves, in medians of the cohort's norms."""

    @property
    def needs_rows(self) -> bool:
        """Whether partial sums are not enough."""
        return self.centre != "mean"

    def weights(self, samples: Sequence[int]) -> list[float]:
        """p_i, which add up to 1."""
        return by_samples(samples) if self.weighting == "samples" else uniform(len(samples))

    def combine(self, rows: Tensor, weights: Sequence[float] | Tensor) -> Tensor:
        """One row from the cohort's."""
        if self.centre == "mean":
            return weighted_sum(rows, weights)
        if self.centre == "clipped":
            return weighted_sum(self._shortened(rows), weights)
        count = len(rows)
        cut = (count - 1) // 2 if self.centre == "median" else int(self.trim * count)
        if 2 * cut >= count:
            raise UserError(
                f"a trimmed mean that cuts {self.trim:.0%} at each end leaves nothing of {count} clients; lower trim"
            )
        centre: Tensor = rows.sort(0).values[cut : count - cut].mean(0)
        return centre

    def _shortened(self, rows: Tensor) -> Tensor:
        norms = rows.reshape(len(rows), -1).norm(dim=1)
        scale = (self.longest * norms.quantile(0.5) / norms.clamp_min(torch.finfo(rows.dtype).tiny)).clamp_max(1.0)
        shortened: Tensor = rows * scale.reshape(-1, *[1] * (rows.ndim - 1))
        return shortened


def uniform(count: int) -> list[float]:
    """Equal weights."""
    return [1 / count] * count


def by_samples(samples: Sequence[int]) -> list[float]:
    """Weights proportional to sample counts."""
    total = sum(samples)
    return [n / total for n in samples]


def weighted_sum(rows: Tensor, weights: Sequence[float] | Tensor) -> Tensor:
    """The sum of weighted rows; on CPU block by block in order, so that it never depends on who computed them."""
    scale = weights if isinstance(weights, Tensor) else brought(weights, rows)
    weighted = rows * scale.reshape(-1, *[1] * (rows.ndim - 1))
    if rows.is_cuda:
        return weighted.sum(0)
    return sum_of_blocks([sum_of_rows(block) for block in torch.split(weighted, BLOCK)])


def block_sum(rows: Tensor, weights: Sequence[float] | Tensor) -> Tensor:
    """What one block of at most ``BLOCK`` clients adds to a weighted sum; wherever it is taken, it is the same."""
    scale = weights if isinstance(weights, Tensor) else brought(weights, rows)
    return sum_of_rows(rows * scale.reshape(-1, *[1] * (rows.ndim - 1)))


def sum_of_rows(rows: Tensor) -> Tensor:
    """The sum of rows, one after another."""
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total


def sum_of_blocks(partials: Sequence[Tensor]) -> Tensor:
    """A weighted sum from its blocks in cohort order."""
    total = torch.zeros_like(partials[0])
    for partial in partials:
        total += partial
    return total


def brought(numbers: Sequence[float], like: Tensor) -> Tensor:
    """Numbers as a tensor beside another one; on a GPU they are sent without waiting for it."""
    here = torch.tensor(numbers, dtype=like.dtype)
    return here.pin_memory().to(like.device, non_blocking=True) if like.is_cuda else here.to(like.device)
