"""Weights from a file for a model: they fit exactly, or one sentence says where they do not."""

from __future__ import annotations

import json
import pickle
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from fedflat.errors import UserError
from fedflat.models import classifier_parameters
from fedflat.models.adapters import adapter_parameters
from fedflat.models.bisenet import BilateralNetwork
from fedflat.models.vit import VisionTransformer

MOST_NAMES = 4
"""How many tensors a message names before it only counts them."""
TORCH_ENDINGS = (".pt", ".pth", ".bin", ".ckpt", ".tar")
NESTED = ("state_dict", "model_state_dict", "model")
"""Where checkpoints of training scripts keep the state_dict."""
WRAPPED = ("module.", "_orig_mod.")
"""What torch's wrappers, parallel and compiled, put before every name."""
POOLERS = ("pooler.", "vit.pooler.", "pre_logits.")
"""What published vision transformers may have between their last block and a head of their own."""


def load_weights(network: nn.Module, name: str, path: Path, fresh_head: bool = False) -> None:
    """Put the weights of a file into a model; with ``fresh_head`` all but those of the last linear layer."""
    tensors, origin = read_weights(path)
    fill(network, name, tensors, str(path), origin, fresh_head)


def read_weights(path: Path) -> tuple[dict[str, Tensor], str]:
    """The tensors of a safetensors file or of a state_dict that torch saved, and the model they are of where fedflat wrote it."""
    if path.is_dir():
        raise UserError(f"{path} is a folder; expected a file of weights, for example {path / 'model.safetensors'}")
    if not path.exists():
        raise UserError(
            f"there are no weights in {path}; expected a file such as the model.safetensors of a run, or a state_dict (.pt)"
        )
    tensors, origin = _saved_by_torch(path) if path.suffix in TORCH_ENDINGS else _safetensors(path)
    return _unwrapped(tensors), origin


def _unwrapped(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by the names they have in the model itself, out of all that it was wrapped in."""
    for prefix in WRAPPED:
        if tensors and all(key.startswith(prefix) for key in tensors):
            return _unwrapped({key.removeprefix(prefix): value for key, value in tensors.items()})
    return tensors


def _safetensors(path: Path) -> tuple[dict[str, Tensor], str]:
    try:
        with safe_open(path, "pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            about = json.loads((file.metadata() or {}).get("fedflat", "{}"))
    except (OSError, SafetensorError, ValueError):
        raise UserError(
            f"{path} is not a whole safetensors file; expected one such as the model.safetensors of a run"
        ) from None
    return tensors, str(about.get("model", ""))


def _saved_by_torch(path: Path) -> tuple[dict[str, Tensor], str]:
    """A state_dict, also within a training script's checkpoint. Nothing but tensors is read: no code in the file is run."""
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError):
        raise UserError(
            f"{path} is not a state_dict that torch can read without running code in it; expected torch.save(model.state_dict(), file)"
        ) from None
    inside = (
        next((loaded[key] for key in NESTED if isinstance(loaded.get(key), dict)), loaded)
        if isinstance(loaded, dict)
        else None
    )
    named = isinstance(inside, dict) and all(
        isinstance(key, str) and isinstance(value, Tensor) for key, value in inside.items()
    )
    if not inside or not named:
        raise UserError(
            f"{path} holds no state_dict; expected tensors by name, as torch.save(model.state_dict(), file) writes them"
        )
    return inside, ""


def fill(
    network: nn.Module, name: str, tensors: Mapping[str, Tensor], where: str, origin: str = "", fresh_head: bool = False
) -> None:
    """Put tensors into a model, all of them and into all of it; frozen parameters alone may be left as they are.

    Models that know how others call their weights translate them first. Adapters may be missing as a whole: they then stay as drawn.
    """
    tensors = network.translated(tensors) if isinstance(network, VisionTransformer) else dict(tensors)
    head = _heads(network) if fresh_head else set()
    if fresh_head:
        tensors = _without_head(network, tensors, head)
    mismatch = first_mismatch(network, tensors, head)
    if mismatch:
        of = f" ({origin})" if origin and origin != name else ""
        hint = "" if fresh_head else _about_the_head(network, tensors)
        raise UserError(
            f"{where} holds weights of another architecture{of}: {mismatch}; expected those of {name} for this dataset{hint}"
        )
    broken = next((key for key, tensor in tensors.items() if not bool(tensor.isfinite().all())), None)
    if broken is not None:
        raise UserError(
            f"{where} holds values in {broken} that are infinite or not a number; take weights of a run that did not diverge"
        )
    network.load_state_dict(dict(tensors), strict=False)


