"""How the rows of a cohort are combined: weights, bit-reproducible weighted sums, and robust centres."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, cast

import torch
from torch import Tensor

from fedflat.errors import UserError

Centre = Literal["mean", "median", "trimmed", "clipped"]
"""How a cohort's rows are combined into one; all but ``mean`` are robust to a few arbitrary rows."""
BLOCK = 8
"""Clients per partial sum. It is fixed, so results do not depend on the number of workers."""
GPU_CHUNK = 2**26
"""Elements of a cohort's rows that a GPU scales at a time."""
CPU_CHUNK = 2**16
"""Elements of each row that a CPU sums at a time: those of a block of rows fit into the cache."""


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
        return weights_by_samples(samples) if self.weighting == "samples" else uniform_weights(len(samples))

    def combine(self, rows: Tensor, weights: Sequence[float] | Tensor) -> Tensor:
        """Combine the cohort's rows [cohort, ...] into one [...]; median and trimmed mean ignore the weights."""
        if self.centre == "mean":
            return weighted_sum(rows, weights)
        if self.centre == "clipped":
            return weighted_sum(self._clipped(rows), weights)
        count = len(rows)
        # The median is the mean of what remains after dropping all but the middle one or two values.
        dropped = (count - 1) // 2 if self.centre == "median" else int(self.trim * count + 1e-9)
        if 2 * dropped >= count:
            raise UserError(
                f"a trimmed mean with trim={self.trim} drops all {count} clients; use a smaller trim or more clients"
            )
        centre: Tensor = rows.sort(0).values[dropped : count - dropped].mean(0)
        return centre

    def _clipped(self, rows: Tensor) -> Tensor:
        """The rows [cohort, ...], shortened where their norm exceeds ``longest`` times the cohort's median norm.

        Rows that are not finite become zero, unless all are.
        """
        norms = rows.reshape(len(rows), -1).norm(dim=1)
        is_finite = norms.isfinite()
        largest_norm = self.longest * torch.where(is_finite, norms, math.nan).nanquantile(0.5)
        scale = (largest_norm / norms.clamp_min(torch.finfo(rows.dtype).tiny)).clamp_max(1.0)
        is_used = is_finite | ~is_finite.any()
        return _scale_rows(torch.where(_column(is_used, rows), rows, 0), torch.where(is_used, scale, 0))


class CohortWeights(NamedTuple):
    """Weights of the clients of a cohort, or of a part of it: one number per client in each list.

    Attributes:
        uniform: equal weights.
        samples: proportional to sample counts.
        aggregation: the weights of displacements, from the aggregation or chosen by the algorithm.
    """

    uniform: list[float]
    samples: list[float]
    aggregation: list[float] | Tensor

    @classmethod
    def of(cls, aggregation: Aggregation, samples: list[int]) -> CohortWeights:
        """Weights of a whole cohort, from its clients' sample counts."""
        return cls(uniform_weights(len(samples)), weights_by_samples(samples), aggregation.weights(samples))

    def subset(self, positions: Sequence[int]) -> CohortWeights:
        """Weights of the clients at some positions of the cohort."""
        return CohortWeights(*(cast("list[float]", [weights[position] for position in positions]) for weights in self))


def uniform_weights(count: int) -> list[float]:
    """Equal weights that sum to 1."""
    return [1 / count] * count


def weights_by_samples(samples: Sequence[int]) -> list[float]:
    """Weights proportional to sample counts, which sum to 1."""
    total = sum(samples)
    return [n / total for n in samples]


def weighted_sum(rows: Tensor, weights: Sequence[float] | Tensor) -> Tensor:
    """The weighted sum of rows [cohort, ...] -> [...]; weights [cohort].

    On a CPU, the rows of each block of ``BLOCK`` rows are added in order, then the sums of the blocks. The result is
    therefore bit-identical if Ray workers each sum some of the blocks. On a GPU, torch chooses the order.
    """
    if rows.is_cuda:
        return sum_in_chunks(rows, weights)
    scales = torch.split(weights if isinstance(weights, Tensor) else _tensor_like(weights, rows), BLOCK)

    def total(columns: Tensor) -> Tensor:
        blocks = zip(torch.split(columns, BLOCK), scales, strict=True)
        return sum_of_blocks([block_sum(block, scale) for block, scale in blocks])

    if rows.ndim == 1:
        return total(rows)
    return torch.cat([total(columns) for columns in torch.split(rows, CPU_CHUNK, dim=1)])


def sum_in_chunks(rows: Tensor, weights: Sequence[float] | Tensor, chunk: int = GPU_CHUNK) -> Tensor:
    """The weighted sum of rows, ``chunk`` elements at a time, because a scaled copy of all rows may not fit."""
    scale = weights if isinstance(weights, Tensor) else _tensor_like(weights, rows)
    if rows.ndim == 1:
        return (rows * scale).sum(0)
    chunks = torch.split(rows, max(chunk // len(rows), 1), dim=1)
    return torch.cat([_scale_rows(columns, scale).sum(0) for columns in chunks])


def block_sum(rows: Tensor, weights: Sequence[float] | Tensor) -> Tensor:
    """The partial sum of one block of at most ``BLOCK`` rows, bit-identical to its part of ``weighted_sum``."""
    scaled = _scale_rows(rows, weights)
    total = scaled[0].clone()
    for row in scaled[1:]:  # one after another, so that the bits do not depend on torch's summation order
        total += row
    return total


def sum_of_blocks(partials: Sequence[Tensor]) -> Tensor:
    """The total of partial sums over blocks of clients, which must be in cohort order."""
    total = torch.zeros_like(partials[0])
    for partial in partials:
        total += partial
    return total


def _scale_rows(rows: Tensor, weights: Sequence[float] | Tensor) -> Tensor:
    """Multiply each of the rows [cohort, ...] by its weight."""
    scale = weights if isinstance(weights, Tensor) else _tensor_like(weights, rows)
    return rows * _column(scale, rows)


def _column(values: Tensor, rows: Tensor) -> Tensor:
    """Append dimensions of size 1 to ``values`` [cohort], so that each applies to one of the rows [cohort, ...]."""
    return values.reshape(-1, *[1] * (rows.ndim - 1))


def _tensor_like(numbers: Sequence[float], like: Tensor) -> Tensor:
    """Numbers as a tensor with the dtype and device of ``like``; copying to a GPU does not wait for it."""
    on_host = torch.tensor(numbers, dtype=like.dtype)
    return on_host.pin_memory().to(like.device, non_blocking=True) if like.is_cuda else on_host.to(like.device)
