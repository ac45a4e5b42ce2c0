"""Datasets from examples that arrive one by one, such as those of a ``torch.utils.data.Dataset``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedflat.data.arrays import as_native, from_arrays
from fedflat.data.dataset import Dataset
from fedflat.data.files.images import as_8_bit, channels_first
from fedflat.data.files.mapped import ArrayWriter, MappedTensor, open_mapped
from fedflat.errors import UserError

BLOCK_ROWS = 256


def from_torch(
    train: Any,
    test: Any,
    name: str = "torch",
    classes: Sequence[str] | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    folder: str | Path | None = None,
) -> Dataset:
    """Build a dataset from two torch datasets.

    Each item is read once, so a random transform would be applied only once; use ``augmentation`` instead.

    Args:
        train: items ``(input, class)`` or ``(input, class, natural client)``; inputs are tensors, arrays or Pillow
            images of one shape.
        test: as ``train``.
        name: name of the dataset.
        classes: class names; by default ``train.classes``, if it exists.
        mean: mean per channel of uint8 images on the scale from 0 to 1; computed by default.
        std: standard deviation per channel; computed by default.
        folder: write the inputs to this folder and map them, for datasets larger than memory.
    """
    if classes is None and isinstance(getattr(train, "classes", None), list | tuple):
        classes = [str(label) for label in train.classes]
    arrays: dict[str, Any] = {}
    for split, split_name, items in (
        ("train", f"the training set of {name}", train),
        ("test", f"the test set of {name}", test),
    ):
        if isinstance(items, torch.utils.data.TensorDataset):
            columns: Sequence[Any] = items.tensors
            if len(columns) not in (2, 3):
                raise UserError(
                    f"{split_name} has {len(columns)} tensors; expected inputs, targets and, if there are any, clients"
                )
        elif not isinstance(items, Iterable) and not hasattr(items, "__getitem__"):
            raise UserError(f"{split_name} is a {type(items).__name__}; expected a torch dataset or a list of examples")
        else:
            file = Path(folder) / f"{name}-{split}.npy" if folder else None
            columns = collect_examples(_iterate(items), split_name, file)
        for column, values in zip(("inputs", "targets", "groups"), columns, strict=False):  # groups may be absent
            arrays[f"{split}_{column}"] = values
    return from_arrays(**arrays, name=name, classes=classes, mean=mean, std=std)


def collect_examples(items: Iterable[Any], split_name: str, file: Path | None = None) -> list[Any]:
    """Stack examples into arrays.

    Args:
        items: tuples ``(input, class)`` or ``(input, class, client)``.
        split_name: e.g. ``the training set of mnist``, for messages.
        file: ``.npy`` file to write the inputs to; they are then memory-mapped.

    Returns:
        Inputs [n, ...], classes [n] and, if given, clients [n].
    """
    classes_and_clients: list[Sequence[Any]] = []  # _input_blocks appends to it while the blocks are consumed
    blocks = _input_blocks(items, split_name, classes_and_clients)
    first = next(blocks, None)
    if first is None:
        raise UserError(f"{split_name} is empty; expected at least one example")
    inputs = np.concatenate([first, *blocks]) if file is None else _write_blocks(file, chain([first], blocks))
    try:
        return [inputs, *(np.array(column) for column in zip(*classes_and_clients, strict=True))]
    except ValueError:
        raise UserError(
            f"the targets of {split_name} differ in shape, or only some items have a client; expected one form"
        ) from None


def _as_array(value: Any) -> np.ndarray:
    """Convert one input or target to an array; Pillow images become uint8 with channels first."""
    if isinstance(value, torch.Tensor):
        row: np.ndarray = np.asarray(as_native((value.float() if value.dtype == torch.bfloat16 else value)[None]))[0]
        return row
    if hasattr(value, "getbands"):  # a Pillow image
        return channels_first(as_8_bit(value))
    return np.asarray(value)


def _input_blocks(
    items: Iterable[Any], split_name: str, classes_and_clients: list[Sequence[Any]]
) -> Iterator[np.ndarray]:
    """Yield the inputs in blocks of up to 256 rows; append the other fields of each item to ``classes_and_clients``.

    Args:
        items: tuples ``(input, class)`` or ``(input, class, client)``.
        split_name: e.g. ``the training set of mnist``, for messages.
        classes_and_clients: receives ``[class]`` or ``[class, client]`` for each item.
    """
    block: list[np.ndarray] = []
    first: np.ndarray | None = None
    for position, item in enumerate(items):
        if not isinstance(item, list | tuple) or len(item) not in (2, 3):
            raise UserError(
                f"item {position} of {split_name} is a {type(item).__name__}; "
                "expected (input, class) or (input, class, client)"
            )
        example = _as_array(item[0])
        first = example if first is None else first
        has_other_scale = (example.dtype == np.uint8) != (first.dtype == np.uint8)  # 0 to 255 instead of 0 to 1
        if example.shape != first.shape or has_other_scale:
            raise UserError(
                f"the input of item {position} of {split_name} has shape {example.shape} and type {example.dtype}, but "
                f"the first has {first.shape} and {first.dtype}; expected one shape and type"
            )
        block.append(example)
        classes_and_clients.append([value if isinstance(value, str) else _as_array(value) for value in item[1:]])
        if len(block) == BLOCK_ROWS:
            yield np.stack(block)
            block = []
    if block:
        yield np.stack(block)


def _write_blocks(file: Path, blocks: Iterator[np.ndarray]) -> MappedTensor:
    """Write blocks of rows to the ``.npy`` file ``file``, which appears once it is complete, and map it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}.part")
    first = next(blocks)  # determines the shape and type
    try:
        with ArrayWriter(temporary, first.shape[1:], first.dtype) as writer:
            for block in chain([first], blocks):
                if not np.can_cast(block.dtype, first.dtype, "safe"):
                    raise UserError(f"{file} cannot hold inputs of types {first.dtype} and {block.dtype}; convert them")
                writer.append(block)
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)
    return open_mapped(file)


def _iterate(items: Any) -> Iterable[Any]:
    """Iterate over a map-style dataset by position, over anything else directly."""
    is_iterable = isinstance(items, torch.utils.data.IterableDataset)  # inherits a __getitem__ that raises
    if hasattr(items, "__len__") and hasattr(items, "__getitem__") and not is_iterable:
        return (items[position] for position in range(len(items)))
    return items  # type: ignore[no-any-return]
