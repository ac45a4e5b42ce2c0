"""Labelled examples in memory, and the dataset that a training and a test set of them make up."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from fedflat.data.mapped import MappedTensor
from fedflat.errors import UserError

BLOCK_BYTES = 1 << 24
Kind = Literal["image", "vector", "text", "segmentation"]
IGNORED: int = 255
"""The id, in the masks of a segmentation, of pixels that count neither in training nor in scores."""


@dataclass(frozen=True, eq=False)
class Examples:
    """Labelled examples, as compact as they were published: images stay uint8 and are normalised batch by batch."""

    inputs: torch.Tensor
    targets: torch.Tensor
    """The class of each example; for text perhaps a class per position, [n, length]; for a segmentation a mask of bytes, [n, H, W]."""
    groups: torch.Tensor | None = None
    """The natural client of each example: a writer, a domain, a role."""
    coarse: torch.Tensor | None = None
    """The superclass of each example, where the labels have two levels."""

    def __len__(self) -> int:
        return len(self.targets)

    def take(self, indices: torch.Tensor | npt.NDArray[np.int64]) -> Examples:
        """The examples at the given positions."""
        rows = torch.as_tensor(indices)
        return self._each(lambda tensor: tensor[rows])

    def share(self) -> None:
        """Move the tensors to shared memory, so that worker processes read them without a copy; what is mapped stays in its file."""
        self._each(lambda tensor: tensor.share_memory_())  # type: ignore[no-untyped-call]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor that is there, by name."""
        return {name: tensor for name, tensor in vars(self).items() if tensor is not None}

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Examples:
        return Examples(**{name: change(tensor) for name, tensor in self.tensors().items()})


