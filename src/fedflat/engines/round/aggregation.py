"""Aggregation on the server: the weighted mean, or a robust centre, of what the clients of a cohort send.

Everything a cohort sends is stored with one row per client: displacements are [cohort, parameters], scalars [cohort].
Means are weighted sums of rows. On a CPU they are summed in cohort order over fixed blocks of ``BLOCK`` clients, so
that results are bit-identical whichever worker computed which row. ``reduction.py`` calls this for every kind of row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedflat.errors import UserError

Centre = Literal["mean", "median", "trimmed", "clipped"]
BLOCK = 8
"""Clients per partial sum. It is fixed, so results do not depend on the number of workers."""


@dataclass(frozen=True)
class Aggregation:
    """How the server combines the rows of a cohort.

    Median and trimmed mean act on each coordinate and weight all clients equally (Yin et al. 2018). ``clipped`` is the
    mean of rows whose norm is clipped to a multiple of the cohort's median norm.

    Args:
        weighting: weights of displacements, by the clients' sample counts or uniform.
        centre: the mean or a robust centre.
        trim: share of the clients that the trimmed mean drops at each end.
        longest: largest norm after clipping, in units of the cohort's median norm.
    """

    weighting: Literal["samples", "uniform"] = "samples"
    centre: Centre = "mean"
    trim: float = 0.1
    longest: float = 1.0

    @property
    def needs_rows(self) -> bool:
        """Whether every client's row is needed; partial sums suffice for the mean."""
        return self.centre != "mean"

    def weights(self, samples: Sequence[int]) -> list[float]:
        """Weights p_i that sum to 1, from the clients' sample counts."""
        return by_samples(samples) if self.weighting == "samples" else uniform(len(samples))

    def combine(self, rows: Tensor, weights: Sequence[float] | Tensor) -> Tensor:
        """One row [...] from the cohort's rows [cohort, ...]."""
        if self.centre == "mean":
            return weighted_sum(rows, weights)
        if self.centre == "clipped":
            return weighted_sum(self._clipped(rows), weights)
        count = len(rows)
        cut = (count - 1) // 2 if self.centre == "median" else int(self.trim * count)
        if 2 * cut >= count:
            raise UserError(
                f"a trimmed mean with trim={self.trim} drops all {count} clients; use a smaller trim or more clients"
            )
        centre: Tensor = rows.sort(0).values[cut : count - cut].mean(0)
        return centre

    def _clipped(self, rows: Tensor) -> Tensor:
        norms = rows.reshape(len(rows), -1).norm(dim=1)
        scale = (self.longest * norms.quantile(0.5) / norms.clamp_min(torch.finfo(rows.dtype).tiny)).clamp_max(1.0)
        return _scaled(rows, scale)


def uniform(count: int) -> list[float]:
    """Equal weights that sum to 1."""
    return [1 / count] * count


def by_samples(samples: Sequence[int]) -> list[float]:
    """Weights proportional to sample counts, which sum to 1."""
    total = sum(samples)
    return [n / total for n in samples]


def weighted_sum(rows: Tensor, weights: Sequence[float] | Tensor) -> Tensor:
    """The weighted sum of rows [cohort, ...] -> [...]; on a CPU in blocks of ``BLOCK`` rows, in order."""
    weighted = _scaled(rows, weights)
    if rows.is_cuda:
        return weighted.sum(0)
    return sum_of_blocks([sum_of_rows(block) for block in torch.split(weighted, BLOCK)])


def block_sum(rows: Tensor, weights: Sequence[float] | Tensor) -> Tensor:
    """The partial sum of one block of at most ``BLOCK`` rows, bit-identical to its part of ``weighted_sum``."""
    return sum_of_rows(_scaled(rows, weights))


def sum_of_rows(rows: Tensor) -> Tensor:
    """The sum of rows [n, ...], added one after another."""
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total


def sum_of_blocks(partials: Sequence[Tensor]) -> Tensor:
    """The sum of all blocks, which must be in cohort order."""
    total = torch.zeros_like(partials[0])
    for partial in partials:
        total += partial
    return total


def _scaled(rows: Tensor, weights: Sequence[float] | Tensor) -> Tensor:
    scale = weights if isinstance(weights, Tensor) else _tensor_like(weights, rows)
    return rows * scale.reshape(-1, *[1] * (rows.ndim - 1))


def _tensor_like(numbers: Sequence[float], like: Tensor) -> Tensor:
    """Numbers as a tensor with the dtype and device of ``like``; copying to a GPU does not wait for it."""
    on_host = torch.tensor(numbers, dtype=like.dtype)
    return on_host.pin_memory().to(like.device, non_blocking=True) if like.is_cuda else on_host.to(like.device)
