"""A model as one flat vector of P numbers.

Convolution weights are stored in the order out, height, width, in, so that their views are channels-last without a
copy. torch's ``parameters_to_vector`` stores them in the order out, in, height, width; ``from_torch_order`` and
``to_torch_order`` convert between the two.

>>> layout = Layout.of({"a.weight": torch.zeros(2, 3), "a.bias": torch.ones(2)})
>>> layout.flatten(layout.views(torch.arange(8.0))).tolist()
[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor, nn

from fedflat.errors import UserError


@dataclass(frozen=True)
class Layout:
    """Names and shapes of the tensors in a flat vector of P elements, in order."""

    names: tuple[str, ...]
    """Name of each tensor."""
    shapes: tuple[tuple[int, ...], ...]
    """Shape of each tensor."""

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Layout:
        """Return the layout of tensors that are given by name."""
        return cls(tuple(tensors), tuple(tuple(tensor.shape) for tensor in tensors.values()))

    @classmethod
    def of_parameters(cls, model: nn.Module) -> Layout:
        """Return the layout of a model's trainable parameters."""
        return cls.of({name: p for name, p in model.named_parameters() if p.requires_grad})

    @classmethod
    def of_buffers(cls, model: nn.Module, without: Collection[str] = ()) -> Layout:
        """Return the layout of a model's floating-point buffers, except the names in ``without``."""
        return cls.of({name: b for name, b in model.named_buffers() if b.is_floating_point() and name not in without})

    @property
    def sizes(self) -> list[int]:
        """Number of elements of each tensor."""
        return [math.prod(shape) for shape in self.shapes]

    @property
    def size(self) -> int:
        """Length P of the vector."""
        return sum(self.sizes)

    @property
    def offsets(self) -> dict[str, int]:
        """Position of each tensor in the vector, by name."""
        return dict(zip(self.names, accumulate(self.sizes, initial=0), strict=False))

    def views(self, vector: Tensor) -> dict[str, Tensor]:
        """Return the tensors in a vector [P] by name, as views that share its memory."""
        if not self.names:  # torch.split with no sizes differs between versions of torch
            return {}
        pieces = torch.split(vector, self.sizes)
        return {
            name: _unflatten(flat, shape) for name, flat, shape in zip(self.names, pieces, self.shapes, strict=True)
        }

    def flatten(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Copy tensors, given by name, into a new vector [P]."""
        if not self.names:
            return torch.zeros(0)
        return torch.cat([_flatten(tensors[name]) for name in self.names])

    def from_torch_order(self, vector: Tensor) -> Tensor:
        """Convert a vector [P] from the order of ``torch.nn.utils.parameters_to_vector`` to the order of this layout.

        Only convolution weights change their order.

        >>> layout = Layout(("weight",), ((1, 2, 1, 2),))  # torch: in, width; here: width, in
        >>> layout.from_torch_order(torch.tensor([0.0, 1.0, 2.0, 3.0])).tolist()
        [0.0, 2.0, 1.0, 3.0]
        """
        pieces = zip(self.names, torch.split(vector, self.sizes), self.shapes, strict=True)
        return self.flatten({name: piece.view(shape) for name, piece, shape in pieces})

    def to_torch_order(self, vector: Tensor) -> Tensor:
        """Convert a vector [P] to the order of ``torch.nn.utils.parameters_to_vector``."""
        return torch.cat([tensor.reshape(-1) for tensor in self.views(vector).values()])

    @property
    def has_torch_order(self) -> bool:
        """Whether vectors of this layout have the order of ``torch.nn.utils.parameters_to_vector``."""
        # Moving the channels changes nothing if there is only one channel, or one position per filter.
        return all(len(shape) != 4 or shape[1] == 1 or shape[2] * shape[3] == 1 for shape in self.shapes)

    def indicator(self, chosen: Callable[[str], bool], like: Tensor) -> Tensor:
        """Return a boolean vector [P], true for the entries of tensors whose name ``chosen`` accepts.

        It is on the device of ``like``.
        """
        return _repeat_flags(tuple(chosen(name) for name in self.names), tuple(self.sizes), like.device)

    def weight_indicator(self, like: Tensor) -> Tensor:
        """Return a boolean vector [P], true for the entries of weights and false for biases, on the device of ``like``.

        Weights are the tensors with "weight" in their name. If there are none, they are the tensors with at least two
        dimensions. A model without either raises a ``UserError``.

        >>> Layout(("W1", "b1"), ((1, 2), (1,))).weight_indicator(torch.zeros(3)).tolist()
        [True, True, False]
        """
        weights = {name for name in self.names if "weight" in name}
        weights = weights or {name for name, shape in zip(self.names, self.shapes, strict=True) if len(shape) > 1}
        if not weights:
            raise UserError(
                f"cannot tell weights from biases among {', '.join(self.names)}: no name contains 'weight', and no "
                "tensor has two dimensions; ASAM with scope=all scales all of them"
            )
        return self.indicator(weights.__contains__, like)

    def per_tensor(self, values: Tensor) -> Tensor:
        """Return a vector [P] in which all elements of tensor j equal ``values[j]``."""
        # repeat_interleave would copy the sizes to the device, which CUDA graph capture forbids.
        return torch.cat([value.expand(size) for value, size in zip(values.unbind(), self.sizes, strict=True)])


def _unflatten(flat: Tensor, shape: tuple[int, ...]) -> Tensor:
    """View a flat tensor as ``shape``; convolution weights (out, in, height, width) are stored channels-last."""
    if len(shape) == 4:
        outputs, inputs, height, width = shape
        return flat.view(outputs, height, width, inputs).permute(0, 3, 1, 2)
    return flat.view(shape)


def _flatten(tensor: Tensor) -> Tensor:
    """Flatten a tensor; the inverse of ``_unflatten``."""
    return (tensor.permute(0, 2, 3, 1) if tensor.ndim == 4 else tensor).reshape(-1)


@lru_cache(maxsize=64)
def _repeat_flags(flags: tuple[bool, ...], sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """Repeat flag j ``sizes[j]`` times; cached, because training asks for the same vector in every step."""
    return torch.tensor(flags, dtype=torch.bool).repeat_interleave(torch.tensor(sizes)).to(device)
