"""Loading weights from files into a model, with an error that names the first mismatch."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from fedflat.errors import MachineFailed, UserError, missing_file, system_reason
from fedflat.experiment.store.files import DamagedFile
from fedflat.experiment.store.tensor_files import read_tensors
from fedflat.models import classifier_parameters
from fedflat.models.bisenet import BilateralNetwork
from fedflat.models.low_rank import RESIDUAL, adapter_parameters
from fedflat.models.vit import VisionTransformer

LISTED_NAMES = 4
"""Number of tensors that an error message names; it only counts further ones."""
TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".tar")
STATE_DICT_KEYS = ("state_dict", "model_state_dict", "model", "net")
"""Keys under which training scripts store the state_dict."""
WRAPPER_PREFIXES = ("module.", "_orig_mod.")
"""Prefixes that torch's wrappers (DataParallel, compile) add to every name."""
POOLERS = ("pooler.", "vit.pooler.", "pre_logits.")
"""Layers that published vision transformers may have between the last block and their head."""


def load_weights(network: nn.Module, name: str, path: Path, fresh_head: bool = False) -> None:
    """Load a weights file into a model.

    Args:
        network: the model, which is changed in place.
        name: the model's name, for error messages.
        path: a safetensors file or a saved ``state_dict``.
        fresh_head: whether the last linear layer keeps its initial values, e.g. because the file has other classes.
    """
    tensors, architecture = read_weights(path)
    load_tensors(network, name, tensors, str(path), architecture, fresh_head)


def read_weights(path: Path) -> tuple[dict[str, Tensor], str]:
    """Read the tensors of a weights file, and the model's name if fedflat wrote the file (else an empty string)."""
    if path.is_dir():
        raise UserError(f"{path} is a folder; expected a weights file, for example {path / 'model.safetensors'}")
    if not path.exists():
        raise missing_file(path, "a weights file: the model.safetensors of a run, or a state_dict (.pt)")
    if path.suffix in TORCH_SUFFIXES:
        return _strip_wrapper_prefixes(_read_state_dict(path)), ""
    tensors, architecture = _read_safetensors(path)
    return _strip_wrapper_prefixes(tensors), architecture


