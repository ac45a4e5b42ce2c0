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
        """Return e = (x - mean) r and r = 1 / sqrt(variance + eps), with statistics over ``axes``.

        r is an output only so that second derivatives can flow through it.
        """
        variance, mean = torch.var_mean(x, axes, correction=0, keepdim=True)
        r = (variance + eps).rsqrt()
        e = (x - mean) * r
        ctx.save_for_backward(e, r)
        ctx.axes = axes
        ctx.set_materialize_grads(False)
        return e, r

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return the gradient dx = r (P g - e r s / M) of x, from the gradients g of e and s of r.

        P removes the mean and the component along e; M is the number of entries of a group. g or s is None if its
        output is unused.
        """
        g, s = gradients
        e, r = ctx.saved_tensors
        dx = None if g is None else standardise_gradient(g, e, r, ctx.axes)
        if s is not None:
            through_r = e * (r * r * s / _group_size(e, ctx.axes))
            dx = -through_r if dx is None else dx - through_r
        return dx, None, None


class StandardiseGradient(torch.autograd.Function):
    """r P g, the gradient through e."""

    @staticmethod
    def forward(ctx: Any, g: Tensor, e: Tensor, r: Tensor, axes: tuple[int, ...]) -> Tensor:
        """Return r P g = r (g - mean(g) - e mean(e g)), the gradient of x through e alone."""
        g_mean, eg_mean = g.mean(axes, keepdim=True), (e * g).mean(axes, keepdim=True)
        ctx.save_for_backward(g, e, r, g_mean, eg_mean)
        ctx.axes = axes
        return (g - g_mean - e * eg_mean) * r

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, u: Tensor) -> Any:
        """Return the gradients of <u, r P g> with respect to g, e and r, where u is the gradient of the result.

        They are r P u, -r (mean(e u) g + mean(e g) u) and the inner product <u, P g> within each group.
        """
        g, e, r, g_mean, eg_mean = ctx.saved_tensors
        u_mean, eu_mean = u.mean(ctx.axes, keepdim=True), (e * u).mean(ctx.axes, keepdim=True)
        dg = (u - u_mean - e * eu_mean) * r
        de = (eu_mean * g + eg_mean * u) * -r
        ug_mean = (u * g).mean(ctx.axes, keepdim=True)
        dr = (ug_mean - u_mean * g_mean - eu_mean * eg_mean) * _group_size(e, ctx.axes)
        return dg, de, dr, None


standardise: Callable[..., tuple[Tensor, Tensor]] = Standardise.apply
standardise_gradient: Callable[..., Tensor] = StandardiseGradient.apply


def group_norm(
    input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """Compute `torch.nn.functional.group_norm`, with the same arguments, so that its second derivative is fast.

    Contiguous and channels-last images are not copied.
    """
    channels_last = input.dim() == 4 and input.is_contiguous(memory_format=torch.channels_last)
    x = input.movedim(1, -1) if channels_last else input
    axis = x.dim() - 1 if channels_last else 1  # of the channels
    # Split the channel axis into (groups, channels per group); statistics are over everything within a group.
    grouped = x.reshape(*x.shape[:axis], num_groups, -1, *x.shape[axis + 1 :])
    within_group = tuple(dim for dim in range(1, grouped.dim()) if dim != axis)
    e, _ = standardise(grouped, within_group, eps)
    per_channel = [1] * x.dim()
    per_channel[axis] = -1
    output = _scale_and_shift(e.flatten(axis, axis + 1), weight, bias, per_channel)
    return output.movedim(-1, 1) if channels_last else output


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Compute `torch.nn.functional.layer_norm`, with the same arguments, so that its second derivative is fast."""
    normalised_axes = tuple(range(input.dim() - len(normalized_shape), input.dim()))
    e, _ = standardise(input, normalised_axes, eps)
    return _scale_and_shift(e, weight, bias, list(normalized_shape))


def _scale_and_shift(e: Tensor, weight: Tensor | None, bias: Tensor | None, shape: list[int]) -> Tensor:
    """Multiply standardised activations ``e`` by the layer's weight and add its bias, both reshaped to ``shape``."""
    if weight is not None:
        e = e * weight.reshape(shape)
    return e if bias is None else e + bias.reshape(shape)


def _group_size(x: Tensor, axes: tuple[int, ...]) -> int:
    """Return the number of entries of a group, M."""
    return math.prod(x.shape[axis] for axis in axes)
