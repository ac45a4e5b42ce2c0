"""Datasets whose examples come one by one: torch datasets, and whatever else hands out (input, class) or (input, class, client)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedflat.data.arrays import from_arrays
from fedflat.data.dataset import Dataset
from fedflat.data.images import channels_first, in_bytes
from fedflat.data.mapped import ArrayWriter, MappedTensor, open_mapped
from fedflat.errors import UserError

AT_ONCE = 256


def from_torch(
    train: Any,
    test: Any,
    name: str = "torch",
    classes: Sequence[str] | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    folder: str | Path | None = None,
) -> Dataset:
    """A dataset from two torch datasets whose items are (input, class) or (input, class, natural client).

    Inputs are tensors, arrays or Pillow images of one shape. Each is asked for once, so that a random transform would be drawn once: use
    the experiment's augmentation instead. With a ``folder`` the inputs are written there and mapped, for what is larger than memory.
    """
    if classes is None and isinstance(getattr(train, "classes", None), list | tuple):
        classes = [str(label) for label in train.classes]
    arrays: dict[str, Any] = {}
    for part, items in (("train", train), ("test", test)):
        what = f"the {'training' if part == 'train' else part} set of {name}"
        if isinstance(items, torch.utils.data.TensorDataset):
            columns: Sequence[Any] = items.tensors
        else:
            columns = collected(_items(items), what, Path(folder) / f"{name}-{part}.npy" if folder else None)
        arrays |= {
            f"{part}_{what}": column for what, column in zip(("inputs", "targets", "groups"), columns, strict=False)
        }
    return from_arrays(**arrays, name=name, classes=classes, mean=mean, std=std)


def collected(items: Iterable[Any], what: str, file: Path | None = None) -> list[Any]:
    """Inputs, classes and perhaps clients of examples that come one by one; the inputs go to ``file``, if given, and are mapped."""
    labels: list[Sequence[Any]] = []
    blocks = _blocks(items, what, labels)
    first = next(blocks, None)
    if first is None:
        raise UserError(f"{what} is empty; expected at least one example")
    inputs = np.concatenate([first, *blocks]) if file is None else _written(file, chain([first], blocks))
    return [inputs, *(np.array(column) for column in zip(*labels, strict=True))]


def as_array(value: Any) -> np.ndarray:
    """One input as an array: a Pillow image as bytes with its channels first, anything else as it is."""
    if isinstance(value, torch.Tensor):
        return value.numpy()
    if hasattr(value, "getbands"):
        return channels_first(in_bytes(value))
    array = np.asarray(value)
    return array.astype(np.float32) if array.dtype == np.float64 else array


def _blocks(items: Iterable[Any], what: str, labels: list[Sequence[Any]]) -> Iterator[np.ndarray]:
    """The inputs, many at a time; what stands beside them is added to ``labels``."""
    waiting: list[np.ndarray] = []
    shape: tuple[int, ...] | None = None
    for place, item in enumerate(items):
        if not isinstance(item, list | tuple) or len(item) not in (2, 3):
            raise UserError(
                f"item {place} of {what} is a {type(item).__name__}; expected (input, class) or (input, class, client)"
            )
        example = as_array(item[0])
        shape = example.shape if shape is None else shape
        if example.shape != shape:
            raise UserError(
                f"the input of item {place} of {what} has shape {example.shape}, but the first has {shape}; bring all to one"
            )
        waiting.append(example)
        labels.append([value if isinstance(value, str) else np.asarray(value) for value in item[1:]])
        if len(waiting) == AT_ONCE:
            yield np.stack(waiting)
            waiting = []
    if waiting:
        yield np.stack(waiting)


def _written(file: Path, blocks: Iterator[np.ndarray]) -> MappedTensor:
    """Blocks of rows in a file, which appears when all of them are there."""
    file.parent.mkdir(parents=True, exist_ok=True)
    side = file.with_name(f".{file.name}.part")
    first = next(blocks)
    try:
        with ArrayWriter(side, first.shape[1:], first.dtype) as writer:
            for block in chain([first], blocks):
                writer.append(block)
        side.replace(file)
    finally:
        side.unlink(missing_ok=True)
    return open_mapped(file)


def _items(items: Any) -> Iterable[Any]:
    if hasattr(items, "__len__") and hasattr(items, "__getitem__"):
        return (items[place] for place in range(len(items)))
    return items  # type: ignore[no-any-return]
