"""A user's own arrays in files: an ``.npz``, a folder of ``.npy`` files, or parquet.

The arrays are called ``train_inputs``, ``train_targets``, ``test_inputs`` and ``test_targets`` (or ``x_train``, ``y_train`` and so on),
with ``train_groups`` and ``test_groups`` where examples have natural clients, ``classes`` where classes have names, and ``mean`` and
``std`` where these are known. Without the test arrays, ``inputs`` and ``targets`` will do: every fifth example of a class is then a test
example.
"""

from __future__ import annotations

import shutil
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedflat.data.arrays import from_arrays, native
from fedflat.data.cache import entry, fingerprint, fits_in_memory, rows_of
from fedflat.data.dataset import Dataset
from fedflat.data.images import TEST_EVERY
from fedflat.data.mapped import open_mapped
from fedflat.data.sources.source import Source
from fedflat.errors import UserError
from fedflat.text import param

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
}
Arrays = Mapping[str, Any]


@dataclass(frozen=True)
class ArrayFileOptions:
    """Where the arrays lie."""

    path: str = param(
        "",
        "an .npz file, a folder of .npy files, a parquet file, or a folder with train.parquet and test.parquet",
        path=True,
    )
    target: str = param("target", "parquet: the column of classes")
    group: str = param("group", "parquet: the column of natural clients, if there is one")
    shape: str = param("", "parquet: the shape of an example such as 3x32x32, where inputs are flat lists")


@dataclass(frozen=True)
class ArrayFiles(Source):
    """Arrays in files: in memory where they fit, mapped where they do not."""

    options: ArrayFileOptions = field(default=ArrayFileOptions(), kw_only=True)

    def read(self, folder: Path) -> Dataset:
        """The dataset."""
        if not self.options.path:
            raise UserError(f"{self.name} needs to know where the arrays are; write {self.name}(path=FILE)")
        path = Path(self.options.path).expanduser().absolute()
        if path.suffix == ".npz" and path.is_file():
            found = _from_npz(path, folder)
        elif path.suffix == ".parquet" or (path.is_dir() and any(path.glob("*.parquet"))):
            from fedflat.data.sources.parquet import read_parquet

            found = read_parquet(path, self.options.target, self.options.group, self.options.shape)
        elif path.is_dir():
            found = {file.stem: _from_npy(file) for file in sorted(path.glob("*.npy"))}
        else:
            raise UserError(
                f"{path} is not there or of no known kind; expected an .npz, a .parquet, or a folder of .npy or .parquet files"
            )
        return dataset_of_arrays(self.text, found, path, folder)


def dataset_of_arrays(name: str, found: Arrays, path: Path, folder: Path) -> Dataset:
    """A dataset of named arrays; where none is for testing, every fifth of a class is."""
    arrays: dict[str, Any] = {
        wanted: next((found[n] for n in (wanted, *others) if n in found), None) for wanted, others in ALIASES.items()
    }
    for wanted in ("train_inputs", "train_targets"):
        if arrays[wanted] is None:
            raise UserError(
                f"{path} has no array {wanted}, only {', '.join(found) or 'none at all'}; expected train_inputs and train_targets"
            )
    if (arrays["test_inputs"] is None) != (arrays["test_targets"] is None):
        lacking = "test_inputs" if arrays["test_inputs"] is None else "test_targets"
        raise UserError(
            f"{path} has no array {lacking}, only {', '.join(found)}; expected both test_inputs and test_targets, or neither"
        )
    if arrays["test_inputs"] is None:
        arrays |= _held_out(arrays, folder)
    for what, kind in (("classes", str), ("mean", float), ("std", float)):
        arrays[what] = None if arrays[what] is None else [kind(value) for value in arrays[what]]
    return from_arrays(**arrays, name=name)


def every_fifth(targets: Any) -> np.ndarray:
    """Which examples are for testing: every fifth of each class."""
    labels = np.asarray(targets)
    labels = labels if labels.ndim == 1 else np.zeros(len(labels))
    is_test = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        is_test[np.flatnonzero(labels == label)[TEST_EVERY - 1 :: TEST_EVERY]] = True
    return is_test


def _held_out(arrays: dict[str, Any], folder: Path) -> dict[str, Any]:
    is_test = every_fifth(arrays["train_targets"])
    cut: dict[str, Any] = {}
    for part, rows in (("train", np.flatnonzero(~is_test)), ("test", np.flatnonzero(is_test))):
        cut[f"{part}_inputs"] = rows_of(torch.as_tensor(native(arrays["train_inputs"])), rows, folder, f"arrays-{part}")
        for what in ("targets", "groups"):
            values = arrays[f"train_{what}"]
            cut[f"{part}_{what}"] = None if values is None else np.asarray(values)[rows]
    return cut


def _from_npy(file: Path, remedy: str = "write it again with numpy.save") -> Any:
    """An array in a file: numbers are mapped; words, and numbers in another machine's byte order, are read."""
    try:
        array = np.load(file, mmap_mode="r")
        return open_mapped(file) if array.dtype.kind in "biuf" and array.dtype.isnative else np.array(array)
    except (OSError, ValueError, EOFError) as error:
        raise UserError(f"{file} is not a whole .npy file of numbers or words ({error}); {remedy}") from error


def _from_npz(path: Path, folder: Path) -> Arrays:
    """The arrays of an ``.npz``; what does not fit in memory is unpacked into the cache, byte by byte, and mapped."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = {Path(info.filename).stem: info for info in archive.infolist() if info.filename.endswith(".npy")}
            if fits_in_memory(sum(info.file_size for info in members.values())):
                with np.load(path) as arrays:
                    return {name: arrays[name] for name in members}

            def unpack(side: Path) -> None:
                for name, info in members.items():
                    with archive.open(info) as stream, (side / f"{name}.npy").open("wb") as out:
                        shutil.copyfileobj(stream, out)

            stamp = path.stat()
            key = fingerprint((path, stamp.st_size, stamp.st_mtime_ns))
            kept = entry(folder, "arrays", key, unpack)
            return {
                name: _from_npy(kept / f"{name}.npy", f"delete {kept}, and it will be made again") for name in members
            }
    except (OSError, ValueError, zipfile.BadZipFile, EOFError) as error:
        raise UserError(
            f"{path} is not a whole .npz file of numbers ({error}); write it again with numpy.savez"
        ) from error


ARRAYS = ArrayFiles("arrays", "your own arrays, .npz, .npy or parquet")
