"""Datasets from arrays and tensors in memory: ``from_arrays`` and ``from_clients``."""

from __future__ import annotations

from collections.abc import Sequence
from mmap import mmap
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fedflat.data.batches import channel_statistics
from fedflat.data.dataset import IGNORED, Dataset, Examples, Kind
from fedflat.data.files.cache import fits_in_memory
from fedflat.data.files.mapped import MappedTensor, open_mapped
from fedflat.data.scaling import scale_columns
from fedflat.errors import UserError, one_of

Array = torch.Tensor | npt.NDArray[Any] | Sequence[Any]
Pair = tuple[Array, Array]
IMAGE_CHANNELS = (1, 3, 4)
MAX_UNNAMED_CLASSES = 10_000
"""From this label on, labels without names must not exceed ten times the number of distinct labels.

Otherwise they are more likely ids, e.g. of a database, than class numbers 0, 1, 2, ...
"""
FLOATS = (torch.float32, torch.float64)
NUMERIC_KINDS = "biuf"
"""numpy's letters for booleans, signed and unsigned integers, and floats (``dtype.kind``)."""


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
    target_mean: Sequence[float] | None = None,
    target_std: Sequence[float] | None = None,
) -> Dataset:
    """Build a dataset from arrays.

    Args:
        train_inputs: images [n, channels, height, width] (uint8 from 0 to 255, or float32) or [n, height, width]
            (uint8); vectors [n, features] float; token sequences [n, length] int, with -100 for padding.
        train_targets: classes [n] as integers from 0 or as words; for text also [n, length], with -100 for positions
            that do not count; for segmentation masks [n, height, width] with 255 for ignored pixels; for regression
            numbers [n] or [n, columns] of a float type; for multi-label data 0 or 1 for each label [n, labels], as
            integers or booleans.
        test_inputs: as ``train_inputs``.
        test_targets: as ``train_targets``.
        name: name of the dataset.
        classes: class or label names; by default the words in the targets, else their numbers; none for regression.
        mean: mean per channel of uint8 images on the scale from 0 to 1; computed from the training set by default.
            For vectors, the number to subtract from each column; by default vectors are used as they are.
        std: standard deviation per channel or column, as ``mean``. Images other than uint8 are not normalised.
        train_groups: natural client of each training example [n], e.g. its writer, as integers or words; the partition
            ``natural`` makes each of them a client.
        test_groups: natural client of each test example.
        target_mean: for regression, the number to subtract from each target column; by default none.
        target_std: for regression, the number to divide each target column by.
    """
    inputs = [_to_inputs(train_inputs, name), _to_inputs(test_inputs, name)]
    if {split.dtype for split in inputs} == set(FLOATS):
        inputs = [split.float() for split in inputs]
    is_table = not inputs[0].is_floating_point() and inputs[0].dtype != torch.uint8 and inputs[0].ndim == 2
    if is_table and not (mean is None and std is None):  # numbers to standardise, not tokens
        inputs = [split.float() for split in inputs]
    kind: Kind = "segmentation" if np.ndim(train_targets) == 3 else _infer_kind(name, inputs[0])
    if classes is not None and (isinstance(classes, str) or not np.ndim(classes)):
        raise UserError(f"classes of {name} is {classes!r}; expected a list of class names")
    targets, classes = _to_targets(train_targets, test_targets, name, kind, classes)
    groups, group_names = encode_labels(train_groups, test_groups, name)
    train, test = map(Examples, inputs, targets, groups)
    means: tuple[float, ...] = ()
    stds: tuple[float, ...] = ()
    if train.inputs.dtype == torch.uint8:
        if len(train) and (mean is None or std is None):
            computed_mean, computed_std = channel_statistics(train.inputs)
            mean, std = computed_mean if mean is None else mean, computed_std if std is None else std
        means, stds = _to_constants(mean, f"mean of {name}"), _to_constants(std, f"std of {name}")
    dataset = Dataset(name, train, test, tuple(map(str, classes)), means, stds, kind, tuple(group_names))
    if kind == "vector" and not (mean is None and std is None):
        dataset = scale_columns(dataset, "inputs", mean, std)
    if not (target_mean is None and target_std is None):
        dataset = scale_columns(dataset, "targets", target_mean, target_std)
    return dataset


def _to_constants(values: Any, what: str) -> tuple[float, ...]:
    """Convert normalisation constants, one per channel, to floats; None becomes an empty tuple.

    ``what`` names the constants in the message of a ``UserError``.
    """
    try:
        return () if values is None else tuple(map(float, values))
    except (TypeError, ValueError):
        raise UserError(f"{what} is {values!r}; expected a list with one number per channel") from None


