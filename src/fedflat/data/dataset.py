"""``Examples``, labelled examples as tensors, and ``Dataset``, a training and a test set of them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from fedflat.data.files.mapped import MappedTensor
from fedflat.data.hashing import bounded_hash, content_hash, row_blocks
from fedflat.display import html_values, shown_count
from fedflat.errors import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Kind = Literal["image", "vector", "text", "segmentation"]
TargetType = Literal["classes", "numbers", "labels"]
"""One class per example, position or pixel; numbers to predict (regression); any number of labels (multi-label)."""
IGNORED: int = 255
"""Id of mask pixels that count neither in training nor in metrics."""
IGNORED_TOKEN: int = -100
"""Marks positions of text without a token: padding among inputs, predictions that do not count among targets."""
TEST_EVERY = 5
"""Without a given test set, every fifth example of a class is a test example."""


@dataclass(frozen=True, eq=False)
class Examples:
    """Labelled examples. Images stay uint8 and are normalised batch by batch.

    Attributes:
        inputs: images of shape [n, channels, height, width] (uint8 from 0 to 255, or float32), vectors of shape
            [n, features] (float32 or float64), or token sequences of shape [n, length] (int64), where -100 is padding.
        targets: class of each example, shape [n] (int64); for text also a class per position, [n, length], where -100
            does not count. In segmentation, targets are masks [n, height, width] (uint8); in regression, numbers [n]
            or [n, columns] (float32 or float64); in multi-label data, whether each label applies, [n, labels] (bool).
        groups: natural client of each example, e.g. its writer or domain, shape [n] (int64); None if unknown.
        coarse: superclass of each example, shape [n] (int64); None if classes have no superclasses.
    """

    inputs: torch.Tensor
    targets: torch.Tensor
    groups: torch.Tensor | None = None
    coarse: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.targets)

    def take(self, indices: torch.Tensor | npt.NDArray[np.int64]) -> Examples:
        """Return the examples at the positions ``indices``, shape [m]."""
        rows = torch.as_tensor(indices)
        return Examples(**{name: tensor[rows] for name, tensor in self.tensors().items()})

    def share(self) -> None:
        """Move the tensors to shared memory for use in worker processes; memory-mapped tensors stay in their file."""
        for tensor in self.tensors().values():
            tensor.share_memory_()  # type: ignore[no-untyped-call]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return all tensors except those that are None, by attribute name."""
        return {name: tensor for name, tensor in vars(self).items() if tensor is not None}


