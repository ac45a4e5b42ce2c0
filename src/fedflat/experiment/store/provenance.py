"""What a run was begun with that its config does not tell: which partition came of it, and what the user brought in Python."""

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
"""Where ``partition.json`` tells of what the user brought."""
MOST_BYTES, SAMPLED = 2**26, 1000
"""Of inputs larger than this, so many examples stand for all."""


def origin_of(partition: Partition, data: Dataset, own: Mapping[str, Any]) -> dict[str, Any]:
    """What ``partition.json`` keeps."""
    return {**partition.describe(data.train.targets.cpu(), data.num_classes), OWN: brought(own)}


def brought(own: Mapping[str, Any]) -> dict[str, str]:
    """The user's own data, model and task, each told apart from others by a few words that stay the same from process to process."""
    words: dict[str, Callable[[Any], str]] = {"data": _data, "model": _model, "task": described}
    return {name: words[name](what) for name, what in own.items() if what is not None}


def require_same_origin(folder: RunFolder, now: Mapping[str, str], partition: str | None = None) -> None:
    """Refuse a run that was begun with something else than is brought ``now``; ``partition`` is the hash of the partition, where one goes on.

    Runs of earlier versions did not tell.
    """
    begun = folder.partition()
    before = begun.get(OWN, now)
    for name in (*before, *now):
        if before.get(name) != now.get(name):
            raise UserError(
                f"the run in {folder.path} was begun with {_named(name, before)}, and this is {_named(name, now)}; "
                f"pass the same again ({name}=... in Python), or choose another folder"
            )
    if partition is not None and folder.is_of_sites:
        raise UserError(
            f"the run in {folder.path} is trained by real sites, where its clients' data and vectors lie; go on with {folder.goes_on}"
        )
    if partition is not None and begun.get("hash", partition) != partition:
        raise UserError(
            f"clients of the run in {folder.path} had other examples when it began: its data have changed since; "
            f"put them back as they were, {folder.anew}"
        )


def described(value: Any) -> str:
    """An object by its class and what it consists of, without where it lies in memory.

    >>> described(partial(max, key=len))
    'max(key=len)'
    """
    if isinstance(value, str | int | float | bool | None):
        return repr(value)
    if isinstance(value, torch.Tensor):
        return f"Tensor({_digest([repr(value.dtype).encode(), repr(tuple(value.shape)).encode(), _bytes(value)])})"
    if isinstance(value, nn.Module):
        return _model(value)
    if isinstance(value, partial):
        return _called(
            described(value.func),
            {**dict(zip(map(str, range(len(value.args))), value.args, strict=True)), **value.keywords},
        )
    if isinstance(value, list | tuple | set | frozenset):
        return f"[{', '.join(map(described, value))}]"
    if isinstance(value, dict):
        return _called("", value)
    if hasattr(value, "__qualname__"):
        return str(value.__qualname__)
    parts = (
        {field.name: getattr(value, field.name) for field in fields(value)}
        if is_dataclass(value)
        else getattr(value, "__dict__", {})
    )
    return _called(type(value).__qualname__, parts)


def _called(name: str, parts: Mapping[Any, Any]) -> str:
    return f"{name}({', '.join(f'{key}={described(part)}' for key, part in parts.items())})"


def _named(name: str, which: Mapping[str, str]) -> str:
    return f"{name} {which[name]}" if name in which else f"no {name} of your own"


def _data(data: Dataset) -> str:
    return f"{data.name} {_digest(piece for examples in (data.train, data.test) for piece in _pieces(examples))}"


def _model(model: nn.Module) -> str:
    """Layers and shapes, not weights: those of a new model with the same layers differ, and a run that goes on has its own."""
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
    whole = hashlib.sha256()
    for piece in pieces:
        whole.update(piece)
    return whole.hexdigest()[:12]