def _to_targets(
    train: Array, test: Array, name: str, kind: Kind, classes: Sequence[str] | None
) -> tuple[list[torch.Tensor], Sequence[str]]:
    """Convert training and test targets to tensors, and determine the class names.

    Args:
        train: training targets; their type and shape determine whether they are classes, labels, numbers or masks.
        test: test targets.
        name: name of the dataset, for messages.
        kind: kind of the dataset; targets of ``segmentation`` are masks, and those of ``text`` are never multi-label.
        classes: class names that the user gave; None to derive them from the targets.

    Returns:
        The tensors ``[train, test]``, and the class names, of which regression has none.
    """
    label_names: list[str] = []
    if kind == "segmentation":
        targets = [_to_masks(train), _to_masks(test)]
    elif _are_regression_targets(train, test):
        targets = [torch.as_tensor(as_native(values)) for values in (train, test)]
        # As for inputs, float64 stays, and each run converts the targets to its precision.
        dtype = torch.float64 if all(values.dtype == torch.float64 for values in targets) else torch.float32
        targets = [values.to(dtype, copy=True) for values in targets]
        return targets, () if classes is None else classes
    elif kind != "text" and _are_multi_labels(train, test):
        targets = [torch.tensor(np.asarray(as_native(values)), dtype=torch.bool) for values in (train, test)]
        label_names = [str(label) for label in range(targets[0].shape[1])]
    else:
        targets, label_names = encode_labels(train, test, name, classes)
    if classes is None:
        labels = [values[values != IGNORED] if kind == "segmentation" else values for values in targets]
        highest = max((int(values.max()) for values in labels if values.numel()), default=0)
        distinct = len(torch.unique(torch.cat([torch.unique(values) for values in targets])))
        if not label_names and highest >= max(MAX_UNNAMED_CLASSES, 10 * distinct):
            raise UserError(
                f"{name} has label {highest}, but only {distinct} different labels; if they are numbers to predict, "
                "use --task mse or store them as floats; otherwise number the classes 0, 1, 2, ... "
                "(numpy.unique(labels, return_inverse=True)), or pass classes="
            )
        classes = label_names or [str(label) for label in range(highest + 1)]
    return targets, classes


def from_clients(clients: Sequence[Pair], test: Pair | None = None, name: str = "clients", **options: Any) -> Dataset:
    """Build a dataset from the data of each client; with the partition ``natural``, each client gets its own data.

    Args:
        clients: ``(inputs, targets)`` for each client, with one example per row.
        test: ``(inputs, targets)`` of the test set; by default models are tested on the clients' training data.
        name: name of the dataset.
        options: further arguments of ``from_arrays``.
    """
    if not isinstance(clients, Sequence | np.ndarray):
        raise UserError(f"clients is a {type(clients).__name__}; expected a list of pairs (inputs, targets)")
    if not len(clients):
        raise UserError("there are no clients; expected a list of pairs (inputs, targets)")
    pairs = [_to_pair(pair, f"client {number}") for number, pair in enumerate(clients)]
    for what, arrays in zip(("inputs", "targets"), zip(*pairs, strict=True), strict=True):
        shape, dtype = tuple(arrays[0].shape[1:]), arrays[0].dtype
        for number, values in enumerate(arrays):
            if values.shape[1:] != shape:
                raise UserError(
                    f"the {what} of client {number} have shape {tuple(values.shape[1:])}, those of client 0 {shape}; "
                    "expected one shape for all clients"
                )
        for number, values in enumerate(arrays):
            if _comparable_type(values) != _comparable_type(arrays[0]):
                raise UserError(
                    f"the {what} of client {number} are of type {values.dtype}, those of client 0 of {dtype}; "
                    "expected one type for all clients"
                )
    inputs = torch.cat([inputs for inputs, _ in pairs])
    targets = np.concatenate([targets for _, targets in pairs])
    groups = np.repeat(np.arange(len(pairs)), [len(targets) for _, targets in pairs])
    test_pair = (inputs, targets) if test is None else _to_pair(test, "the test set")
    return from_arrays(inputs, targets, *test_pair, name=name, train_groups=groups, **options)


