"""The inputs that a run began with: hashes of data, partition, initial weights and user objects, and statistics."""

from __future__ import annotations

import hashlib
import re
import warnings
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fedflat.data import Dataset, Partition
from fedflat.data.partitioners.partitioner import MAX_COUNTED_TOKENS
from fedflat.data.scaling import renormalise
from fedflat.errors import UserError
from fedflat.experiment.store.files import DamagedFile
from fedflat.experiment.store.run_folder import RunFolder

FINGERPRINTS_KEY = "own"
"""Key in ``partition.json`` for the fingerprints of the data, initial weights, user-supplied model and task."""
INIT_KEY = "init"
"""Key of the SHA-256 of the file of initial weights (``config.init``) among the fingerprints."""
METADATA_KEY = "data"
"""Key in ``partition.json`` for the metadata of the dataset."""


class ChangedInputs(UserError):
    """The inputs of a run are not those that it began with."""


def provenance(
    partition: Partition, data: Dataset, user_objects: Mapping[str, Any], init: Path | None
) -> dict[str, Any]:
    """The content of ``partition.json``: descriptions of partition and data, fingerprints of all inputs.

    ``init`` is the file of initial weights, if any.
    """
    return {
        **partition.describe(data.train.targets.cpu(), data.num_classes),
        FINGERPRINTS_KEY: fingerprints({**user_objects, "data": data}, init),
        METADATA_KEY: input_metadata(data),
    }


def input_metadata(data: Dataset) -> dict[str, list[Any]]:
    """What a program needs to prepare inputs and read outputs: input shape and columns, classes and statistics."""
    names = ("input_shape", "columns", "classes", "mean", "std", "target_mean", "target_std")
    metadata = {name: list(getattr(data, name)) for name in names}
    if data.train.targets.ndim == 2 and data.num_classes > MAX_COUNTED_TOKENS:
        metadata["classes"] = []  # a vocabulary, which the tokeniser knows
    return metadata


def recorded_metadata(folder: RunFolder) -> dict[str, Any]:
    """The metadata of the dataset that a run was trained on; empty, with a warning, if the run did not record it."""
    try:
        return dict(folder.partition()[METADATA_KEY])
    except (DamagedFile, KeyError, TypeError, ValueError):
        warnings.warn(
            f"the run in {folder.path} has no record of its data's statistics; the exported file leaves them out",
            stacklevel=3,
        )
        return {}


def fingerprints(user_objects: Mapping[str, Any], init: Path | None = None) -> dict[str, str]:
    """Fingerprints of ``data``, ``model`` and ``task``, unless they are None; the same in every process.

    With the file ``init`` of initial weights, its SHA-256 is added, unless the file cannot be read.
    """
    values = {name: fingerprint(value) for name, value in user_objects.items() if value is not None}
    if init is not None:
        with suppress(OSError), init.open("rb") as file:
            values[INIT_KEY] = hashlib.file_digest(file, "sha256").hexdigest()
    return values


def require_same_inputs(folder: RunFolder, current: Mapping[str, str], partition: str | None = None) -> None:
    """Raise ``ChangedInputs`` if a run began with other inputs.

    Args:
        folder: the run's folder.
        current: fingerprints of the data and of the initial weights, if known, and of the user-supplied model and task.
        partition: hash of the partition, if the run is to be resumed; None if it is only read, which needs no
            partition and no client state.
    """
    try:
        recorded = folder.partition()
    except DamagedFile as error:
        if partition is not None:
            raise
        warnings.warn(f"cannot check the inputs of the run: {error}", stacklevel=2)
        return
    previous = recorded.get(FINGERPRINTS_KEY, current)  # nothing to compare with if the run recorded no fingerprints
    for name in ("model", "task"):
        if previous.get(name) != current.get(name):
            raise ChangedInputs(
                f"the run in {folder.path} began with {_describe(name, previous)}, "
                f"but this is {_describe(name, current)}; pass the same {name}= again, or choose another folder"
            )
    remedy = "or choose another --out" if partition is None else folder.remedy
    if _differ(previous.get("data"), current.get("data")):
        change = _describe_change(folder, previous["data"], current["data"])
        raise ChangedInputs(f"{change}; restore them (if passed in Python: the same dataset=), {remedy}")
    if _differ(previous.get(INIT_KEY), current.get(INIT_KEY)):
        raise changed_weights(folder, remedy)
    if partition is None:
        return
    if folder.has_real_sites:
        raise UserError(
            f"the clients of the run in {folder.path} are real sites, which hold its data and state; "
            f"continue with {folder.resume_command}"
        )
    if recorded.get("hash", partition) != partition:
        raise ChangedInputs(
            f"the clients of the run in {folder.path} began with other examples: the partition has changed since; "
            f"restore the data and the partition, {folder.remedy}"
        )


