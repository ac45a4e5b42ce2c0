"""User data: arrays in an ``.npz`` file, a folder of ``.npy`` files, or a table (parquet, CSV).

Array names: ``train_inputs``, ``train_targets``, ``test_inputs``, ``test_targets`` (or ``x_train``, ``y_train``, ...);
optionally ``train_groups`` and ``test_groups`` (natural clients), ``classes``, ``mean``, ``std``, ``target_mean`` and
``target_std``. With only ``inputs`` and ``targets``, every fifth example of each class is a test example; without
classes, every fifth example.
"""

from __future__ import annotations

import shutil
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedflat.data.arrays import NUMERIC_KINDS, as_native, from_arrays, numeric_tensor
from fedflat.data.dataset import Dataset, every_fifth
from fedflat.data.files.cache import cache_entry, fingerprint, fits_in_memory, select_rows
from fedflat.data.files.mapped import open_mapped
from fedflat.data.scaling import standardise
from fedflat.data.sources.source import DatasetSource
from fedflat.errors import UserError, missing_file
from fedflat.text import absolute_path, param

SUFFIXES = (".npz", ".parquet", ".csv")
"""A dataset text with one of these suffixes is the path of a file."""
ALIASES = {
    "train_inputs": ("x_train", "train_x", "train_images", "inputs", "x", "images"),
    "train_targets": ("y_train", "train_y", "train_labels", "targets", "y", "labels"),
    "test_inputs": ("x_test", "test_x", "test_images"),
    "test_targets": ("y_test", "test_y", "test_labels"),
    "train_groups": ("groups_train", "groups"),
    "test_groups": ("groups_test",),
    "classes": ("class_names",),
    "mean": (),
    "std": (),
    "target_mean": (),
    "target_std": (),
}
TABLE_OPTIONS = ("target", "group", "shape", "drop")
"""Options that name columns of a table; arrays have fixed names instead."""
NamedArrays = Mapping[str, Any]


@dataclass(frozen=True)
class ArrayFileOptions:
    """Location of the arrays."""

    path: str = param(
        "",
        "an .npz, .parquet or .csv file, a folder of .npy files, or a folder with train.parquet and test.parquet",
        path=True,
        positional=True,
    )
    target: str = param("target", "for .parquet and .csv: column of classes or numbers; several as a|b")
    group: str = param("group", "for .parquet and .csv: name of the column of natural clients; group may be absent")
    shape: str = param("", "for .parquet and .csv: shape of an example such as 3x32x32, if inputs are flat")
    drop: str = param("", "for .parquet and .csv: column to leave out of the inputs; several as a|b")
    standardise: bool = param(
        False,
        "subtract the training examples' mean from inputs and numbers to predict, divide by their standard deviation; "
        "arrays mean, std, target_mean and target_std replace these statistics",
    )


@dataclass(frozen=True)
class ArrayFiles(DatasetSource):
    """Arrays are read into memory if they fit, and memory-mapped otherwise."""

    options: ArrayFileOptions = field(default=ArrayFileOptions(), kw_only=True)

    def read(self, data_dir: Path) -> Dataset:
        return self._read(data_dir, numbers=False)

    def read_numbers(self, data_dir: Path) -> Dataset:
        return self._read(data_dir, numbers=True)

    def _read(self, data_dir: Path, numbers: bool) -> Dataset:
        """Read the arrays in the format that the path suggests; with ``numbers``, integer targets become floats."""
        from fedflat.data.files.tables import is_table, read_table

        path, columns = absolute_path(self.path), ()
        expected = "an .npz, .parquet or .csv file, or a folder of .npy files"
        if not path.exists():
            raise missing_file(path, expected)
        if not is_table(path):
            self._reject_table_options(path)
        if path.suffix.lower() == ".npz" and path.is_file():
            arrays = _read_npz(path, data_dir)
        elif is_table(path):
            arrays = read_table(path, **{name: getattr(self.options, name) for name in TABLE_OPTIONS}, numbers=numbers)
            columns = arrays["columns"]
        elif path.is_dir():
            arrays = {file.stem: _read_npy(file) for file in sorted(path.glob("*.npy"))}
        else:
            raise UserError(f"{path} has an unknown format; expected {expected}")
        dataset = replace(dataset_of_arrays(self.text, arrays, path, data_dir, numbers), columns=tuple(columns))
        return standardise(dataset) if self.options.standardise else dataset

    def _reject_table_options(self, path: Path) -> None:
        """Raise a ``UserError`` if an option names a column, which arrays do not have."""
        for name in TABLE_OPTIONS:
            if getattr(self.options, name) != getattr(ArrayFileOptions(), name):
                raise UserError(
                    f"{name}= selects a column of a .parquet or .csv file, but {path} has arrays; remove {name}=. "
                    "Arrays are found by name: targets are in targets, and clients in groups"
                )


