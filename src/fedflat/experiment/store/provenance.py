"""The inputs of a run that its config does not determine: the partition's hash and user-supplied objects."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from fedflat.data import Dataset, Examples, Partition
from fedflat.errors import UserError
from fedflat.experiment.store.run_folder import RunFolder

OWN = "own"
"""Key in ``partition.json`` for the fingerprints of user-supplied objects."""
MOST_BYTES, SAMPLED = 2**26, 1000
"""Larger inputs are fingerprinted by this many examples."""
ARGUMENTS = {"data": "dataset"}
"""The argument of ``fedflat.resume`` for an object, where it is called something else."""


def provenance(partition: Partition, data: Dataset, own: Mapping[str, Any]) -> dict[str, Any]:
    """The content of ``partition.json``: the partition's description and the user-supplied objects' fingerprints."""
    return {**partition.describe(data.train.targets.cpu(), data.num_classes), OWN: fingerprints(own)}


def fingerprints(own: Mapping[str, Any]) -> dict[str, str]:
    """Fingerprints of the user-supplied ``data``, ``model`` and ``task``, the same in every process."""
    kinds: dict[str, Callable[[Any], str]] = {"data": _data, "model": _model, "task": fingerprint}
    return {name: kinds[name](value) for name, value in own.items() if value is not None}


def require_same_inputs(folder: RunFolder, now: Mapping[str, str], partition: str | None = None) -> None:
    """Refuse to use a run that began with other inputs.

    Args:
        folder: the run's folder.
        now: fingerprints of the objects supplied now.
        partition: hash of the partition, if the run is to be resumed.
    """
    begun = folder.partition()
    before = begun.get(OWN, now)
    for name in (*before, *now):
        if before.get(name) != now.get(name):
            raise UserError(
                f"the run in {folder.path} began with {_named(name, before)}, but this is {_named(name, now)}; "
                f"pass the same {ARGUMENTS.get(name, name)}= again, or choose another folder"
            )
    if partition is not None and folder.is_of_sites:
        raise UserError(
            f"the clients of the run in {folder.path} are real sites, which hold its data and state; "
            f"continue with {folder.goes_on}"
        )
    if partition is not None and begun.get("hash", partition) != partition:
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
        return _model(value)
    if isinstance(value, partial):
        positional = dict(zip(map(str, range(len(value.args))), value.args, strict=True))
        return _call(fingerprint(value.func), {**positional, **value.keywords})
    if isinstance(value, list | tuple | set | frozenset):
        return f"[{', '.join(map(fingerprint, value))}]"
    if isinstance(value, dict):
        return _call("", value)
    if hasattr(value, "__qualname__"):
        return str(value.__qualname__)
    if is_dataclass(value):
        return _call(type(value).__qualname__, {field.name: getattr(value, field.name) for field in fields(value)})
    return _call(type(value).__qualname__, getattr(value, "__dict__", {}))


def _call(name: str, arguments: Mapping[Any, Any]) -> str:
    return f"{name}({', '.join(f'{key}={fingerprint(value)}' for key, value in arguments.items())})"


def _named(name: str, prints: Mapping[str, str]) -> str:
    return f"{name} {prints[name]}" if name in prints else f"no user-supplied {name}"


def _data(data: Dataset) -> str:
    return f"{data.name} {_digest(piece for examples in (data.train, data.test) for piece in _pieces(examples))}"


def _model(model: nn.Module) -> str:
    """Fingerprint of the architecture: layers and shapes, but not weights, which differ between instances."""
    layers = [f"{name} {type(layer).__name__}" for name, layer in model.named_modules()]
    shapes = [f"{name} {tuple(parameter.shape)}" for name, parameter in model.named_parameters()]
    return f"{type(model).__name__} {_digest(line.encode() for line in layers + shapes)}"


def _pieces(examples: Examples) -> Iterator[bytes]:
    large = examples.inputs.numel() * examples.inputs.element_size() > MOST_BYTES
    positions = torch.linspace(0, len(examples) - 1, SAMPLED).long() if large else torch.arange(len(examples))
    yield str(len(examples)).encode()
    for name, tensor in examples.take(positions).tensors().items():
        yield f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode()
        yield _bytes(tensor)


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _digest(pieces: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()[:12]