def encode_labels(
    train: Any, test: Any, dataset: str, classes: Sequence[str] | None = None
) -> tuple[list[Any], list[str]]:
    """Convert labels or groups to int64 tensors.

    Args:
        train: integers or words [n]; None stays None.
        test: as ``train``.
        dataset: name of the dataset, for messages.
        classes: all words in the order of their class numbers; by default those that occur, alphabetically.

    Returns:
        The tensors ``[train, test]``, and the words in the order of their numbers (empty if the labels are integers).
    """
    splits = {split: as_native(values) for split, values in enumerate((train, test)) if values is not None}
    kinds = {_dtype_kind(values) for values in splits.values() if len(values)}
    integer_kinds = set("biu")  # numpy's letters for booleans, signed and unsigned integers
    if kinds <= integer_kinds:
        return [torch.as_tensor(splits[split]).long() if split in splits else None for split in (0, 1)], []
    if "f" in kinds:
        raise UserError(
            f"{dataset} has classes or clients of type float; expected integers from 0, or words: convert them to int"
        )
    if kinds - integer_kinds - set("OSU"):  # neither objects nor strings of bytes or characters
        raise UserError(f"{dataset} has classes or clients that are neither integers nor words; convert them to text")
    if kinds & integer_kinds:
        raise UserError("the training labels and the test labels differ in type; expected words in both or integers")
    words = {split: np.asarray(values).astype(str) for split, values in splits.items()}
    distinct = np.unique(np.concatenate([values.ravel() for values in words.values()]))
    names = distinct.tolist() if classes is None else [str(name) for name in classes]
    for word in distinct:
        if word not in names:
            raise one_of("class", word, names, owner=dataset)
    class_of_distinct = np.array([names.index(word) for word in distinct])
    numbers = {split: class_of_distinct[np.searchsorted(distinct, values)] for split, values in words.items()}
    return [torch.from_numpy(numbers[split]) if split in numbers else None for split in (0, 1)], names


def as_native(values: Any) -> torch.Tensor | npt.NDArray[Any]:
    """Return a tensor on the CPU, without its graph, or an array that torch supports.

    Such an array is in native byte order, has no negative strides and is writable. Only memory maps and arrays of more
    than a quarter of the memory may be read-only, since torch can share their memory.

    Raises a ``UserError`` if examples differ in shape, if values are masked, or if ``values`` is a single value.
    """
    if np.ma.is_masked(values):
        raise UserError("the array has masked values; replace them with .filled(value)")
    try:
        array = values if isinstance(values, torch.Tensor) else np.asarray(values)
    except ValueError as error:
        raise UserError(f"examples differ in shape ({error}); expected one shape") from error
    if not array.ndim:
        raise UserError(f"expected an array with one entry per example, but got the single value {values!r}")
    if isinstance(array, torch.Tensor):
        if array.layout != torch.strided or array.is_complex():
            kind = "complex" if array.is_complex() else "sparse"
            raise UserError(f"expected dense real tensors, but got a {kind} one; convert it first")
        return (array.detach() if array.requires_grad else array).cpu()
    if array.dtype == np.longdouble:
        return array.astype(np.float64)
    if not array.dtype.isnative:
        return array.astype(array.dtype.newbyteorder("="))
    is_reversed = any(stride < 0 for stride in array.strides)
    is_read_only = not (array.flags.writeable or _is_mapped(array)) and fits_in_memory(array.nbytes)
    return array.copy() if is_reversed or is_read_only else array


def _is_mapped(array: npt.NDArray[Any]) -> bool:
    """Whether an array is, or is a view of, a memory map."""
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    return isinstance(base, mmap)


def _dtype_kind(values: torch.Tensor | npt.NDArray[Any]) -> str:
    """Return numpy's letter for the type of ``values``: f for floats; i, u and b for integers; others for words."""
    if isinstance(values, torch.Tensor):
        return "f" if values.is_floating_point() else "i"
    return values.dtype.kind


def _comparable_type(values: torch.Tensor | npt.NDArray[Any]) -> str:
    """Return the kind of ``values``, which all clients must share: ``float``, ``integer``, ``word`` or a dtype."""
    if isinstance(values, torch.Tensor):  # inputs
        return "float" if values.is_floating_point() else str(values.dtype)
    return {"f": "float", "b": "integer", "i": "integer", "u": "integer"}.get(values.dtype.kind, "word")


def _are_regression_targets(*splits: Any) -> bool:
    """Whether targets are numbers to predict: at least one split has floats, and every split has numbers."""
    kinds = {_dtype_kind(values) for values in map(as_native, splits) if len(values)}
    return "f" in kinds and kinds <= set(NUMERIC_KINDS)


def _are_multi_labels(*splits: Any) -> bool:
    """Whether the targets of every split are multi-label: [n, labels], integers or booleans, all of them 0 or 1."""
    arrays = [np.asarray(as_native(values)) for values in splits]
    return all(array.ndim == 2 and array.dtype.kind in "biu" and np.isin(array, (0, 1)).all() for array in arrays)


def _to_masks(targets: Any) -> torch.Tensor:
    """Convert masks [n, height, width] to a new uint8 tensor, after checking that all class ids are 0 to 255."""
    ids = torch.as_tensor(as_native(targets))
    if ids.is_floating_point() or (ids.numel() and (int(ids.min()) < 0 or int(ids.max()) > IGNORED)):
        raise UserError(f"masks contain invalid ids; expected integers from 0 to {IGNORED} ({IGNORED}: ignored pixels)")
    return ids.to(torch.uint8).clone()