@dataclass(frozen=True, eq=False)
class Dataset:
    """A training set, a test set, and what a model must know of them; constructing one checks that they fit together."""

    name: str
    train: Examples
    test: Examples
    classes: tuple[str, ...]
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    """Mean and deviation per channel of uint8 inputs, on the scale from 0 to 1."""
    kind: Kind = "image"
    group_names: tuple[str, ...] = ()
    """The names of the natural clients, where they have any: example i comes from ``group_names[groups[i]]``."""

    def __post_init__(self) -> None:
        for part, examples in (("training", self.train), ("test", self.test)):
            _check_examples(f"the {part} set of {self.name}", examples, self)
        if (
            self.train.inputs.shape[1:] != self.test.inputs.shape[1:]
            or self.train.inputs.dtype != self.test.inputs.dtype
        ):
            raise UserError(
                f"the training inputs of {self.name} are {_form(self.train.inputs)}, "
                f"but its test inputs are {_form(self.test.inputs)}; expected the same shape and type"
            )
        if self.train.inputs.dtype == torch.uint8:
            channels = self.input_shape[0]
            if not len(self.mean) == len(self.std) == channels or min(self.std) <= 0:
                raise UserError(f"{self.name} needs a mean and a deviation above 0 for each of its {channels} channels")

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one example."""
        return tuple(self.train.inputs.shape[1:])

    @property
    def num_classes(self) -> int:
        """How many classes there are."""
        return len(self.classes)

    @cached_property
    def content(self) -> str:
        """sha256 over the names, types, shapes and bytes of all examples: equal for equal data, wherever they came from."""
        digest = hashlib.sha256()
        for part in (self.train, self.test):
            for name, tensor in part.tensors().items():
                digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
                for block in _blocks(tensor):
                    packed = block.detach().cpu().flatten().clone(memory_format=torch.contiguous_format)
                    digest.update(packed.view(torch.uint8).numpy().data)
        return digest.hexdigest()


def describe(dataset: Dataset) -> dict[str, Any]:
    """What a dataset holds, as plain values: sizes, shape, classes and how often each occurs, statistics, content hash."""

    def class_counts(examples: Examples) -> list[int]:
        counts = sum(
            (_class_counts(block, dataset.num_classes) for block in _blocks(examples.targets)), torch.tensor(0)
        )
        return counts.tolist()

    sizes: Any = [] if dataset.train.groups is None else np.unique(dataset.train.groups, return_counts=True)[1]
    return {
        "name": dataset.name,
        "kind": dataset.kind,
        "train": len(dataset.train),
        "test": len(dataset.test),
        "input_shape": list(dataset.input_shape),
        "target_shape": list(dataset.train.targets.shape[1:]),
        "bytes": sum(tensor.nbytes for part in (dataset.train, dataset.test) for tensor in part.tensors().values()),
        "mapped": isinstance(dataset.train.inputs, MappedTensor),
        "classes": list(dataset.classes),
        "train_class_counts": class_counts(dataset.train),
        "test_class_counts": class_counts(dataset.test),
        "groups": len(sizes),
        "group_sizes": {"min": int(min(sizes)), "median": float(np.median(sizes)), "max": int(max(sizes))}
        if len(sizes)
        else {},
        "group_names": list(dataset.group_names),
        "mean": list(dataset.mean),
        "std": list(dataset.std),
        "content": dataset.content,
    }


def _class_counts(targets: torch.Tensor, classes: int) -> torch.Tensor:
    """How often each class occurs, without what is ignored."""
    return torch.bincount(targets.flatten(), minlength=classes)[:classes]


def _blocks(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The rows of a tensor, few enough at a time that what is computed from them needs little memory."""
    rows = max(1, BLOCK_BYTES // max(1, tensor[:1].nbytes))
    yield from (tensor[start : start + rows] for start in range(0, max(1, len(tensor)), rows))


def _form(inputs: torch.Tensor) -> str:
    return f"{str(inputs.dtype).removeprefix('torch.')} of shape {tuple(inputs.shape[1:])}"


def _check_examples(what: str, examples: Examples, dataset: Dataset) -> None:
    lengths = {name: len(tensor) for name, tensor in examples.tensors().items()}
    if len(set(lengths.values())) > 1:
        raise UserError(
            f"{what} has {', '.join(f'{n} {name}' for name, n in lengths.items())}; expected equally many of each"
        )
    if not len(examples):
        raise UserError(f"{what} is empty; expected at least one example")
    inputs = examples.inputs
    if dataset.kind == "segmentation":
        _check_masks(what, examples, dataset)
    else:
        _check_labels(what, examples, dataset)
    # What is mapped may be larger than memory, and is not read from end to end for this.
    if (
        inputs.is_floating_point()
        and not isinstance(inputs, MappedTensor)
        and not all(bool(block.isfinite().all()) for block in _blocks(inputs))
    ):
        raise UserError(f"{what} has inputs that are infinite or not a number; expected finite values")
    if dataset.group_names and examples.groups is not None and int(examples.groups.max()) >= len(dataset.group_names):
        raise UserError(
            f"{what} has group {int(examples.groups.max())}, but there are names for {len(dataset.group_names)} groups only"
        )


def _check_labels(what: str, examples: Examples, dataset: Dataset) -> None:
    targets, inputs = examples.targets, examples.inputs
    if targets.dtype != torch.int64:
        raise UserError(f"the targets of {what} are {targets.dtype}; expected class numbers of type int64")
    if targets.ndim > 1 and (dataset.kind != "text" or targets.shape != inputs.shape):
        allowed = (
            f"one class per example or, as the inputs, {tuple(inputs.shape[1:])}"
            if dataset.kind == "text"
            else "one class per example"
        )
        raise UserError(f"the targets of {what} have shape {tuple(targets.shape[1:])} per example; expected {allowed}")
    low, high = int(targets.min()), int(targets.max())
    if low < 0:
        raise UserError(f"{what} has label {low}; expected labels from 0 on: number the classes 0, 1, 2 and so on")
    if high >= dataset.num_classes:
        raise UserError(f"{what} has label {high}; expected labels from 0 to {dataset.num_classes - 1}")


def _check_masks(what: str, examples: Examples, dataset: Dataset) -> None:
    masks, images = examples.targets, examples.inputs
    if images.dtype != torch.uint8 or images.ndim != 4 or masks.dtype != torch.uint8:
        raise UserError(
            f"{what} has inputs of type {images.dtype} and masks of type {masks.dtype}; "
            "expected images [n, C, H, W] and masks [n, H, W], both of type uint8"
        )
    if masks.shape[1:] != images.shape[2:]:
        raise UserError(
            f"{what} has images of {_size(images)} pixels and masks of {_size(masks)}; expected the same size: scale one of them"
        )
    if isinstance(masks, MappedTensor):
        return  # written by us, after every id was looked at
    wrong = [
        int(number)
        for block in _blocks(masks)
        for number in block[(block >= dataset.num_classes) & (block != IGNORED)][:1]
    ]
    if wrong:
        raise UserError(
            f"{what} has id {wrong[0]} in a mask; expected 0 to {dataset.num_classes - 1}, or {IGNORED} for pixels that do not count"
        )


def _size(tensor: torch.Tensor) -> str:
    return "x".join(map(str, tensor.shape[-2:]))
