"""Data of a measurement as fixed batches that can be read repeatedly."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import ceil
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor

from fedflat.errors import UserError

Inputs = Any
"""A tensor, a tuple of tensors (positional arguments of the model) or a mapping (keyword arguments)."""
Batch = tuple[Inputs, Any]
"""Inputs and targets."""


class TensorBatches(Sequence[Batch]):
    """Batches sliced from in-memory tensors on access; ``positions`` selects and orders the examples."""

    def __init__(self, inputs: Inputs, targets: Any, batch: int, positions: Tensor | None = None) -> None:
        if batch < 1:
            raise UserError(f"the batch size is {batch}; expected at least 1")
        if rows_of(inputs) != rows_of(targets):
            raise UserError(
                f"got {rows_of(inputs)} inputs but {rows_of(targets)} targets; expected one target per input"
            )
        self.inputs, self.targets, self.batch = inputs, targets, batch
        self.positions = torch.arange(rows_of(targets)) if positions is None else positions

    def __len__(self) -> int:
        return ceil(len(self.positions) / self.batch)

    @overload
    def __getitem__(self, number: int) -> Batch: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[Batch]: ...
    def __getitem__(self, number: int | slice) -> Batch | Sequence[Batch]:
        if isinstance(number, slice):
            return [self[index] for index in range(*number.indices(len(self)))]
        if not 0 <= number < len(self):
            raise IndexError(number)
        rows = self.positions[number * self.batch : (number + 1) * self.batch]
        return chosen(self.inputs, rows), chosen(self.targets, rows)

    def take(self, positions: Tensor) -> TensorBatches:
        """The examples at ``positions``, in batches of the same size."""
        return TensorBatches(self.inputs, self.targets, self.batch, self.positions[positions])


def batches_of(data: Any, batch: int = 500) -> Sequence[Batch]:
    """Fixed batches from a pair of tensors, a list of batches, or a DataLoader.

    A DataLoader is read once, so its order and its random transformations are the same in every pass.
    """
    if _is_pair(data):
        return TensorBatches(data[0], data[1], batch)
    if isinstance(data, TensorBatches):
        return data
    batches = data if isinstance(data, Sequence) else list(data) if isinstance(data, Iterable) else None
    if batches is None:
        raise UserError(
            f"data is a {type(data).__name__}; expected a DataLoader, a list of batches, or a pair of tensors"
        )
    if not len(batches):
        raise UserError("the data are empty; expected at least one example")
    first = batches[0]
    if not isinstance(first, tuple | list) or len(first) != 2:
        raise UserError(f"a batch is a {type(first).__name__}; expected a pair (inputs, targets)")
    return batches


def counts(batches: Sequence[Batch]) -> list[int]:
    """Number of examples of each batch, without reading them where possible."""
    if isinstance(batches, TensorBatches):
        whole, rest = divmod(len(batches.positions), batches.batch)
        return [batches.batch] * whole + ([rest] if rest else [])
    return [rows_of(targets) for _, targets in batches]


def picked(batches: Sequence[Batch], positions: Tensor) -> Sequence[Batch]:
    """The examples at ``positions`` (indices over all batches), in batches of the first batch's size."""
    if isinstance(batches, TensorBatches):
        return batches.take(positions)
    sizes = counts(batches)
    pieces, start = [], 0
    for (inputs, targets), size in zip(batches, sizes, strict=True):
        inside = positions[(positions >= start) & (positions < start + size)] - start
        if len(inside):
            pieces.append((chosen(inputs, inside), chosen(targets, inside)))
        start += size
    return TensorBatches(_joined([p[0] for p in pieces]), _joined([p[1] for p in pieces]), sizes[0])


def draw(count: int, size: int, seed: int) -> Tensor:
    """``size`` distinct sorted positions below ``count``, determined by the seed."""
    if not 1 <= size <= count:
        raise UserError(f"cannot draw {size} examples; expected 1 to {count}, the number of examples")
    return torch.from_numpy(np.sort(generator(seed, "subset").choice(count, size, replace=False)))


def generator(seed: int, purpose: str, number: int = 0) -> np.random.Generator:
    """A random generator determined by the seed, the purpose and a number."""
    return np.random.default_rng(np.random.SeedSequence([seed, zlib.crc32(purpose.encode()), number]))


def mapped(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """Apply ``change`` to every tensor of a nested structure."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {key: mapped(inside, change) for key, inside in value.items()}
    if isinstance(value, tuple | list):
        return tuple(mapped(inside, change) for inside in value)
    return value


def rows_of(value: Any) -> int:
    """Number of examples in a nested structure of tensors."""
    inside = value
    while not isinstance(inside, Tensor):
        if isinstance(inside, Mapping) and inside:
            inside = next(iter(inside.values()))
        elif isinstance(inside, tuple | list) and inside:
            inside = inside[0]
        else:
            raise UserError(
                f"inputs or targets are a {type(value).__name__}; expected a tensor, or a tuple or mapping of tensors"
            )
    if not inside.ndim or not len(inside):
        raise UserError("a batch is empty; expected tensors whose first dimension indexes examples")
    return len(inside)


def chosen(value: Any, rows: Tensor) -> Any:
    """The given rows of every tensor."""
    return mapped(value, lambda tensor: tensor[rows.to(tensor.device)])


def _joined(pieces: Sequence[Any]) -> Any:
    first = pieces[0]
    if isinstance(first, Mapping):
        return {key: _joined([piece[key] for piece in pieces]) for key in first}
    if isinstance(first, tuple | list):
        return tuple(_joined([piece[place] for piece in pieces]) for place in range(len(first)))
    return torch.cat(list(pieces))


def _is_pair(data: Any) -> bool:
    """Whether ``data`` is (inputs, targets) rather than a list of two batches."""
    return isinstance(data, tuple | list) and len(data) == 2 and isinstance(data[1], Tensor)