def _strip_wrapper_prefixes(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Remove the prefixes of torch's wrappers, which may be nested."""
    for prefix in WRAPPER_PREFIXES:
        if tensors and all(key.startswith(prefix) for key in tensors):
            return _strip_wrapper_prefixes({key.removeprefix(prefix): value for key, value in tensors.items()})
    return tensors


def _read_safetensors(path: Path) -> tuple[dict[str, Tensor], str]:
    """The tensors of a safetensors file, and the model's name in its metadata."""
    try:
        tensors, metadata = read_tensors(path)
    except DamagedFile as error:
        raise UserError(f"{error}; expected a complete file such as the model.safetensors of a run") from None
    except OSError as error:
        raise MachineFailed(f"cannot read {path}: {system_reason(error)}") from None
    return tensors, str(metadata.get("model", ""))


def _read_state_dict(path: Path) -> dict[str, Tensor]:
    """A state_dict, possibly inside a training script's checkpoint; no code in the file is executed."""
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged pickle raises almost any type of error
        if "TorchScript" in str(error):
            raise UserError(
                f"{path} is a TorchScript file; expected a state_dict: "
                "torch.save(torch.jit.load(file).state_dict(), 'weights.pt')"
            ) from None
        unsafe = re.search(r"GLOBAL (\S+)", str(error))
        if unsafe is None:
            raise UserError(
                f"{path} is damaged or not a torch file; expected one written with torch.save(model.state_dict(), file)"
            ) from None
        raise UserError(
            f"{path} contains a Python object ({unsafe[1]}), and loading it could run code; if you trust the file, "
            "open it with torch.load(file, weights_only=False), and save only the state_dict with torch.save"
        ) from None
    content = f"a {type(loaded).__name__}"
    if isinstance(loaded, dict):
        content = (
            f"a dictionary with {_listed([repr(key) for key in loaded], 'key')}" if loaded else "an empty dictionary"
        )
        loaded = next((loaded[key] for key in STATE_DICT_KEYS if isinstance(loaded.get(key), dict)), loaded)
        if loaded and all(isinstance(key, str) and isinstance(value, Tensor) for key, value in loaded.items()):
            return loaded
    raise UserError(
        f"{path} contains {content}; expected a state_dict, or a dictionary with one under "
        f"{', '.join(STATE_DICT_KEYS)}; if another key holds it, save it alone: "
        "torch.save(torch.load(file)[KEY], 'weights.pt')"
    )


def load_tensors(
    network: nn.Module,
    name: str,
    tensors: Mapping[str, Tensor],
    source: str,
    architecture: str = "",
    fresh_head: bool | None = None,
) -> None:
    """Load tensors into a model, and raise a ``UserError`` if their names or shapes do not match.

    Args:
        network: the model; a vision transformer first translates the names of published weights.
        name: the model's name, for messages.
        tensors: the state_dict. It may lack frozen parameters and all adapters, which then keep their values.
        source: where the tensors come from, for messages.
        architecture: name of the model that the tensors belong to, if known.
        fresh_head: whether the last linear layer (the head) keeps its initial values, so that the tensors may belong
            to a model with other classes; None if the user has no such choice.
    """
    tensors = network.convert_weights(tensors) if isinstance(network, VisionTransformer) else dict(tensors)
    head = _head_parameter_names(network) if fresh_head else set()
    if fresh_head:
        tensors = _without_head(network, tensors, head)
    mismatch = first_mismatch(network, tensors, head)
    if mismatch:
        origin = f" ({architecture})" if architecture and architecture != name else ""
        hint = _hint_on_head(network, tensors) if fresh_head is False else ""
        raise UserError(
            f"{source} contains weights of another architecture{origin}: {mismatch}; "
            f"expected those of {name} for this dataset{hint}"
        )
    require_finite(tensors, source)
    network.load_state_dict(dict(tensors), strict=False)


def require_finite(tensors: Mapping[str, Tensor], source: str) -> None:
    """Raise a ``UserError`` if a model's tensors are not finite; ``source`` says where they come from."""
    for key, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise UserError(
                f"{source} contains infinite or NaN values in {key}; use weights of a model that did not diverge"
            )


def first_mismatch(network: nn.Module, tensors: Mapping[str, Tensor], left_out: Collection[str] = ()) -> str:
    """Describe how tensors differ from a model: missing and unexpected names, or the first shape mismatch.

    Args:
        network: the model.
        tensors: the state_dict to compare.
        left_out: names that may be missing.

    Returns:
        A clause for an error message; empty if the tensors fit.

    >>> import torch
    >>> first_mismatch(nn.Linear(2, 3), {"weight": torch.zeros(3, 2), "bias": torch.zeros(4)})
    'bias has shape 4 there but 3 in the model'
    >>> first_mismatch(nn.Linear(2, 3), {"w": torch.zeros(3, 2)})
    'it lacks tensors weight and bias and has an unexpected tensor w'
    """
    expected = {key: value for key, value in network.state_dict().items() if isinstance(value, Tensor)}
    optional = {*left_out, *_optional_parameters(network)}
    adapters = adapter_parameters(network)
    if not adapters & tensors.keys():  # weights from before adapters were added
        optional |= adapters | {key for key in expected if key.endswith(f".{RESIDUAL}")}
    missing = [key for key in expected if key not in tensors and key not in optional]
    extra = [key for key in tensors if key not in expected]
    differences = [f"lacks {_listed(missing, 'tensor')}"] if missing else []
    if extra:
        differences.append(f"has {'an ' if len(extra) == 1 else ''}unexpected {_listed(extra, 'tensor')}")
    if differences:
        return "it " + " and ".join(differences)
    for key, value in expected.items():
        if key in tensors and tensors[key].shape != value.shape:
            return f"{key} has shape {_shape(tensors[key])} there but {_shape(value)} in the model"
    return ""


def _optional_parameters(network: nn.Module) -> set[str]:
    """Names of parameters that a file may lack: tied ones, and frozen ones, which may not have been saved."""
    untied = dict(network.named_parameters())
    parameters = network.named_parameters(remove_duplicate=False)
    return {key for key, parameter in parameters if key not in untied or not parameter.requires_grad}


def _hint_on_head(network: nn.Module, tensors: Mapping[str, Tensor]) -> str:
    """The end of an error message: a hint to use ``init_head=fresh`` if all but the head fits, otherwise empty."""
    if not any(isinstance(module, nn.Linear | nn.Conv2d) for module in network.modules()):
        return ""
    head = _head_parameter_names(network)
    body = _without_head(network, tensors, head)
    return "" if first_mismatch(network, body, head) else "; to train with a new head, set init_head=fresh"


def _head_parameter_names(network: nn.Module) -> set[str]:
    """Names of the parameters of the last layer, and of the last layer of each auxiliary head."""
    names = set(classifier_parameters(network))
    if isinstance(network, BilateralNetwork):
        for index, head in enumerate(network.auxiliary):
            names |= {f"auxiliary.{index}.{name}" for name in classifier_parameters(head)}
    return names


def _without_head(network: nn.Module, tensors: Mapping[str, Tensor], head: Collection[str]) -> dict[str, Tensor]:
    """The tensors without those of the head, and of a pooling layer before it that the model lacks."""
    expected = network.state_dict()
    return {
        key: value
        for key, value in tensors.items()
        if key not in head and (key in expected or not key.startswith(POOLERS))
    }


def _listed(names: list[str], noun: str) -> str:
    """Names in a sentence, after a ``noun``; only the first few are spelled out.

    >>> _listed(["a", "b", "c"], "tensor"), _listed(list("abcdefg"), "tensor")
    ('tensors a, b and c', 'tensors a, b, c, d and 3 more')
    """
    if len(names) == 1:
        return f"{noun} {names[0]}"
    if len(names) > LISTED_NAMES:
        names = [*names[:LISTED_NAMES], f"{len(names) - LISTED_NAMES} more"]
    return f"{noun}s {', '.join(names[:-1])} and {names[-1]}"


def _shape(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "a single number"