@dataclass(frozen=True, eq=False, repr=False)
class Dataset:
    """A training set and a test set; construction checks that they are consistent.

    Attributes:
        name: the dataset as text, e.g. ``pacs(size=32)``.
        train: training examples.
        test: test examples.
        classes: names of the classes or labels; empty for regression.
        mean: mean of each channel of uint8 inputs, after division by 255, or of each standardised input; else empty.
        std: standard deviation of each channel, after division by 255, or of each standardised input; else empty.
        kind: kind of the examples: ``image``, ``vector``, ``text`` or ``segmentation``.
        group_names: names of the natural clients; example i belongs to ``group_names[groups[i]]``.
        columns: names of the input columns of a table; empty for other data.
        target_mean: mean of each column of standardised targets, in their original units; else empty.
        target_std: standard deviation of each column of standardised targets; else empty.
    """

    name: str
    train: Examples
    test: Examples
    classes: tuple[str, ...]
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    kind: Kind = "image"
    group_names: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    target_mean: tuple[float, ...] = ()
    target_std: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        """Check both sets and, for uint8 inputs, mean and std; raises a ``UserError`` if they are inconsistent."""
        for split, examples in (("training", self.train), ("test", self.test)):
            _check_examples(f"the {split} set of {self.name}", examples, self)
        train, test = self.train.inputs, self.test.inputs
        if train.shape[1:] != test.shape[1:] or train.dtype != test.dtype:
            raise UserError(
                f"the training inputs of {self.name} are {_type_and_shape(train)}, but its test inputs are "
                f"{_type_and_shape(test)}; expected the same shape and type"
            )
        if train.dtype == torch.uint8:
            channels = self.input_shape[0]
            constants = (*self.mean, *self.std)
            is_valid = len(self.mean) == len(self.std) == channels and all(map(math.isfinite, constants))
            if not is_valid or min(self.std) <= 0:
                raise UserError(
                    f"{self.name} has {channels} channels; expected a finite mean and a positive standard deviation "
                    "for each"
                )

    def __repr__(self) -> str:
        return f"Dataset({self.name}: {', '.join(self._overview().values())})"

    def _repr_html_(self) -> str:
        return html_values(self.name, self._overview())

    def _overview(self) -> dict[str, str]:
        """Return the kind, the numbers of examples, their shape and the number of classes, as text to display."""
        shape = "x".join(map(str, self.input_shape))
        return {
            "kind": self.kind,
            "training": f"{shown_count(len(self.train))} training examples",
            "test": f"{shown_count(len(self.test))} test examples",
            "shape": f"shape {shape}",
            "targets": f"{self.num_classes} classes" if self.classes else "numbers",
        }

    def plot(self) -> Figure:
        """Draw the number of examples per class in both sets and, for images, one example of each class."""
        from fedflat.reporting.figures.dataset import dataset_picture

        return dataset_picture(self)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one example."""
        return tuple(self.train.inputs.shape[1:])

    @property
    def num_classes(self) -> int:
        """Number of classes or labels; 0 for regression."""
        return len(self.classes)

    @property
    def target_type(self) -> TargetType:
        """What the targets are: ``classes``, ``numbers`` (regression) or ``labels`` (multi-label)."""
        targets = self.train.targets
        if targets.is_floating_point():
            return "numbers"
        return "labels" if targets.dtype == torch.bool else "classes"

    @property
    def num_outputs(self) -> int:
        """Number of outputs that a model needs for this dataset: one per class, label or column of numbers."""
        if self.target_type == "numbers":
            return self.train.targets[0].numel()
        return self.num_classes

    def as_numbers(self) -> Dataset:
        """Return a copy for regression, whose targets are the class numbers as floats.

        Raises a ``UserError`` if classes have names other than their numbers, or if an example has several classes.
        """
        are_unnamed = self.classes == tuple(map(str, range(self.num_classes)))
        if self.train.targets.ndim > 1 or not are_unnamed:
            raise UserError(
                f"the targets of {self.name} are not numbers; for regression store them as floats [n] or [n, columns]"
            )
        train, test = (replace(split, targets=split.targets.double()) for split in (self.train, self.test))
        return replace(self, train=train, test=test, classes=())

    @cached_property
    def content(self) -> str:
        """sha256 over the types, shapes and values of all examples; independent of where they came from.

        Tensors are hashed in blocks, since they may exceed memory.
        """
        return content_hash(self.train.tensors(), self.test.tensors())

    def fingerprint(self) -> str:
        """Short hash by which a run recognises its data, computed in bounded time and memory.

        It covers the normalisation constants and all values of every tensor, or an even sample of examples if the
        tensor is larger than 256 MiB. Floats are rounded to float32, so the hash does not depend on a run's precision.
        """
        constants = (self.mean, self.std, self.target_mean, self.target_std)
        return bounded_hash(constants, self.train.tensors(), self.test.tensors())


def every_fifth(labels: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Mark every fifth example of each class as a test example.

    Args:
        labels: class of each example [n].

    Returns:
        Whether each example is a test example [n].
    """
    is_test = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        is_test[np.flatnonzero(labels == label)[TEST_EVERY - 1 :: TEST_EVERY]] = True
    return is_test


def token_range(tokens: torch.Tensor) -> tuple[int, int]:
    """Return the lowest and highest token except -100; the lowest exceeds the highest if there are none."""
    low, high = torch.iinfo(torch.int64).max, -1
    for block in row_blocks(tokens):
        present = block[block != IGNORED_TOKEN]
        if present.numel():
            low, high = min(low, int(present.min())), max(high, int(present.max()))
    return low, high


def _type_and_shape(inputs: torch.Tensor) -> str:
    return f"{str(inputs.dtype).removeprefix('torch.')} of shape {tuple(inputs.shape[1:])}"


def _check_examples(split_name: str, examples: Examples, dataset: Dataset) -> None:
    """Raise a ``UserError`` if the examples of one split are inconsistent.

    Args:
        split_name: e.g. ``the training set of mnist``, for messages.
        examples: the examples to check.
        dataset: the dataset they belong to, whose kind, classes and group names they must match.
    """
    lengths = {name: len(tensor) for name, tensor in examples.tensors().items()}
    if len(set(lengths.values())) > 1:
        counts = ", ".join(f"{length} {name}" for name, length in lengths.items())
        raise UserError(f"{split_name} has {counts}; expected the same number of each")
    if not len(examples):
        raise UserError(f"{split_name} is empty; expected at least one example")
    inputs, groups = examples.inputs, examples.groups
    checks = {"classes": _check_labels, "numbers": _check_numbers, "labels": _check_multi_labels}
    check = _check_masks if dataset.kind == "segmentation" else checks[dataset.target_type]
    check(split_name, examples, dataset)
    # Mapped inputs may be larger than memory, so they are not read in full here.
    if inputs.is_floating_point() and not isinstance(inputs, MappedTensor):
        for block in row_blocks(inputs):
            if not block.float().isfinite().all():
                raise UserError(
                    f"{split_name} has inputs that are NaN, infinite or too large for float32; expected finite values"
                )
    if groups is not None and groups.ndim != 1:
        raise UserError(
            f"the groups of {split_name} have shape {tuple(groups.shape)}; expected one natural client per example, "
            "shape [n]"
        )
    names = dataset.group_names
    if names and groups is not None and int(groups.max()) >= len(names):
        raise UserError(f"{split_name} has group {int(groups.max())}, but only {len(names)} group names are given")


