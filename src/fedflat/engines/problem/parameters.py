"""A model's tensors: frozen and tied ones, changing counters, and calls with other tensors in place of its own."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fedflat.engines.problem.token_model import takes_keywords
from fedflat.models.norms import BatchNorm


class FrozenParameters:
    """Frozen tensors of a model: parameters that are not trained, statistics of fully frozen BatchNorm, constants.

    They stay in the module itself and appear in no flat vector.

    Args:
        model: the model.
        arithmetic: lower precision of the forward pass, if any.
        channels_last: whether to store frozen convolution weights channels last.

    Attributes:
        low_precision: copies of frozen parameters in the precision ``arithmetic``, by name; empty if that is None.
    """

    def __init__(self, model: nn.Module, arithmetic: torch.dtype | None = None, channels_last: bool = False) -> None:
        """Collect the frozen tensors of ``model``, which changes only in memory layout (``channels_last``)."""
        self._parameters = {name: p for name, p in model.named_parameters() if not p.requires_grad}
        for parameter in self._parameters.values():
            if channels_last and parameter.ndim == 4:  # the layout of trained parameters in a flat vector
                parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
        self.low_precision: dict[str, Tensor] = {}
        if arithmetic is not None:
            full = full_precision_parameters(model)
            self.low_precision = {
                name: p.detach().to(arithmetic) for name, p in self._parameters.items() if name not in full
            }
        self._norms = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and _is_frozen(module)
        }
        self._buffers = {
            f"{prefix}.{name}" if prefix else name: buffer
            for prefix, norm in self._norms.items()
            for name, buffer in norm.named_buffers()
            if buffer.is_floating_point()
        }
        if takes_keywords(model):  # buffers that are not saved are constants, such as rotary frequencies
            saved = model.state_dict()
            constants = [(name, buffer) for name, buffer in model.named_buffers() if name not in saved]
            self._buffers |= {name: buffer for name, buffer in constants if buffer.is_floating_point()}

    @property
    def buffers(self) -> set[str]:
        """Names of the frozen statistics."""
        return set(self._buffers)

    def use_running_statistics(self) -> None:
        """Make frozen BatchNorm layers normalise by their running statistics, not by those of a batch."""
        for norm in self._norms.values():
            norm.eval()

    def tensors(self) -> dict[str, Tensor]:
        """All frozen tensors by name."""
        return {name: p.detach() for name, p in self._parameters.items()} | self._buffers

    def fingerprint(self) -> str:
        """SHA-256 of all frozen tensors; an empty string if nothing is frozen."""
        tensors = self.tensors()
        digest = hashlib.sha256()
        for name, tensor in tensors.items():
            digest.update(name.encode())
            digest.update(tensor.cpu().contiguous().numpy().data)
        return digest.hexdigest() if tensors else ""


def fails_in_channels_last(model: nn.Module) -> bool:
    """Whether training may crash if images are stored channels last.

    On a CPU, torch's GroupNorm crashes in the backward pass if it is trained and no layer before it is. That can happen
    if GroupNorm is the first layer with parameters, or if any parameters are frozen.
    """
    parameters = list(model.parameters())
    group_norms = [module for module in model.modules() if isinstance(module, nn.GroupNorm)]
    trains_group_norm = any(p.requires_grad for norm in group_norms for p in norm.parameters())
    if not trains_group_norm or parameters[0].device.type != "cpu":
        return False
    first_layer = next(module for module in model.modules() if list(module.parameters(recurse=False)))
    return isinstance(first_layer, nn.GroupNorm) or not all(p.requires_grad for p in parameters)


def _is_frozen(module: nn.Module) -> bool:
    """Whether a module has parameters and none of them is trained."""
    parameters = list(module.parameters())
    return bool(parameters) and not any(parameter.requires_grad for parameter in parameters)


def first_names(model: nn.Module) -> dict[str, str]:
    """Map each name in a model's ``state_dict`` to the first name of the same tensor: tied tensors have several.

    >>> tied = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    >>> tied[1].weight = tied[0].weight
    >>> first_names(tied)
    {'0.weight': '0.weight', '1.weight': '0.weight'}
    """
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    saved = model.state_dict()  # without non-persistent buffers
    first_name: dict[int, str] = {}
    for name, tensor in tensors:
        first_name.setdefault(id(tensor), name)
    return {name: first_name[id(tensor)] for name, tensor in tensors if name in saved}


def batch_counters(model: nn.Module) -> list[str]:
    """Names of the integer buffers that training changes; the batch counters of fedflat's BatchNorm never change."""
    without_counter = {prefix for prefix, module in model.named_modules() if isinstance(module, BatchNorm)}
    integer_buffers = [name for name, buffer in model.named_buffers() if not buffer.is_floating_point()]
    return [name for name in integer_buffers if name.rpartition(".")[0] not in without_counter]


def full_precision_parameters(model: nn.Module) -> set[str]:
    """Names of the parameters that stay in full precision if the forward pass uses a lower one.

    These are the parameters of torch's layers with running statistics, which must have the type of the statistics.
    fedflat's BatchNorm converts its parameters itself.
    """
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._NormBase) and not isinstance(module, BatchNorm)
        if module.running_mean is not None
        for name, _ in module.named_parameters(recurse=False)
    }


class FunctionalCall:
    """Calls a module with other tensors in place of its own.

    Where the module stores its tensors is looked up only once; a lookup in every call would take a fifth of the time of
    a step of a small model.
    """

    def __init__(self, model: nn.Module) -> None:
        """Look up where the modules of ``model`` store each parameter and buffer."""
        self._model = model
        # By the name of a tensor, the dictionaries and keys under which modules store it: several for tied tensors.
        self._locations: dict[str, list[tuple[dict[str, Any], str]]] = {}
        first_names: dict[int, str] = {}
        for prefix, module in model.named_modules():
            for tensors in (module._parameters, module._buffers):
                for key, tensor in tensors.items():
                    if tensor is not None:
                        # Tied tensors share the name of the first.
                        name = first_names.setdefault(id(tensor), f"{prefix}.{key}" if prefix else key)
                        self._locations.setdefault(name, []).append((tensors, key))

    def call(self, tensors: Mapping[str, Tensor], inputs: Tensor) -> Any:
        """The module's output on ``inputs`` with ``tensors`` (by name) in place of its own, which are restored."""
        with self.replaced(tensors):
            return self._model(inputs)

    @contextmanager
    def replaced(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """A context with ``tensors`` (by name) in place of the module's own, which are restored afterwards."""
        originals = {}
        for name in tensors:
            holder, key = self._locations[name][0]
            originals[name] = holder[key]
        try:
            self._replace(tensors)
            yield
        finally:
            self._replace(originals)

    def _replace(self, tensors: Mapping[str, Tensor]) -> None:
        """Store ``tensors`` in the module, by name."""
        for name, tensor in tensors.items():
            for holder, key in self._locations[name]:
                holder[key] = tensor
