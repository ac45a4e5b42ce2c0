"""The frozen part of a model: parameters that are not trained, and statistics of fully frozen BatchNorm layers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn


class FrozenParameters:
    """Frozen tensors of a model. They stay in the module itself and appear in no flat vector.

    Attributes:
        low_precision: by name, copies in the precision of the forward pass; empty if that is the model's own.
    """

    def __init__(self, model: nn.Module, arithmetic: torch.dtype | None = None, channels_last: bool = False) -> None:
        self._parameters = {name: p for name, p in model.named_parameters() if not p.requires_grad}
        for parameter in self._parameters.values():
            if channels_last and parameter.ndim == 4:  # the layout of trained parameters in a flat vector
                parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
        self.low_precision = (
            {} if arithmetic is None else {name: p.detach().to(arithmetic) for name, p in self._parameters.items()}
        )
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
        return {**{name: p.detach() for name, p in self._parameters.items()}, **self._buffers}

    def fingerprint(self) -> str:
        """SHA-256 of all frozen tensors; an empty string if nothing is frozen."""
        digest = hashlib.sha256()
        for name, tensor in self.tensors().items():
            digest.update(name.encode())
            digest.update(tensor.cpu().contiguous().numpy().data)
        return digest.hexdigest() if self.tensors() else ""


def crashes_channels_last(model: nn.Module) -> bool:
    """Whether channels-last images would crash training: torch's CPU GroupNorm does if nothing before it trains."""
    parameters = list(model.parameters())
    trains = any(p.requires_grad for m in model.modules() if isinstance(m, nn.GroupNorm) for p in m.parameters())
    first = next((m for m in model.modules() if any(p is not None for p in m._parameters.values())), None)
    alone = isinstance(first, nn.GroupNorm) or not all(p.requires_grad for p in parameters)
    return trains and alone and parameters[0].device.type == "cpu"


def _is_frozen(module: nn.Module) -> bool:
    parameters = list(module.parameters())
    return bool(parameters) and not any(parameter.requires_grad for parameter in parameters)


class FunctionalCall:
    """Calls a module with other tensors in place of its own.

    Looking up where the module stores its tensors once, not in every call, saves a fifth of a small step.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._places: dict[str, list[tuple[dict[str, Any], str]]] = {}
        first_names: dict[int, str] = {}
        for prefix, module in model.named_modules():
            for tensors in (module._parameters, module._buffers):
                for key, tensor in tensors.items():
                    if tensor is not None:
                        # Tied tensors share the name of the first.
                        name = first_names.setdefault(id(tensor), f"{prefix}.{key}" if prefix else key)
                        self._places.setdefault(name, []).append((tensors, key))

    def call(self, tensors: Mapping[str, Tensor], inputs: Tensor) -> Any:
        """The module's output with ``tensors``, by name, in place of its own; these are restored afterwards."""
        originals = [(name, holder[key]) for name in tensors for holder, key in self._places[name][:1]]
        try:
            self._put(tensors.items())
            return self._model(inputs)
        finally:
            self._put(originals)

    def _put(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in tensors:
            for holder, key in self._places[name]:
                holder[key] = tensor
