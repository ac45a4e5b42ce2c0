"""Datasets from arrays and tensors in memory: ``from_arrays`` and ``from_clients``."""

from __future__ import annotations

from collections.abc import Sequence
from mmap import mmap
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fedflat.data.dataset import IGNORED, Dataset, Examples, Kind
from fedflat.data.files.mapped import MappedTensor, open_mapped
from fedflat.errors import UserError, one_of

Array = torch.Tensor | npt.NDArray[Any] | Sequence[Any]
Pair = tuple[Array, Array]
IMAGE_CHANNELS = (1, 3, 4)


def from_arrays(
    train_inputs: Array,
    train_targets: Array,
    test_inputs: Array,
    test_targets: Array,
    name: str = "arrays",
    classes: Sequence[str] | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    train_groups: Array | None = None,
    test_groups: Array | None = None,
) -> Dataset:
    """Build a dataset from arrays.

    Args:
        train_inputs: images [n, channels, height, width] or [n, height, width] (uint8 from 0 to 255, or float32);
            vectors [n, features] float; token sequences [n, length] int.
        train_targets: classes [n] as integers from 0 or as words; for text also [n, length]; for segmentation masks
            [n, height, width] with 255 for ignored pixels.
        test_inputs: as ``train_inputs``.
        test_targets: as ``train_targets``.
        name: name of the dataset.
        classes: class names; by default the words in the targets, else the class numbers.
        mean: mean per channel of uint8 images on the scale from 0 to 1; computed from the training set by default.
        std: standard deviation per channel; computed by default.
        train_groups: natural client of each training example [n], as integers or words.
        test_groups: natural client of each test example.
    """
    is_segmentation = np.ndim(train_targets) == 3
    labels, label_names = (
        ([_masks(targets) for targets in (train_targets, test_targets)], [])
        if is_segmentation
        else encode_labels(train_targets, test_targets, name, classes)
    )
    groups, group_names = encode_labels(train_groups, test_groups, name)
    train = Examples(_inputs(train_inputs, name), labels[0], groups[0])
    test = Examples(_inputs(test_inputs, name), labels[1], groups[1])
    if classes is None:
        highest = max(_highest_label(split.targets, is_segmentation) for split in (train, test))
        classes = label_names or [str(label) for label in range(highest + 1)]
    kind = "segmentation" if is_segmentation else _kind(name, train.inputs)
    if train.inputs.dtype == torch.uint8 and len(train) and (mean is None or std is None):
        computed = channel_statistics(train.inputs)
        mean, std = computed[0] if mean is None else mean, computed[1] if std is None else std
    means, stds = (() if given is None else tuple(float(value) for value in given) for given in (mean, std))
    return Dataset(name, train, test, tuple(map(str, classes)), means, stds, kind, tuple(group_names))


def from_clients(clients: Sequence[Pair], test: Pair | None = None, name: str = "clients", **options: Any) -> Dataset:
    """Build a dataset from the data of each client; the partition ``natural`` restores the clients.

    Args:
        clients: ``(inputs, targets)`` for each client, shaped as for ``from_arrays``.
        test: ``(inputs, targets)`` of the test set; by default models are tested on the clients' training data.
        name: name of the dataset.
        options: further arguments of ``from_arrays``.
    """
    if not isinstance(clients, Sequence | np.ndarray):
        raise UserError(f"clients is a {type(clients).__name__}; expected a list of pairs (inputs, targets)")
    if not len(clients):
        raise UserError("there are no clients; expected a list of pairs (inputs, targets)")
    pairs = [_checked_pair(pair, f"client {number}") for number, pair in enumerate(clients)]
    shapes = [tuple(inputs.shape[1:]) for inputs, _ in pairs]
    other = next((number for number, shape in enumerate(shapes) if shape != shapes[0]), None)
    if other is not None:
        raise UserError(
            f"the inputs of client {other} have shape {shapes[other]}, those of client 0 {shapes[0]}; "
            "expected one shape for all clients"
        )
    inputs, targets = (torch.cat(tensors) for tensors in zip(*pairs, strict=True))
    groups = np.repeat(np.arange(len(pairs)), [len(values) for _, values in pairs])
    test_pair = (inputs, targets) if test is None else _checked_pair(test, "the test set")
    return from_arrays(inputs, targets, *test_pair, name=name, train_groups=groups, **options)


