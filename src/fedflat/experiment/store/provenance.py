"""The inputs that a run began with: partition hash, fingerprints of user-supplied objects, statistics of the data."""

from __future__ import annotations

import hashlib
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from fedflat.data import Dataset, Examples, Partition
from fedflat.data.partitioners.partitioner import MAX_COUNTED_TOKENS
from fedflat.errors import UserError
from fedflat.experiment.store.files import DamagedFile
from fedflat.experiment.store.run_folder import RunFolder

FINGERPRINTS_KEY = "own"
"""Key in ``partition.json`` for the fingerprints of user-supplied objects."""
METADATA_KEY = "data"
"""Key in ``partition.json`` for the metadata of the dataset."""
MAX_HASHED_BYTES, SAMPLED_EXAMPLES = 2**26, 1000
"""Inputs larger than 64 MiB are fingerprinted by 1000 of their examples."""
ARGUMENTS = {"data": "dataset"}
"""The argument of ``fedflat.resume`` for an object, where it differs from the object's name here."""


def provenance(partition: Partition, data: Dataset, user_objects: Mapping[str, Any]) -> dict[str, Any]:
    """The content of ``partition.json``: descriptions of partition and data, fingerprints of user-supplied objects."""
    return {
        **partition.describe(data.train.targets.cpu(), data.num_classes),
        FINGERPRINTS_KEY: fingerprints(user_objects),
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


def fingerprints(user_objects: Mapping[str, Any]) -> dict[str, str]:
    """Fingerprints of the user-supplied ``data``, ``model`` and ``task``, the same in every process."""
    functions: dict[str, Callable[[Any], str]] = {
        "data": _dataset_fingerprint,
        "model": _model_fingerprint,
        "task": fingerprint,
    }
    return {name: functions[name](value) for name, value in user_objects.items() if value is not None}


def require_same_inputs(folder: RunFolder, current: Mapping[str, str], partition: str | None = None) -> None:
    """Raise a ``UserError`` if a run began with other inputs.

    Args:
        folder: the run's folder.
        current: fingerprints of the user-supplied objects.
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
    for name in (*previous, *current):
        if previous.get(name) != current.get(name):
            raise UserError(
                f"the run in {folder.path} began with {_describe(name, previous)}, "
                f"but this is {_describe(name, current)}; "
                f"pass the same {ARGUMENTS.get(name, name)}= again, or choose another folder"
            )
    if partition is None:
        return
    if folder.has_real_sites:
        raise UserError(
            f"the clients of the run in {folder.path} are real sites, which hold its data and state; "
            f"continue with {folder.resume_command}"
        )
    if recorded.get("hash", partition) != partition:
        raise UserError(
            f"the clients of the run in {folder.path} began with other examples: the data have changed since; "
            f"restore them, {folder.remedy}"
        )


def fingerprint(value: Any) -> str:
    """A textual fingerprint of an object: its class and content, independent of memory addresses.

    >>> fingerprint(partial(max, key=len))
    'max(key=len)'
    """
    if isinstance(value, str | int | float | bool | None):
        return repr(value)
    if isinstance(value, torch.Tensor):
        return f"Tensor({_digest([repr(value.dtype).encode(), repr(tuple(value.shape)).encode(), _bytes(value)])})"
    if isinstance(value, nn.Module):
        return _model_fingerprint(value)
    if isinstance(value, partial):
        return _call(fingerprint(value.func), {**dict(enumerate(value.args)), **value.keywords})
    if isinstance(value, list | tuple | set | frozenset):
        return f"[{', '.join(map(fingerprint, value))}]"
    if isinstance(value, dict):
        return _call("", value)
    if hasattr(value, "__qualname__"):  # a function or a class
        return str(value.__qualname__)
    if is_dataclass(value):
        return _call(type(value).__qualname__, {field.name: getattr(value, field.name) for field in fields(value)})
    return _call(type(value).__qualname__, getattr(value, "__dict__", {}))


def _call(name: str, arguments: Mapping[Any, Any]) -> str:
    """Write a fingerprint in the form of a call: ``name(key=fingerprint, ...)``."""
    return f"{name}({', '.join(f'{key}={fingerprint(value)}' for key, value in arguments.items())})"


def _describe(name: str, object_fingerprints: Mapping[str, str]) -> str:
    """Describe a user-supplied object, e.g. the model, by its fingerprint, or say that there is none; for messages."""
    if name not in object_fingerprints:
        return f"no user-supplied {name}"
    return f"{name} {object_fingerprints[name]}"


def _dataset_fingerprint(data: Dataset) -> str:
    return f"{data.name} {_digest(itertools.chain(_content(data.train), _content(data.test)))}"


def _model_fingerprint(model: nn.Module) -> str:
    """Fingerprint of the architecture: layers and shapes. It leaves out weights, which differ between instances."""
    layers = [f"{name} {type(layer).__name__}" for name, layer in model.named_modules()]
    shapes = [f"{name} {tuple(parameter.shape)}" for name, parameter in model.named_parameters()]
    return f"{type(model).__name__} {_digest(line.encode() for line in layers + shapes)}"


def _content(examples: Examples) -> Iterator[bytes]:
    """The bytes that identify a split: its size, and the tensors of all examples or of an even sample."""
    if examples.inputs.nbytes > MAX_HASHED_BYTES:
        positions = torch.linspace(0, len(examples) - 1, SAMPLED_EXAMPLES).long()
    else:
        positions = torch.arange(len(examples))
    yield str(len(examples)).encode()
    for name, tensor in examples.take(positions).tensors().items():
        yield f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode()
        yield _bytes(tensor)


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _digest(pieces: Iterable[bytes]) -> str:
    """The first 12 hexadecimal digits of a SHA-256 hash."""
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()[:12]