def _check_labels(split_name: str, examples: Examples, dataset: Dataset) -> None:
    """Raise a ``UserError`` unless targets are int64 classes, one per example or, for text, one per position."""
    targets, inputs = examples.targets, examples.inputs
    if targets.dtype != torch.int64:
        raise UserError(f"the targets of {split_name} are {targets.dtype}; expected class numbers of type int64")
    if targets.ndim > 1 and (dataset.kind != "text" or targets.shape != inputs.shape):
        allowed = "one class per example, or 0/1 for each label of each example [n, labels] (multi-label)"
        if dataset.kind == "text":
            allowed += f", or one per position: {tuple(inputs.shape[1:])}"
        raise UserError(
            f"the targets of {split_name} have shape {tuple(targets.shape[1:])} per example; expected {allowed}"
        )
    per_position = targets.ndim > 1
    low, high = token_range(targets) if per_position else (int(targets.min()), int(targets.max()))
    if low > high:
        raise UserError(f"all targets of {split_name} are {IGNORED_TOKEN}, so no prediction counts; check the labels")
    if low < 0:
        regression = "for regression store the targets as floats or use --task mse"
        advice = f"use {IGNORED_TOKEN} to ignore a position" if per_position else regression
        raise UserError(
            f"{split_name} has label {low}; expected labels from 0 on: number the classes 0, 1, 2, ..., or {advice}"
        )
    if high >= dataset.num_classes:
        raise UserError(f"{split_name} has label {high}; expected labels from 0 to {dataset.num_classes - 1}")


def _check_numbers(split_name: str, examples: Examples, dataset: Dataset) -> None:
    """Raise a ``UserError`` unless targets are finite numbers [n] or [n, columns], and there are no classes."""
    targets, shape = examples.targets, dataset.train.targets.shape[1:]  # shape per example: () or (columns,)
    if not targets.is_floating_point() or targets.ndim > 2 or targets.shape[1:] != shape or not dataset.num_outputs:
        raise UserError(
            f"the targets of {split_name} are {_type_and_shape(targets)}; expected numbers, one per example or "
            "one per column [n, columns], in both sets"
        )
    if not targets.float().isfinite().all():
        raise UserError(
            f"{split_name} has targets that are missing (NaN), infinite or too large for float32; remove these "
            "examples, fill in the targets or rescale them"
        )
    if dataset.classes:
        raise UserError(f"{dataset.name} has float targets and classes; for classification convert targets to int64")


def _check_multi_labels(split_name: str, examples: Examples, dataset: Dataset) -> None:
    """Raise a ``UserError`` unless targets are bool [n, labels], and the dataset has a name for each label."""
    targets = examples.targets
    if targets.dtype != torch.bool or targets.shape[1:] != (dataset.num_classes,) or not dataset.num_classes:
        raise UserError(
            f"the targets of {split_name} are {_type_and_shape(targets)}; expected 0 or 1 for each of the "
            f"{dataset.num_classes} label names, in both sets"
        )


def _check_masks(split_name: str, examples: Examples, dataset: Dataset) -> None:
    """Raise a ``UserError`` unless images and masks are uint8, of one size, and every mask pixel has a known class."""
    masks, images = examples.targets, examples.inputs
    if images.dtype != torch.uint8 or images.ndim != 4 or masks.dtype != torch.uint8:
        raise UserError(
            f"{split_name} has inputs {_type_and_shape(images)} and masks {_type_and_shape(masks)}; "
            "expected images [n, C, H, W] and masks [n, H, W], both of type uint8"
        )
    if masks.shape[1:] != images.shape[2:]:
        raise UserError(
            f"{split_name} has images of {_size_text(images)} pixels and masks of {_size_text(masks)}; "
            "expected the same size: resize one of them"
        )
    if isinstance(masks, MappedTensor):
        return  # written by fedflat after checking every id
    for block in row_blocks(masks):
        unknown = block[(block >= dataset.num_classes) & (block != IGNORED)]
        if len(unknown):
            raise UserError(
                f"{split_name} has mask id {int(unknown[0])}; expected 0 to {dataset.num_classes - 1}, "
                f"or {IGNORED} for ignored pixels"
            )


def _size_text(tensor: torch.Tensor) -> str:
    return "x".join(map(str, tensor.shape[-2:]))
