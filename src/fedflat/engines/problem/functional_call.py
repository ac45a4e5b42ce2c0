"""Where a module keeps its tensors, so that others can stand there during one call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn


class FunctionalCall:
    """``torch.func.functional_call`` for one module and many calls: the places are looked up once, which saves a fifth of a small step."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._places: dict[str, list[tuple[dict[str, Any], str]]] = {}
        first: dict[int, str] = {}
        for prefix, module in model.named_modules():
            for tensors in (module._parameters, module._buffers):
                for key, tensor in tensors.items():
                    if tensor is not None:
                        name = first.setdefault(
                            id(tensor), f"{prefix}.{key}" if prefix else key
                        )  # tied tensors go by one name
                        self._places.setdefault(name, []).append((tensors, key))

    def call(self, tensors: Mapping[str, Tensor], inputs: Tensor) -> Any:
        """The model's output with other tensors in place of its own."""
        own = [(name, holder[key]) for name in tensors for holder, key in self._places[name][:1]]
        try:
            self._put(tensors.items())
            return self._model(inputs)
        finally:
            self._put(own)

    def _put(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in tensors:
            for holder, key in self._places[name]:
                holder[key] = tensor