def dataset_of_arrays(name: str, arrays: NamedArrays, path: Path, data_dir: Path, numbers: bool = False) -> Dataset:
    """Build a dataset from arrays named like the arguments of ``from_arrays``, or by an alias such as ``x_train``.

    Without test arrays, every fifth example of each class becomes a test example.

    Args:
        name: canonical text of the dataset.
        arrays: the arrays by name or alias.
        path: where they come from, for messages.
        data_dir: directory whose cache holds copies of large arrays.
        numbers: whether integer targets are numbers to predict; they become floats.
    """
    arguments: dict[str, Any] = {}
    for argument, aliases in ALIASES.items():
        arguments[argument] = next((arrays[alias] for alias in (argument, *aliases) if alias in arrays), None)
    available = ", ".join(arrays) or "none"
    for required in ("train_inputs", "train_targets"):
        if arguments[required] is None:
            expected = "expected inputs and targets, or train_inputs, train_targets, test_inputs and test_targets"
            raise UserError(f"{path} has no array {required}; {expected}; it has: {available}")
    if (arguments["test_inputs"] is None) != (arguments["test_targets"] is None):
        missing = "test_inputs" if arguments["test_inputs"] is None else "test_targets"
        raise UserError(
            f"{path} has no array {missing}; expected both test_inputs and test_targets, or neither; "
            f"it has: {available}"
        )
    given_targets = [name for name in ("train_targets", "test_targets") if arguments[name] is not None]
    for split in given_targets if numbers else ():
        values = np.asarray(as_native(arguments[split]))
        if values.dtype.kind not in NUMERIC_KINDS:
            raise UserError(f"{path} has targets that are not numbers; regression (--task mse or huber) needs numbers")
        arguments[split] = values if values.dtype.kind == "f" else values.astype(np.float64)
    if arguments["test_inputs"] is None:
        columns = {column: arguments[f"train_{column}"] for column in ("inputs", "targets", "groups")}
        lengths = {name: len(as_native(values)) for name, values in columns.items() if values is not None}
        if len(set(lengths.values())) > 1:
            counts = ", ".join(f"{length} {name}" for name, length in lengths.items())
            raise UserError(f"{path} has {counts}; expected the same number of each")
        arguments |= _split_off_test_set(arguments, name, data_dir)
    return from_arrays(**arguments, name=name)


def _split_off_test_set(arrays: dict[str, Any], name: str, data_dir: Path) -> dict[str, Any]:
    """Divide training arrays into training and test arrays: every fifth example of each class is a test example.

    Args:
        arrays: ``train_inputs``, ``train_targets`` and ``train_groups``; the last may be None.
        name: name of the dataset, for messages.
        data_dir: directory whose cache holds copies of large arrays.

    Returns:
        Inputs, targets and groups of both splits, by name.
    """
    labels = np.asarray(as_native(arrays["train_targets"]))
    # Masks, sequences and numbers have no single class, so their examples are treated as one class.
    has_classes = labels.ndim == 1 and labels.dtype.kind != "f"
    is_test = every_fifth(labels if has_classes else np.zeros(len(labels)))
    inputs = numeric_tensor(arrays["train_inputs"], name)
    if not is_test.any():
        unit = " of a class" if has_classes else ""
        regression = "; to predict the targets as numbers, use --task mse" if labels.dtype.kind in "iu" else ""
        raise UserError(
            f"{name} has too few examples to test on every fifth{unit}; add examples or a test set{regression}"
        )
    splits: dict[str, Any] = {}
    for split, rows in (("train", np.flatnonzero(~is_test)), ("test", np.flatnonzero(is_test))):
        splits[f"{split}_inputs"] = select_rows(inputs, rows, data_dir, f"arrays-{split}")
        for column in ("targets", "groups"):
            values = arrays[f"train_{column}"]
            splits[f"{split}_{column}"] = None if values is None else np.asarray(values)[rows]
    return splits


def _read_npy(file: Path, remedy: str = "write it again with numpy.save") -> Any:
    """Map an array of numbers; read words and numbers in foreign byte order into memory.

    ``remedy`` is the advice in the error message for a damaged file.
    """
    try:
        array = np.load(file, mmap_mode="r")
        can_be_mapped = array.dtype.kind in NUMERIC_KINDS and array.dtype.isnative
        return open_mapped(file) if can_be_mapped else np.array(array)
    except Exception as error:  # numpy parses the header as Python code, so a damaged one raises almost any error
        raise UserError(f"{file} is not a complete .npy file of numbers or words ({error}); {remedy}") from error


def _read_npz(path: Path, data_dir: Path) -> NamedArrays:
    """Read the arrays of an ``.npz``; if they do not fit in memory, unpack them into the cache and map them."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = {Path(info.filename).stem: info for info in archive.infolist() if info.filename.endswith(".npy")}
            if fits_in_memory(sum(info.file_size for info in members.values())):
                with np.load(path) as arrays:
                    return {name: arrays[name] for name in members}

            def unpack(folder: Path) -> None:
                """Write every array of the archive to ``<name>.npy`` in ``folder``."""
                for name, info in members.items():
                    with archive.open(info) as stream, (folder / f"{name}.npy").open("wb") as out:
                        shutil.copyfileobj(stream, out)

            status = path.stat()
            entry = cache_entry(data_dir, "arrays", fingerprint((path, status.st_size, status.st_mtime_ns)), unpack)
            remedy = f"delete {entry} to have it rebuilt"
            return {name: _read_npy(entry / f"{name}.npy", remedy) for name in members}
    except UserError:
        raise
    except Exception as error:  # as for .npy files, and those of damaged archives
        remedy = "write it again with numpy.savez"
        if "Object arrays" in str(error):  # e.g. the strings of a pandas column
            remedy = f"convert these arrays with .astype(str), or to numbers, and {remedy}"
        raise UserError(f"{path} is not a complete .npz file of numbers or words ({error}); {remedy}") from error


ARRAYS = ArrayFiles("arrays", "your arrays in .npz, .npy, .parquet or .csv files", example="arrays(path=mine.npz)")
SOURCES = (ARRAYS,)