def channel_statistics(images: torch.Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation per channel of uint8 images [n, channels, height, width], on the scale from 0 to 1.

    A constant channel gets standard deviation 1.
    """
    sums = np.zeros((2, images.shape[1]), dtype=np.int64)
    rows = max(1, (1 << 21) // max(1, images[:1].numel()))
    for start in range(0, len(images), rows):
        values = images[start : start + rows].numpy().astype(np.int64)
        sums += np.stack([values.sum((0, 2, 3)), np.square(values).sum((0, 2, 3))])
    return statistics_of_sums(sums, images[:, 0].numel())


def statistics_of_sums(sums: npt.NDArray[np.int64], count: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation per channel, on the scale from 0 to 1.

    Args:
        sums: sum and sum of squares per channel, [2, channels]; integers, so the order of summation does not matter.
        count: number of values per channel.
    """
    mean = sums[0] / max(count, 1)
    std = np.sqrt(np.maximum(sums[1] / max(count, 1) - mean**2, 0))
    std[std == 0] = 255.0
    return tuple((mean / 255).tolist()), tuple((std / 255).tolist())


def encode_labels(
    train: Any, test: Any, dataset: str, classes: Sequence[str] | None = None
) -> tuple[list[Any], list[str]]:
    """Convert labels or groups to int64 tensors.

    Args:
        train: integers or words [n]; None stays None.
        test: as ``train``.
        dataset: name of the dataset, for messages.
        classes: names whose positions number the words; by default the words in alphabetical order.

    Returns:
        The tensors ``[train, test]``, and the names; no names if the labels are integers.
    """
    columns = [None if values is None else as_native(values) for values in (train, test)]
    kinds = {_dtype_kind(values) for values in columns if values is not None and len(values)}
    if kinds <= set("biu"):
        return [None if values is None else torch.as_tensor(values).long() for values in columns], []
    if "f" in kinds:
        raise UserError(
            f"{dataset} has classes or clients of type float; expected integers from 0, or words: convert them to int"
        )
    if kinds & set("biu"):
        raise UserError("the training labels and the test labels differ in type; expected words in both or integers")
    words = [None if values is None else np.asarray(values).astype(str) for values in columns]
    distinct = np.unique(np.concatenate([values.ravel() for values in words if values is not None]))
    names = distinct.tolist() if classes is None else [str(name) for name in classes]
    unknown = next((word for word in distinct if word not in names), None)
    if unknown is not None:
        raise one_of("class", unknown, names, owner=dataset)
    number = np.array([names.index(word) for word in distinct])
    tensors = [
        None if values is None else torch.from_numpy(number[np.searchsorted(distinct, values)]) for values in words
    ]
    return tensors, names


def as_native(values: Any) -> torch.Tensor | npt.NDArray[Any]:
    """Tensors unchanged; anything else as an array in native byte order, the only one that torch supports."""
    if isinstance(values, torch.Tensor):
        return values
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise UserError(f"examples differ in shape ({error}); expected one shape") from error
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def _dtype_kind(values: torch.Tensor | npt.NDArray[Any]) -> str:
    """numpy's letter for a type: f for floats; i, u and b for integers; others for words."""
    if isinstance(values, torch.Tensor):
        return "f" if values.is_floating_point() else "i"
    return values.dtype.kind


def _masks(targets: Any) -> torch.Tensor:
    ids = torch.as_tensor(as_native(targets))
    if ids.is_floating_point() or (ids.numel() and (int(ids.min()) < 0 or int(ids.max()) > IGNORED)):
        raise UserError(f"masks contain invalid ids; expected integers from 0 to {IGNORED} ({IGNORED}: ignored pixels)")
    return ids.to(torch.uint8).clone()


def _highest_label(targets: torch.Tensor, is_segmentation: bool) -> int:
    labels = targets[targets != IGNORED] if is_segmentation else targets
    return int(labels.max()) if labels.numel() else 0


def _inputs(values: Array, name: str) -> torch.Tensor:
    path = _mapped_file(values)
    given = as_native(values) if path is None else open_mapped(path)
    if not isinstance(given, torch.Tensor) and given.dtype.kind not in "biuf":
        raise UserError(f"the inputs of {name} are of type {given.dtype}; expected numbers")
    inputs = torch.as_tensor(given).cpu()
    if inputs.dtype == torch.uint8 and inputs.ndim == 3:
        grey = inputs.unsqueeze(1)
        inputs = MappedTensor.of(grey, inputs.path) if isinstance(inputs, MappedTensor) else grey
    if inputs.ndim == 4 and not inputs.is_floating_point() and inputs.dtype != torch.uint8:
        raise UserError(f"the images of {name} are {inputs.dtype}; expected uint8 from 0 to 255, or float32")
    if inputs.dtype == torch.bool or (inputs.is_floating_point() and inputs.dtype != torch.float32):
        inputs = inputs.float()
    return inputs if isinstance(inputs, MappedTensor) else inputs.contiguous()


def _mapped_file(values: Any) -> Path | None:
    """The ``.npy`` file that ``values`` maps in full and unmodified, if any."""
    base: object = getattr(values, "base", None)
    is_full = isinstance(values, np.memmap) and isinstance(base, mmap) and str(values.filename).endswith(".npy")
    return Path(str(values.filename)) if is_full and values.mode != "c" and values.dtype.isnative else None


def _kind(name: str, inputs: torch.Tensor) -> Kind:
    if inputs.ndim == 4:
        if inputs.shape[1] not in IMAGE_CHANNELS and inputs.shape[3] in IMAGE_CHANNELS:
            raise UserError(
                f"the images of {name} have shape {tuple(inputs.shape[1:])}; expected channels first, [n, C, H, W]"
            )
        return "image"
    if inputs.dtype == torch.uint8:
        raise UserError(
            f"the uint8 inputs of {name} have shape {tuple(inputs.shape)}; expected images [n, C, H, W] or [n, H, W]"
        )
    return "vector" if inputs.is_floating_point() else "text"


def _checked_pair(pair: Any, owner: str) -> tuple[torch.Tensor, torch.Tensor]:
    try:
        inputs, targets = (torch.as_tensor(as_native(values)).detach().cpu() for values in pair)
    except (TypeError, ValueError, RuntimeError):
        raise UserError(f"{owner} is not a pair (inputs, targets); expected two arrays of equal length") from None
    if not inputs.ndim or len(inputs) != len(targets) or not len(inputs):
        shapes = " and ".join(str(tuple(values.shape)) for values in (inputs, targets))
        raise UserError(f"{owner} has inputs and targets of shapes {shapes}; expected equal lengths of at least 1")
    if targets.is_floating_point():
        raise UserError(f"{owner} has targets of type {targets.dtype}; expected class numbers from 0")
    return inputs, targets
