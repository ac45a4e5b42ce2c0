"""What does not move while a model is trained: its frozen parameters, and the statistics of normalisations that are frozen whole."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn


class FrozenParameters:
    """The frozen part of a model, which stays in the model itself and in no flat vector."""

    def __init__(self, model: nn.Module, arithmetic: torch.dtype | None = None, channels_last: bool = False) -> None:
        self._parameters = {name: p for name, p in model.named_parameters() if not p.requires_grad}
        for parameter in self._parameters.values():
            if channels_last and parameter.ndim == 4:  # as the trained ones lie in a flat vector
                parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
        self.rounded = (
            {} if arithmetic is None else {name: p.detach().to(arithmetic) for name, p in self._parameters.items()}
        )
        """Copies in the precision in which the model is passed through, where that is lower."""
        self._norms = {
            name: m
            for name, m in model.named_modules()
            if isinstance(m, nn.modules.batchnorm._BatchNorm) and _frozen(m)
        }
        self._buffers = {
            f"{prefix}.{name}" if prefix else name: buffer
            for prefix, norm in self._norms.items()
            for name, buffer in norm.named_buffers()
            if buffer.is_floating_point()
        }

    @property
    def buffers(self) -> set[str]:
        """The names of the statistics that stay as they are."""
        return set(self._buffers)

    def rest(self) -> None:
        """Let frozen normalisations use their statistics, and not those of a batch."""
        for norm in self._norms.values():
            norm.eval()

    def tensors(self) -> dict[str, Tensor]:
        """All that is frozen, by name."""
        return {**{name: p.detach() for name, p in self._parameters.items()}, **self._buffers}

    def fingerprint(self) -> str:
        """sha256 of all that is frozen; empty where nothing is."""
        digest = hashlib.sha256()
        for name, tensor in self.tensors().items():
            digest.update(name.encode())
            digest.update(tensor.cpu().contiguous().numpy().data)
        return digest.hexdigest() if self.tensors() else ""


def must_be_plain(model: nn.Module) -> bool:
    """Whether images may not lie channels last: torch's GroupNorm on a CPU then crashes where it trains but nothing before it does."""
    parameters = list(model.parameters())
    trains = any(p.requires_grad for m in model.modules() if isinstance(m, nn.GroupNorm) for p in m.parameters())
    first = next((m for m in model.modules() if any(p is not None for p in m._parameters.values())), None)
    alone = isinstance(first, nn.GroupNorm) or not all(p.requires_grad for p in parameters)
    return trains and alone and parameters[0].device.type == "cpu"


def _frozen(module: nn.Module) -> bool:
    parameters = list(module.parameters())
    return bool(parameters) and not any(parameter.requires_grad for parameter in parameters)
