"""How the server combines what a cohort sends. Sums are taken in cohort order over fixed blocks, whoever computed the rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedflat.errors import UserError

BLOCK = 8
"""Clients per block: a partial sum is always over the same clients, so results do not depend on the number of workers."""


@dataclass(frozen=True)
class Aggregation:
    """The mean of the clients' displacements by sample counts or uniformly; or a robust centre, which needs every row."""

    weighting: Literal["samples", "uniform"] = "samples"
    centre: Literal["mean", "median", "trimmed"] = "mean"
    trim: float = 0.1
    """The share of the clients cut off at each end, for the trimmed mean."""

    @property
    def needs_rows(self) -> bool:
        """Whether partial sums are not enough."""
        return self.centre != "mean"

    def weights(self, samples: Sequence[int]) -> list[float]:
        """p_i, which add up to 1."""
        return by_samples(samples) if self.weighting == "samples" else uniform(len(samples))

    def combine(self, rows: Tensor, samples: Sequence[int]) -> Tensor:
        """One displacement from the cohort's."""
        if self.centre == "mean":
            return weighted_sum(rows, self.weights(samples))
        if self.centre == "median":
            return torch.quantile(rows, 0.5, dim=0)
        cut = int(self.trim * len(rows))
        if 2 * cut >= len(rows):
            raise UserError(f"a trimmed mean that cuts {self.trim:.0%} at each end leaves nothing of {len(rows)} clients; lower trim")
        return rows.sort(0).values[cut : len(rows) - cut].mean(0)


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
