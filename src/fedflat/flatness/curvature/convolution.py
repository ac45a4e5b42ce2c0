"""Convolutions whose second derivative is as fast as the first.

A convolution is linear in its input and in its filters, and so are its two derivatives:

    y = C(x, w)        dx = D(g, w)        dw = F(g, x)

with <u, D(g, w)> = <C(u, w), g> and <v, F(g, x)> = <C(x, v), g>. Each of the three is therefore differentiated by the other two, as often
as one likes, and all of them are what libraries have fast kernels for. torch's own second derivative of a convolution takes gradients for
filters of the size of whole images instead, which on a GPU costs half as much again per Hessian-vector product of `resnet18`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class How(NamedTuple):
    """Stride, padding and dilation along each axis, and the number of groups."""

    stride: list[int]
    padding: list[int]
    dilation: list[int]
    groups: int

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        """C(x, w)."""
        return torch.ops.aten.convolution(x, w, None, *self[:3], False, [0] * len(self.stride), self.groups)  # type: ignore[no-any-return]

    def backward(self, g: Tensor, x: Tensor, w: Tensor, wanted: int) -> Tensor:
        """D(g, w), which takes of x but the shape, or F(g, x), which takes of w but the shape."""
        mask = [place == wanted for place in range(3)]
        found = torch.ops.aten.convolution_backward(
            g, x, w, None, *self[:3], False, [0] * len(self.stride), self.groups, mask
        )
        return found[wanted]  # type: ignore[no-any-return]


class Forward(torch.autograd.Function):
    """C(x, w)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, how: How) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.how = how
        return how.forward(x, w)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (g,), (x, w) = gradients, ctx.saved_tensors
        needs = ctx.needs_input_grad
        return (
            by_input(g, w, x, ctx.how) if needs[0] else None,
            by_filters(g, x, w, ctx.how) if needs[1] else None,
            None,
        )


class ByInput(torch.autograd.Function):
    """D(g, w), of the shape of an input."""

    @staticmethod
    def forward(ctx: Any, g: Tensor, w: Tensor, like: Tensor, how: How) -> Tensor:
        ctx.save_for_backward(g, w)
        ctx.how = how
        return how.backward(g, like, w, 0)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (u,), (g, w) = gradients, ctx.saved_tensors
        needs = ctx.needs_input_grad
        return (
            convolved(u, w, ctx.how) if needs[0] else None,
            by_filters(g, u, w, ctx.how) if needs[1] else None,
            None,
            None,
        )


class ByFilters(torch.autograd.Function):
    """F(g, x), of the shape of filters."""

    @staticmethod
    def forward(ctx: Any, g: Tensor, x: Tensor, like: Tensor, how: How) -> Tensor:
        ctx.save_for_backward(g, x)
        ctx.how = how
        return how.backward(g, x, like, 1)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (v,), (g, x) = gradients, ctx.saved_tensors
        needs = ctx.needs_input_grad
        return (
            convolved(x, v, ctx.how) if needs[0] else None,
            by_input(g, v, x, ctx.how) if needs[1] else None,
            None,
            None,
        )


convolved: Callable[..., Tensor] = Forward.apply
by_input: Callable[..., Tensor] = ByInput.apply
by_filters: Callable[..., Tensor] = ByFilters.apply


def convolution(
    theirs: Callable[..., Tensor],
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    """`torch.conv1d`, `torch.conv2d` and `torch.conv3d`; the cases that are seldom are left to ``theirs``."""
    if isinstance(padding, str) or input.dim() != weight.dim():
        return theirs(input, weight, bias, stride, padding, dilation, groups)
    axes = weight.dim() - 2
    found = convolved(input, weight, How(_each(stride, axes), _each(padding, axes), _each(dilation, axes), groups))
    return found if bias is None else found + bias.reshape(-1, *[1] * axes)


def _each(value: Any, axes: int) -> list[int]:
    """One number along each axis."""
    values = [value] if isinstance(value, int) else list(value)
    return values * axes if len(values) == 1 else values
