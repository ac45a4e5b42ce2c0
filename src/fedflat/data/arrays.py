"""A user's own arrays as a data set."""

from __future__ import annotations

from collections.abc import Sequence
from mmap import mmap
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fedflat.data.dataset import IGNORED, Dataset, Examples, Kind
from fedflat.data.mapped import MappedTensor, open_mapped
from fedflat.errors import UserError

Array = torch.Tensor | npt.NDArray[Any] | Sequence[Any]


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
    """A data set from arrays: images as [n, C, H, W] or [n, H, W], vectors as [n, features], token sequences as [n, length] of integers.

    Images whose targets are [n, H, W] are a segmentation: an id for each pixel, 255 for those that do not count.
    Statistics that are not given are computed from the training set when the inputs are uint8; float inputs are used as they are.
    """
    dense = np.ndim(train_targets) == 3
    labels, label_names = (
        ([_masks(targets) for targets in (train_targets, test_targets)], []) if dense else numbered(train_targets, test_targets)
    )
    groups, group_names = numbered(train_groups, test_groups)
    train = Examples(_inputs(train_inputs), labels[0], groups[0])
    test = Examples(_inputs(test_inputs), labels[1], groups[1])
    if classes is None:
        highest = max(_highest(part.targets, dense) for part in (train, test))
        classes = label_names or [str(label) for label in range(highest + 1)]
    kind = "segmentation" if dense else _kind(name, train.inputs)
    if train.inputs.dtype == torch.uint8 and len(train) and (mean is None or std is None):
        computed = channel_statistics(train.inputs)
        mean, std = mean or computed[0], std or computed[1]
    return Dataset(name, train, test, tuple(classes), tuple(mean or ()), tuple(std or ()), kind, tuple(group_names))


def _masks(targets: Any) -> torch.Tensor:
    """Masks as bytes in memory; ids that no byte can hold are refused."""
    ids = torch.as_tensor(targets)
    if ids.is_floating_point() or (ids.numel() and (int(ids.min()) < 0 or int(ids.max()) > IGNORED)):
        raise UserError(
            f"masks have whole numbers from 0 to {IGNORED}, of which {IGNORED} is for pixels that do not count; these have others"
        )
    return ids.to(torch.uint8).clone()


def _highest(targets: torch.Tensor, dense: bool) -> int:
    counting = targets[targets != IGNORED] if dense else targets
    return int(counting.max()) if counting.numel() else 0


def channel_statistics(images: torch.Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation per channel of uint8 images, on the scale from 0 to 1; a constant channel has deviation 1."""
    sums = np.zeros((2, images.shape[1]), dtype=np.int64)
    rows = max(1, (1 << 21) // max(1, images[:1].numel()))
    for start in range(0, len(images), rows):
        values = images[start : start + rows].numpy().astype(np.int64)
        sums += np.stack([values.sum((0, 2, 3)), np.square(values).sum((0, 2, 3))])
    return statistics_of_sums(sums, images[:, 0].numel())


def statistics_of_sums(sums: npt.NDArray[np.int64], count: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation per channel from the sums of ``count`` values and of their squares; whole numbers, so that order plays no role."""
    mean = sums[0] / max(count, 1)
    std = np.sqrt(np.maximum(sums[1] / max(count, 1) - mean**2, 0))
    std[std == 0] = 255.0
    return tuple((mean / 255).tolist()), tuple((std / 255).tolist())


def numbered(train: Any, test: Any) -> tuple[list[Any], list[str]]:
    """Labels as int64 tensors; words are numbered in alphabetical order, and the words come along. None stays None."""
    given = [values for values in (train, test) if values is not None]
    worded = [not isinstance(values, torch.Tensor) and np.asarray(values).dtype.kind not in "biuf" for values in given]
    if not any(worded):
        return [None if values is None else torch.as_tensor(values).long() for values in (train, test)], []
    if not all(worded):
        raise UserError("the training and the test set name their labels in different ways; expected words in both or numbers in both")
    names = sorted({str(word) for values in given for word in np.asarray(values).ravel()})
    place = {name: number for number, name in enumerate(names)}
    return [None if values is None else torch.tensor([place[str(word)] for word in np.asarray(values)]) for values in (train, test)], names


def _inputs(values: Array) -> torch.Tensor:
    path = _whole_file(values)
    if path is not None:
        values = open_mapped(path)
    inputs = torch.as_tensor(values).cpu()
    if inputs.dtype == torch.uint8 and inputs.ndim == 3:
        inputs = MappedTensor.of(inputs.unsqueeze(1), inputs.path) if isinstance(inputs, MappedTensor) else inputs.unsqueeze(1)
    if inputs.dtype == torch.float64:
        inputs = inputs.float()
    return inputs if isinstance(inputs, MappedTensor) else inputs.contiguous()


def _whole_file(values: Any) -> Path | None:
    """The ``.npy`` file that an array maps from beginning to end, if it does."""
    base: object = getattr(values, "base", None)
    is_whole = isinstance(values, np.memmap) and isinstance(base, mmap) and str(values.filename).endswith(".npy")
    return Path(str(values.filename)) if is_whole else None


def _kind(name: str, inputs: torch.Tensor) -> Kind:
    likely_channels = (1, 3, 4)
    if inputs.ndim == 4 and inputs.shape[1] not in likely_channels and inputs.shape[3] in likely_channels:
        raise UserError(f"the images of {name} have shape {tuple(inputs.shape[1:])}; expected channels first, as in [n, C, H, W]")
    if inputs.ndim == 4:
        return "image"
    if inputs.dtype == torch.uint8:
        raise UserError(f"the uint8 inputs of {name} have shape {tuple(inputs.shape)}; expected images [n, C, H, W] or [n, H, W]")
    return "vector" if inputs.is_floating_point() else "text"
