"""Weights from a file for a model: they fit exactly, or one sentence says where they do not."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from fedflat.errors import UserError


def load_weights(network: nn.Module, name: str, path: Path) -> None:
    """Put the weights of a safetensors file into a model."""
    tensors, origin = read_weights(path)
    fill(network, name, tensors, str(path), origin)


def read_weights(path: Path) -> tuple[dict[str, Tensor], str]:
    """The tensors of a safetensors file, and the model they are of where fedflat wrote it."""
    if path.is_dir():
        raise UserError(f"{path} is a folder; expected a file of weights, for example {path / 'model.safetensors'}")
    try:
        with safe_open(path, "pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            about = json.loads((file.metadata() or {}).get("fedflat", "{}"))
    except FileNotFoundError:
        raise UserError(f"there are no weights in {path}; expected a file such as the model.safetensors of a run") from None
    except (OSError, SafetensorError, ValueError):
        raise UserError(f"{path} is not a whole safetensors file; expected one such as the model.safetensors of a run") from None
    return tensors, str(about.get("model", ""))


def fill(network: nn.Module, name: str, tensors: Mapping[str, Tensor], where: str, origin: str = "") -> None:
    """Put tensors into a model, all of them and into all of it; frozen parameters alone may be left as they are."""
    mismatch = first_mismatch(network, tensors)
    if mismatch:
        of = f" ({origin})" if origin and origin != name else ""
        raise UserError(f"{where} holds weights of another architecture{of}: {mismatch}; expected those of {name} for this data set")
    broken = next((key for key, tensor in tensors.items() if not bool(tensor.isfinite().all())), None)
    if broken is not None:
        raise UserError(f"{where} holds values in {broken} that are infinite or not a number; take weights of a run that did not diverge")
    network.load_state_dict(dict(tensors), strict=False)


def first_mismatch(network: nn.Module, tensors: Mapping[str, Tensor]) -> str:
    """Where tensors first differ from those of a model, in the model's order; empty where they are of the same architecture.

    >>> import torch
    >>> first_mismatch(nn.Linear(2, 3), {"weight": torch.zeros(3, 2), "bias": torch.zeros(4)})
    'bias is 4 there but 3 in the model'
    """
    expected = {key: value for key, value in network.state_dict().items() if isinstance(value, Tensor)}
    once = dict(network.named_parameters())
    every = dict(network.named_parameters(remove_duplicate=False))
    optional = {key for key, value in every.items() if key not in once or not value.requires_grad}
    for key, value in expected.items():
        if key not in tensors:
            if key in optional:  # tied to another, or frozen: not saved either
                continue
            return f"it has no tensor {key}"
        if tensors[key].shape != value.shape:
            return f"{key} is {_shown(tensors[key])} there but {_shown(value)} in the model"
    return next((f"it has a tensor {key}, which the model has not" for key in tensors if key not in expected), "")


def _shown(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "a single number"