def changed_weights(folder: RunFolder, remedy: str) -> ChangedInputs:
    """The error for a run whose file of initial weights is not the one that it began with; ``remedy`` ends it."""
    file = folder.config().init
    problem = "have changed" if file and file.exists() else "have been removed"
    return ChangedInputs(
        f"the initial weights {file} {problem} since the run in {folder.path} began; restore that file, {remedy}"
    )


def recorded_fingerprints(folder: RunFolder) -> dict[str, str]:
    """The fingerprints of the inputs that a run began with, as far as they are known."""
    try:
        return dict(folder.partition().get(FINGERPRINTS_KEY, {}))
    except DamagedFile:
        return {}


def recorded_data(folder: RunFolder) -> str | None:
    """The fingerprint of the data that a run began with; None if it is unknown."""
    return recorded_fingerprints(folder).get("data")


def normalise_as_in_training(folder: RunFolder, data: Dataset) -> Dataset:
    """Return ``data`` normalised with a run's statistics, to measure models of that run.

    Warns if the run was trained on other data. If the run's statistics are unknown or do not fit, ``data`` is returned
    unchanged.
    """
    try:
        normalised = renormalise(data, folder.partition()[METADATA_KEY])
    except (DamagedFile, KeyError, TypeError, ValueError):
        normalised = None
    previous, current = recorded_data(folder), data.fingerprint()
    if _differ(previous, current):
        statistics = "its own statistics" if normalised is None else "the run's statistics"
        change = _describe_change(folder, previous, current)
        warnings.warn(f"{change}; values refer to the new data, normalised with {statistics}", stacklevel=3)
    return data if normalised is None else normalised


def _differ(previous: str | None, current: str | None) -> bool:
    """Whether two fingerprints are known and differ."""
    return None not in (previous, current) and previous != current


def _describe_change(folder: RunFolder, previous: str | None, current: str | None) -> str:
    """Say that the data of a run have changed, for messages."""
    dataset = folder.config().data.dataset
    return f"the data of {dataset} have changed since the run in {folder.path} began (hash {previous}, now {current})"


def fingerprint(value: Any) -> str:
    """A textual fingerprint of an object: its class and content, independent of memory addresses.

    >>> fingerprint(partial(max, key=len))
    'max(key=len)'
    """
    if isinstance(value, str | int | float | bool | None):
        return repr(value)
    if isinstance(value, torch.Tensor):
        return f"Tensor({_digest([repr(value.dtype).encode(), repr(tuple(value.shape)).encode(), _bytes(value)])})"
    if isinstance(value, Dataset):
        return value.fingerprint()
    if isinstance(value, nn.Module):
        return _model_fingerprint(value)
    if isinstance(value, partial):
        return _call(fingerprint(value.func), {**dict(enumerate(value.args)), **value.keywords})
    if isinstance(value, np.ndarray):
        return f"array({_digest([fingerprint(value.tolist()).encode()])})"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(fingerprint, value))}]"
    if isinstance(value, set | frozenset):  # its order differs between processes
        return f"{{{', '.join(sorted(map(fingerprint, value)))}}}"
    if isinstance(value, dict):
        return _call("", value)
    if hasattr(value, "__qualname__"):  # a function or a class
        return str(value.__qualname__)
    if is_dataclass(value):
        return _call(type(value).__qualname__, {field.name: getattr(value, field.name) for field in fields(value)})
    if hasattr(value, "__dict__"):
        return _call(type(value).__qualname__, vars(value))
    return re.sub(" at 0x[0-9a-f]+", "", repr(value))  # without its memory address


def _call(name: str, arguments: Mapping[Any, Any]) -> str:
    """Write a fingerprint in the form of a call: ``name(key=fingerprint, ...)``."""
    return f"{name}({', '.join(f'{key}={fingerprint(value)}' for key, value in arguments.items())})"


def _describe(name: str, object_fingerprints: Mapping[str, str]) -> str:
    """Describe a user-supplied object, e.g. the model, by its fingerprint, or say that there is none; for messages."""
    if name not in object_fingerprints:
        return f"no user-supplied {name}"
    return f"{name} {object_fingerprints[name]}"


def _model_fingerprint(model: nn.Module) -> str:
    """Fingerprint of the architecture: layers and shapes. It leaves out weights, which differ between instances."""
    layers = [f"{name} {type(layer).__name__}" for name, layer in model.named_modules()]
    shapes = [f"{name} {tuple(parameter.shape)}" for name, parameter in model.named_parameters()]
    return f"{type(model).__name__} {_digest(line.encode() for line in layers + shapes)}"


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _digest(pieces: Iterable[bytes]) -> str:
    """The first 12 hexadecimal digits of a SHA-256 hash."""
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()[:12]
