"""The data of a measurement, as fixed batches that can be read any number of times."""

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
"""A tensor; or several, as a tuple (the positional arguments of the model) or a mapping (its keyword arguments)."""
Batch = tuple[Inputs, Any]
"""Inputs and targets."""


class Rows(Sequence[Batch]):
    """The examples of two tensors, cut into batches when they are asked for; ``positions`` chooses among them."""

    def __init__(self, inputs: Inputs, targets: Any, batch: int, positions: Tensor | None = None) -> None:
        if batch < 1:
            raise UserError(f"batches of {batch} examples are not possible; expected at least 1")
        if rows_of(inputs) != rows_of(targets):
            raise UserError(
                f"there are {rows_of(inputs)} inputs but {rows_of(targets)} targets; expected a target for every input"
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
            return [self[one] for one in range(*number.indices(len(self)))]
        if not 0 <= number < len(self):
            raise IndexError(number)
        rows = self.positions[number * self.batch : (number + 1) * self.batch]
        return chosen(self.inputs, rows), chosen(self.targets, rows)

    def take(self, positions: Tensor) -> Rows:
        """Those of these examples at some positions."""
        return Rows(self.inputs, self.targets, self.batch, self.positions[positions])


def batches_of(data: Any, batch: int = 500) -> Sequence[Batch]:
    """Fixed batches from whatever holds examples: a pair of tensors, a list of batches, or a DataLoader.

    A DataLoader is read once, so that its order and whatever it draws at random are the same in every pass.
    """
    if _is_pair(data):
        return Rows(data[0], data[1], batch)
    if isinstance(data, Rows):
        return data
    found = data if isinstance(data, Sequence) else list(data) if isinstance(data, Iterable) else None
    if found is None:
        raise UserError(
            f"{type(data).__name__} is no data; expected a DataLoader, a list of batches, or a pair of tensors"
        )
    if not len(found):
        raise UserError("there are no data to measure on; expected at least one example")
    first = found[0]
    if not isinstance(first, tuple | list) or len(first) != 2:
        raise UserError(f"a batch is {type(first).__name__} here; expected a pair of inputs and targets")
    return found


def counts(batches: Sequence[Batch]) -> list[int]:
    """How many examples each batch holds, found without reading them where that is possible."""
    if isinstance(batches, Rows):
        whole, rest = divmod(len(batches.positions), batches.batch)
        return [batches.batch] * whole + ([rest] if rest else [])
    return [rows_of(targets) for _, targets in batches]


def picked(batches: Sequence[Batch], positions: Tensor) -> Sequence[Batch]:
    """The examples at some positions, counted through all batches, in batches as large as the first."""
    if isinstance(batches, Rows):
        return batches.take(positions)
    sizes = counts(batches)
    pieces, start = [], 0
    for (inputs, targets), size in zip(batches, sizes, strict=True):
        inside = positions[(positions >= start) & (positions < start + size)] - start
        if len(inside):
            pieces.append((chosen(inputs, inside), chosen(targets, inside)))
        start += size
    return Rows(_joined([p[0] for p in pieces]), _joined([p[1] for p in pieces]), sizes[0])


def draw(count: int, size: int, seed: int) -> Tensor:
    """``size`` different positions among ``count``, in order; the same for the same seed."""
    if not 1 <= size <= count:
        raise UserError(
            f"a subset of {size} examples is not possible; expected between 1 and {count}, which is all there are"
        )
    return torch.from_numpy(np.sort(generator(seed, "subset").choice(count, size, replace=False)))


def generator(seed: int, purpose: str, number: int = 0) -> np.random.Generator:
    """The random numbers for one purpose, a function of the seed alone."""
    return np.random.default_rng(np.random.SeedSequence([seed, zlib.crc32(purpose.encode()), number]))


# --- tensors, alone or several together --------------------------------------------------------------------------------------------


def mapped(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """A structure of tensors with each of them changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {key: mapped(inside, change) for key, inside in value.items()}
    if isinstance(value, tuple | list):
        return tuple(mapped(inside, change) for inside in value)
    return value


def rows_of(value: Any) -> int:
    """How many examples a structure of tensors holds."""
    inside = value
    while not isinstance(inside, Tensor):
        if isinstance(inside, Mapping) and inside:
            inside = next(iter(inside.values()))
        elif isinstance(inside, tuple | list) and inside:
            inside = inside[0]
        else:
            raise UserError(
                f"inputs or targets are {type(value).__name__} here; expected a tensor, or a tuple or mapping of tensors"
            )
    if not inside.ndim or not len(inside):
        raise UserError("a batch holds no examples; expected tensors whose first dimension counts them")
    return len(inside)


def chosen(value: Any, rows: Tensor) -> Any:
    """Some rows of each tensor."""
    return mapped(value, lambda tensor: tensor[rows.to(tensor.device)])


def _joined(pieces: Sequence[Any]) -> Any:
    first = pieces[0]
    if isinstance(first, Mapping):
        return {key: _joined([piece[key] for piece in pieces]) for key in first}
    if isinstance(first, tuple | list):
        return tuple(_joined([piece[place] for piece in pieces]) for place in range(len(first)))
    return torch.cat(list(pieces))


def _is_pair(data: Any) -> bool:
    """Whether data are inputs and targets, rather than a list of two batches."""
    return isinstance(data, tuple | list) and len(data) == 2 and isinstance(data[1], Tensor)
