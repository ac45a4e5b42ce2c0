"""A user's own arrays as a dataset."""

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
from fedflat.errors import UserError, one_of

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
    """A dataset from arrays: images as [n, C, H, W] or [n, H, W], vectors as [n, features], token sequences as [n, length] of integers.

    Images whose targets are [n, H, W] are a segmentation: an id for each pixel, 255 for those that do not count.
    Statistics that are not given are computed from the training set when the inputs are uint8; float inputs are used as they are.
    """
    dense = np.ndim(train_targets) == 3
    labels, label_names = (
        ([_masks(targets) for targets in (train_targets, test_targets)], [])
        if dense
        else numbered(train_targets, test_targets, name, classes)
    )
    groups, group_names = numbered(train_groups, test_groups, name)
    train = Examples(_inputs(train_inputs, name), labels[0], groups[0])
    test = Examples(_inputs(test_inputs, name), labels[1], groups[1])
    if classes is None:
        highest = max(_highest(part.targets, dense) for part in (train, test))
        classes = label_names or [str(label) for label in range(highest + 1)]
    kind = "segmentation" if dense else _kind(name, train.inputs)
    if train.inputs.dtype == torch.uint8 and len(train) and (mean is None or std is None):
        computed = channel_statistics(train.inputs)
        mean, std = computed[0] if mean is None else mean, computed[1] if std is None else std
    centre, spread = (() if given is None else tuple(float(value) for value in given) for given in (mean, std))
    return Dataset(name, train, test, tuple(map(str, classes)), centre, spread, kind, tuple(group_names))


def _masks(targets: Any) -> torch.Tensor:
    """Masks as bytes in memory; ids that no byte can hold are refused."""
    ids = torch.as_tensor(native(targets))
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


def numbered(train: Any, test: Any, what: str, classes: Sequence[str] | None = None) -> tuple[list[Any], list[str]]:
    """Labels as int64 tensors, and words for them; None stays None.

    Words have the number of their place in ``classes`` or, where these are not given, in alphabetical order.
    """
    columns = [None if values is None else native(values) for values in (train, test)]
    kinds = {_letter(values) for values in columns if values is not None and len(values)}
    if kinds <= set("biu"):
        return [None if values is None else torch.as_tensor(values).long() for values in columns], []
    if "f" in kinds:
        raise UserError(
            f"{what} has classes or clients of type float; expected whole numbers from 0 on, or words: convert them to int"
        )
    if kinds & set("biu"):
        raise UserError(
            "the training and the test set name their labels in different ways; expected words in both or numbers in both"
        )
    words = [None if values is None else np.asarray(values).astype(str) for values in columns]
    found = np.unique(np.concatenate([values.ravel() for values in words if values is not None]))
    names = found.tolist() if classes is None else [str(name) for name in classes]
    unknown = next((word for word in found if word not in names), None)
    if unknown is not None:
        raise one_of(f"class among those of {what}", unknown, names)
    place = np.array([names.index(word) for word in found])
    return [
        None if values is None else torch.from_numpy(place[np.searchsorted(found, values)]) for values in words
    ], names


def native(values: Any) -> torch.Tensor | npt.NDArray[Any]:
    """A tensor as it is; anything else as an array in this machine's byte order, which is the only one that torch knows."""
    if isinstance(values, torch.Tensor):
        return values
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise UserError(f"examples differ in shape ({error}); bring all to one") from error
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def _letter(values: torch.Tensor | npt.NDArray[Any]) -> str:
    """numpy's letter for a type: f for fractions, i, u and b for whole numbers, others for words."""
    if isinstance(values, torch.Tensor):
        return "f" if values.is_floating_point() else "i"
    return values.dtype.kind


def _inputs(values: Array, name: str) -> torch.Tensor:
    path = _whole_file(values)
    given = native(values) if path is None else open_mapped(path)
    if not isinstance(given, torch.Tensor) and given.dtype.kind not in "biuf":
        raise UserError(f"the inputs of {name} are of type {given.dtype}; expected numbers")
    inputs = torch.as_tensor(given).cpu()
    if inputs.dtype == torch.uint8 and inputs.ndim == 3:
        inputs = (
            MappedTensor.of(inputs.unsqueeze(1), inputs.path)
            if isinstance(inputs, MappedTensor)
            else inputs.unsqueeze(1)
        )
    if inputs.ndim == 4 and not inputs.is_floating_point() and inputs.dtype != torch.uint8:
        raise UserError(
            f"the images of {name} are {inputs.dtype}; expected uint8, from 0 to 255, or float32: convert them"
        )
    if inputs.dtype == torch.bool or (inputs.is_floating_point() and inputs.dtype != torch.float32):
        inputs = inputs.float()
    return inputs if isinstance(inputs, MappedTensor) else inputs.contiguous()


def _whole_file(values: Any) -> Path | None:
    """The ``.npy`` file that an array maps from beginning to end, if it does and holds nothing that the file does not."""
    base: object = getattr(values, "base", None)
    is_whole = isinstance(values, np.memmap) and isinstance(base, mmap) and str(values.filename).endswith(".npy")
    return Path(str(values.filename)) if is_whole and values.mode != "c" and values.dtype.isnative else None


def _kind(name: str, inputs: torch.Tensor) -> Kind:
    likely_channels = (1, 3, 4)
    if inputs.ndim == 4 and inputs.shape[1] not in likely_channels and inputs.shape[3] in likely_channels:
        raise UserError(
            f"the images of {name} have shape {tuple(inputs.shape[1:])}; expected channels first, as in [n, C, H, W]"
        )
    if inputs.ndim == 4:
        return "image"
    if inputs.dtype == torch.uint8:
        raise UserError(
            f"the uint8 inputs of {name} have shape {tuple(inputs.shape)}; expected images [n, C, H, W] or [n, H, W]"
        )
    return "vector" if inputs.is_floating_point() else "text"
