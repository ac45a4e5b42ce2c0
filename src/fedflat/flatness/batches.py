"""The data of a measurement, as batches that are the same whenever they are read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import ceil
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor

from fedflat.errors import UserError
from fedflat.randomness import generator

Inputs = Any
"""A tensor, a tuple of tensors (positional arguments of the model) or a mapping (keyword arguments)."""
Batch = tuple[Inputs, Any]
"""Inputs and targets."""


class TensorBatches(Sequence[Batch]):
    """Batches sliced from in-memory tensors on access.

    Args:
        inputs: a tensor, or a tuple or mapping of tensors, whose first dimension indexes examples.
        targets: likewise, with one target per input.
        batch_size: batch size.
        positions: selects and orders the examples; default: all, in order.
    """

    def __init__(self, inputs: Inputs, targets: Any, batch_size: int, positions: Tensor | None = None) -> None:
        """Check that there is one target per input; ``positions`` selects examples."""
        if batch_size < 1:
            raise UserError(f"the batch size is {batch_size}; expected at least 1")
        count = count_examples(targets)
        if count_examples(inputs) != count:
            raise UserError(f"got {count_examples(inputs)} inputs but {count} targets; expected one target per input")
        self.inputs, self.targets, self.batch_size = inputs, targets, batch_size
        self.positions = torch.arange(count) if positions is None else positions

    def __len__(self) -> int:
        return ceil(len(self.positions) / self.batch_size)

    @overload
    def __getitem__(self, index: int) -> Batch: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Batch]: ...
    def __getitem__(self, index: int | slice) -> Batch | Sequence[Batch]:
        """Return one batch (inputs, targets), or a list of them for a slice."""
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(index)  # ends a for loop over this sequence
        rows = self.positions[index * self.batch_size : (index + 1) * self.batch_size]
        return select_rows(self.inputs, rows), select_rows(self.targets, rows)

    def take(self, positions: Tensor) -> TensorBatches:
        """Return the examples at ``positions`` in batches of the same size."""
        return TensorBatches(self.inputs, self.targets, self.batch_size, self.positions[positions])


def batches_of(data: Any, batch_size: int) -> Sequence[Batch]:
    """Return ``data`` as a sequence of batches (inputs, targets) that is the same in every pass.

    Args:
        data: a pair of tensors, a list of batches, or a DataLoader. A DataLoader is read once, which fixes its order
            and its random transformations.
        batch_size: batch size for a pair of tensors.
    """
    if isinstance(data, TensorBatches):
        return data
    is_pair = isinstance(data, tuple | list) and len(data) == 2 and isinstance(data[1], Tensor | np.ndarray)
    if is_pair:  # rather than a list of two batches, whose entries are pairs
        return TensorBatches(data[0], data[1], batch_size)
    if not isinstance(data, Iterable):
        raise UserError(
            f"data has type {type(data).__name__}; expected a DataLoader, a list of batches, or a pair of tensors"
        )
    batches = data if isinstance(data, Sequence) else list(data)
    if not batches:
        raise UserError("the data are empty; expected at least one example")
    first = batches[0]
    if not isinstance(first, tuple | list) or len(first) != 2:
        raise UserError(f"a batch is a {type(first).__name__}; expected a pair (inputs, targets)")
    return batches


def batch_sizes(batches: Sequence[Batch]) -> list[int]:
    """Return the number of examples in each batch."""
    if isinstance(batches, TensorBatches):  # all batches are full, except possibly the last one
        full_batches, remainder = divmod(len(batches.positions), batches.batch_size)
        return [batches.batch_size] * full_batches + ([remainder] if remainder else [])
    return [count_examples(targets) for _, targets in batches]


def select_examples(batches: Sequence[Batch], positions: Tensor) -> Sequence[Batch]:
    """Return some of the examples of ``batches``, in new batches of the first batch's size.

    Args:
        batches: the data; its examples are numbered consecutively over all batches.
        positions: sorted numbers of the examples to return, [n].
    """
    if isinstance(batches, TensorBatches):
        return batches.take(positions)
    sizes = batch_sizes(batches)
    selected_inputs, selected_targets, start = [], [], 0
    for (inputs, targets), size in zip(batches, sizes, strict=True):  # this batch holds start .. start + size - 1
        rows = positions[(positions >= start) & (positions < start + size)] - start
        if len(rows):
            selected_inputs.append(select_rows(inputs, rows))
            selected_targets.append(select_rows(targets, rows))
        start += size
    return TensorBatches(_concatenate(selected_inputs), _concatenate(selected_targets), sizes[0])


def draw_positions(count: int, size: int, seed: int) -> Tensor:
    """Draw ``size`` distinct positions below ``count``, [size] in ascending order; the same for the same seed."""
    if not 1 <= size <= count:
        raise UserError(f"cannot draw {size} examples; expected 1 to {count}, the number of examples")
    return torch.from_numpy(np.sort(generator(seed, "subset").choice(count, size, replace=False)))


def normal(like: Tensor, seed: int, purpose: str, number: int = 0) -> Tensor:
    """Draw a standard normal vector with the length, dtype and device of ``like``.

    The numbers depend only on the other arguments and are the same on every device.
    """
    numbers = generator(seed, purpose, number).standard_normal(len(like))
    return torch.from_numpy(numbers).to(like.device, like.dtype)


def map_tensors(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """Apply ``function`` to every tensor of a nested structure of mappings, tuples and lists."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return {key: map_tensors(item, function) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return tuple(map_tensors(item, function) for item in value)
    return value


def select_rows(value: Any, rows: Tensor) -> Any:
    """Return the given rows of every tensor of a nested structure."""
    return map_tensors(value, lambda tensor: tensor[rows.to(tensor.device)])


def count_examples(value: Any) -> int:
    """Return the number of examples in a tensor or a nested structure of tensors: the length of the first tensor."""
    first = value
    while not isinstance(first, Tensor):
        if isinstance(first, Mapping) and first:
            first = next(iter(first.values()))
        elif isinstance(first, tuple | list) and first:
            first = first[0]
        else:
            raise UserError(
                f"inputs or targets are a {type(value).__name__}; expected a tensor (for a numpy array: "
                "torch.from_numpy(array)), or a tuple or mapping of tensors"
            )
    if not first.ndim or not len(first):
        raise UserError("a batch is empty; expected tensors whose first dimension indexes examples")
    return len(first)


def _concatenate(values: Sequence[Any]) -> Any:
    """Concatenate nested structures of the same form, tensor by tensor."""
    first = values[0]
    if isinstance(first, Mapping):
        return {key: _concatenate([value[key] for value in values]) for key in first}
    if isinstance(first, tuple | list):
        return tuple(_concatenate(items) for items in zip(*values, strict=True))
    return torch.cat(list(values))
