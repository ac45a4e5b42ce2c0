"""GroupNorm and LayerNorm with fast second derivatives.

Over the M entries of a group, with e = (x - mean x) r and r = 1 / sqrt(var x + eps),

    dx = r (P g - e r s / M)        P g = g - mean g - e mean(e g)

where g is the gradient with respect to e, and s with respect to r. P is symmetric, so <u, r P g> has short gradients:

    w.r.t. g: r P u        w.r.t. e: -r (mean(e u) g + mean(e g) u)        w.r.t. r: <u, P g>

torch's own second derivative of these layers makes about a hundred passes over the activations instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class Standardise(torch.autograd.Function):
    """Maps x to (e, r), with statistics over ``axes``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axes: tuple[int, ...], eps: float) -> tuple[Tensor, Tensor]:
        variance, mean = torch.var_mean(x, axes, correction=0, keepdim=True)
        r = (variance + eps).rsqrt()
        e = (x - mean) * r
        ctx.save_for_backward(e, r)
        ctx.axes = axes
        ctx.set_materialize_grads(False)
        return e, r

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (g, s), (e, r) = gradients, ctx.saved_tensors
        gradient = None if g is None else by_input(g, e, r, ctx.axes)
        if s is not None:
            through_r = e * (r * r * s / _size(e, ctx.axes))
            gradient = -through_r if gradient is None else gradient - through_r
        return gradient, None, None


class StandardiseGradient(torch.autograd.Function):
    """r P g, the gradient through e."""

    @staticmethod
    def forward(ctx: Any, g: Tensor, e: Tensor, r: Tensor, axes: tuple[int, ...]) -> Tensor:
        mean, along = g.mean(axes, keepdim=True), (e * g).mean(axes, keepdim=True)
        ctx.save_for_backward(g, e, r, mean, along)
        ctx.axes = axes
        return (g - mean - e * along) * r

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, u: Tensor) -> Any:
        g, e, r, g_mean, g_along = ctx.saved_tensors
        u_mean, u_along = u.mean(ctx.axes, keepdim=True), (e * u).mean(ctx.axes, keepdim=True)
        by_g = (u - u_mean - e * u_along) * r
        by_e = (u_along * g + g_along * u) * -r
        by_r = ((u * g).mean(ctx.axes, keepdim=True) - u_mean * g_mean - u_along * g_along) * _size(e, ctx.axes)
        return by_g, by_e, by_r, None


by_input: Callable[..., Tensor] = StandardiseGradient.apply
standardised: Callable[..., tuple[Tensor, Tensor]] = Standardise.apply


def group_norm(
    input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """`torch.nn.functional.group_norm` for contiguous and channels-last images, without a copy."""
    last = input.dim() == 4 and input.is_contiguous(memory_format=torch.channels_last)
    x = input.movedim(1, -1) if last else input
    axis = x.dim() - 1 if last else 1
    groups = x.reshape(*x.shape[:axis], num_groups, -1, *x.shape[axis + 1 :])
    e = standardised(groups, tuple(place for place in range(1, groups.dim()) if place != axis), eps)[0].flatten(
        axis, axis + 1
    )
    output = _scaled(e, weight, bias, [1 if place != axis else -1 for place in range(x.dim())])
    return output.movedim(-1, 1) if last else output


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """`torch.nn.functional.layer_norm`."""
    e = standardised(input, tuple(range(input.dim() - len(normalized_shape), input.dim())), eps)[0]
    return _scaled(e, weight, bias, list(normalized_shape))


def _scaled(e: Tensor, weight: Tensor | None, bias: Tensor | None, shape: list[int]) -> Tensor:
    if weight is not None:
        e = e * weight.reshape(shape)
    return e if bias is None else e + bias.reshape(shape)


def _size(x: Tensor, axes: tuple[int, ...]) -> int:
    """Number of entries of a group, M."""
    return math.prod(x.shape[axis] for axis in axes)