def numeric_tensor(values: Any, name: str) -> torch.Tensor:
    """Convert inputs of the dataset ``name`` to a tensor; raises a ``UserError`` unless they are numbers."""
    native = as_native(values)
    if not isinstance(native, torch.Tensor) and native.dtype.kind not in NUMERIC_KINDS:
        raise UserError(f"the inputs of {name} are of type {native.dtype}; expected numbers")
    return torch.as_tensor(native)


def _to_inputs(values: Array, name: str) -> torch.Tensor:
    """Convert inputs to a CPU tensor of a supported type (uint8, float32, float64 or integers).

    Memory-mapped files stay mapped, and grey images [n, height, width] get a channel dimension.

    Args:
        values: images, vectors or token sequences, with one example per row.
        name: name of the dataset, for messages.
    """
    path = _mapped_file(values)
    inputs = numeric_tensor(values, name) if path is None else open_mapped(path)
    if inputs.dtype == torch.uint8 and inputs.ndim == 3:
        with_channel = inputs.unsqueeze(1)
        inputs = MappedTensor.of(with_channel, inputs.path) if isinstance(inputs, MappedTensor) else with_channel
    if inputs.ndim == 4 and not inputs.is_floating_point() and inputs.dtype != torch.uint8:
        raise UserError(f"the images of {name} are {inputs.dtype}; expected uint8 from 0 to 255, or float32")
    if not inputs.is_floating_point() and inputs.dtype not in (torch.bool, torch.uint8, torch.int32, torch.int64):
        inputs = inputs.long()  # embeddings accept no other integers
    # float64 stays for engine.precision=float64; other runs round each batch to float32.
    if inputs.dtype == torch.bool or (inputs.is_floating_point() and inputs.dtype not in FLOATS):
        inputs = inputs.float()
    return inputs if isinstance(inputs, MappedTensor) else inputs.contiguous()


def _mapped_file(values: Any) -> Path | None:
    """Return the ``.npy`` file of a memory map of that whole file; None for other arrays, slices and changed copies."""
    if not isinstance(values, np.memmap) or not str(values.filename).endswith(".npy"):
        return None
    is_whole_file = isinstance(values.base, mmap)  # the base of a slice is another array
    is_unmodified = values.mode != "c"  # changes to a copy-on-write map exist in memory only
    return Path(str(values.filename)) if is_whole_file and is_unmodified and values.dtype.isnative else None


def _infer_kind(name: str, inputs: torch.Tensor) -> Kind:
    """Infer the kind of a dataset without masks from its inputs [n, ...]; ``name`` is for messages."""
    if inputs.ndim == 4:
        if inputs.shape[1] not in IMAGE_CHANNELS and inputs.shape[3] in IMAGE_CHANNELS:
            raise UserError(
                f"the images of {name} have shape {tuple(inputs.shape[1:])}; expected channels first, "
                "[n, C, H, W]: inputs.transpose(0, 3, 1, 2)"
            )
        return "image"
    if inputs.dtype == torch.uint8:
        raise UserError(
            f"the uint8 inputs of {name} have shape {tuple(inputs.shape)}; expected images [n, C, H, W] or [n, H, W]"
        )
    return "vector" if inputs.is_floating_point() else "text"


def _to_pair(pair: Any, owner: str) -> tuple[torch.Tensor, npt.NDArray[Any]]:
    """Convert a pair (inputs, targets) to a tensor and an array, whose targets may be words, of equal length above 0.

    Args:
        pair: two arrays, or anything that numpy or torch can convert; or a torch dataset of such pairs, read once.
        owner: whose data it is, for messages, e.g. ``client 3``.
    """
    try:
        if isinstance(pair, torch.utils.data.Dataset):
            items, labels = zip(*(pair[index] for index in range(len(pair))), strict=True)  # type: ignore[arg-type]
            pair = torch.stack([torch.as_tensor(as_native(each)) for each in items]), labels
        values, labels = pair
        inputs, targets = torch.as_tensor(as_native(values)), np.asarray(as_native(labels))
    except UserError as error:
        raise UserError(f"{owner} is not a pair (inputs, targets): {error}") from None
    except (TypeError, ValueError, RuntimeError):
        raise UserError(f"{owner} is not a pair (inputs, targets); expected two arrays of equal length") from None
    if len(inputs) != len(targets) or not len(inputs):
        shapes = " and ".join(str(tuple(values.shape)) for values in (inputs, targets))
        raise UserError(f"{owner} has inputs and targets of shapes {shapes}; expected equal lengths of at least 1")
    return inputs, targets