def first_mismatch(network: nn.Module, tensors: Mapping[str, Tensor], left_out: Collection[str] = ()) -> str:
    """Where tensors differ from those of a model: what is missing and what is too many, else the first of another shape.

    It is empty where they are of the same architecture. ``left_out`` are tensors of the model that need not be there.

    >>> import torch
    >>> first_mismatch(nn.Linear(2, 3), {"weight": torch.zeros(3, 2), "bias": torch.zeros(4)})
    'bias is 4 there but 3 in the model'
    >>> first_mismatch(nn.Linear(2, 3), {"w": torch.zeros(3, 2)})
    'it has no tensors weight and bias, and it has a tensor w, which the model has not'
    """
    expected = {key: value for key, value in network.state_dict().items() if isinstance(value, Tensor)}
    optional = {*left_out, *_optional(network)}
    adapters = adapter_parameters(network)
    if not adapters & tensors.keys():
        optional |= adapters
    missing = [key for key in expected if key not in tensors and key not in optional]
    extra = [key for key in tensors if key not in expected]
    told = []
    if missing:
        told.append(f"it has no tensor{_listed(missing)}")
    if extra:
        told.append(f"it has {'a ' if len(extra) == 1 else ''}tensor{_listed(extra)}, which the model has not")
    if told:
        return ", and ".join(told)
    shaped = ((key, value) for key, value in expected.items() if key in tensors and tensors[key].shape != value.shape)
    return next(
        (f"{key} is {_shown(tensors[key])} there but {_shown(value)} in the model" for key, value in shaped), ""
    )


def _optional(network: nn.Module) -> set[str]:
    """Parameters that need not be in a file: tied to another, or frozen by the user, and so perhaps not saved either."""
    once = dict(network.named_parameters())
    every = dict(network.named_parameters(remove_duplicate=False))
    return {key for key, value in every.items() if key not in once or not value.requires_grad}


def _about_the_head(network: nn.Module, tensors: Mapping[str, Tensor]) -> str:
    """A word on other classes, where all but the head fits."""
    if not any(isinstance(module, nn.Linear | nn.Conv2d) for module in network.modules()):
        return ""
    head = _heads(network)
    rest = _without_head(network, tensors, head)
    return "" if first_mismatch(network, rest, head) else "; with init_head=fresh the head may be another"


def _heads(network: nn.Module) -> set[str]:
    """The parameters of the last layer, and of the last layer of each auxiliary head, which has the same classes."""
    auxiliary = network.auxiliary if isinstance(network, BilateralNetwork) else ()
    others = {
        f"auxiliary.{place}.{name}" for place, head in enumerate(auxiliary) for name in classifier_parameters(head)
    }
    return classifier_parameters(network) | others


def _without_head(network: nn.Module, tensors: Mapping[str, Tensor], head: Collection[str]) -> dict[str, Tensor]:
    """Tensors without those of a head, and without what others have before theirs and the model has not."""
    own = network.state_dict()
    return {
        key: value for key, value in tensors.items() if key not in head and (key in own or not key.startswith(POOLERS))
    }


def _listed(keys: list[str]) -> str:
    """The first few of some names, after the word tensor."""
    shown, more = keys[:MOST_NAMES], len(keys) - MOST_NAMES
    if more > 0:
        return f"s {', '.join(shown)} and {more} more"
    return f" {shown[0]}" if len(shown) == 1 else f"s {', '.join(shown[:-1])} and {shown[-1]}"


def _shown(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "a single number"
