"""A dataset from what each client has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from fedflat.data.arrays import Array, from_arrays, native
from fedflat.data.dataset import Dataset
from fedflat.errors import UserError

Pair = tuple[Array, Array]


def from_clients(clients: Sequence[Pair], test: Pair | None = None, name: str = "clients", **more: Any) -> Dataset:
    """A dataset from one pair (inputs, targets) for each client, to be partition by ``natural``; ``more`` are ``from_arrays``'s.

    Where there is no test set, models are scored on what the clients have, all of it together.
    """
    if not isinstance(clients, Sequence | np.ndarray):
        raise UserError(
            f"the clients are of type {type(clients).__name__}; expected a list with a pair (inputs, targets) for each"
        )
    if not len(clients):
        raise UserError("there are no clients; expected a list with a pair (inputs, targets) for each")
    pairs = [_pair(pair, f"client {number}") for number, pair in enumerate(clients)]
    shapes = [tuple(inputs.shape[1:]) for inputs, _ in pairs]
    other = next((number for number, shape in enumerate(shapes) if shape != shapes[0]), None)
    if other is not None:
        raise UserError(
            f"the inputs of client {other} have shape {shapes[other]}, those of client 0 {shapes[0]}; expected the same for all"
        )
    inputs, targets = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    groups = np.repeat(np.arange(len(pairs)), [len(values) for _, values in pairs])
    held_out = (inputs, targets) if test is None else _pair(test, "the test set")
    return from_arrays(inputs, targets, *held_out, name=name, train_groups=groups, **more)


def _pair(pair: Any, whose: str) -> tuple[torch.Tensor, torch.Tensor]:
    try:
        inputs, targets = (torch.as_tensor(native(part)).detach().cpu() for part in pair)
    except (TypeError, ValueError, RuntimeError):
        raise UserError(
            f"{whose} has no pair (inputs, targets); expected two tensors or arrays of equal length"
        ) from None
    if not inputs.ndim or len(inputs) != len(targets) or not len(inputs):
        shapes = " and ".join(str(tuple(part.shape)) for part in (inputs, targets))
        raise UserError(
            f"{whose} has inputs and targets of shapes {shapes}; expected equally many of both, and at least one"
        )
    if targets.is_floating_point():
        raise UserError(f"{whose} has targets of type {targets.dtype}; expected class numbers, from 0 on")
    return inputs, targets
