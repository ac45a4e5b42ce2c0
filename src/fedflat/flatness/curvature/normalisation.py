"""GroupNorm and LayerNorm with fast second derivatives.

Over the M entries of a group, x is standardised to xhat = (x - mean x) rstd with rstd = 1 / sqrt(var x + eps). Let
g be the gradient of the loss with respect to xhat, and s that with respect to rstd. The gradient with respect to x is

    dx = rstd (P g - xhat rstd s / M)        P g = g - mean g - xhat mean(xhat g)

The map P is symmetric, so the second derivative, i.e. the gradients of <u, rstd P g> for a vector u, is short:

    w.r.t. g: rstd P u        w.r.t. xhat: -rstd (mean(xhat u) g + mean(xhat g) u)        w.r.t. rstd: <u, P g>

torch's own second derivatives of these layers make about a hundred passes over the activations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class Standardise(torch.autograd.Function):
    """Maps x to xhat, with mean 0 and variance 1 in each group, and rstd, the inverse standard deviation of a group.

    A group is the set of entries along ``axes``.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, axes: tuple[int, ...], eps: float) -> tuple[Tensor, Tensor]:
        """Return xhat = (x - mean) rstd and rstd = 1 / sqrt(variance + eps), with statistics over ``axes``.

        rstd is an output only so that second derivatives can flow through it.
        """
        variance, mean = torch.var_mean(x, axes, correction=0, keepdim=True)
        rstd = (variance + eps).rsqrt()
        xhat = (x - mean) * rstd
        ctx.save_for_backward(xhat, rstd)
        ctx.axes = axes
        ctx.set_materialize_grads(False)  # the gradient of an unused output is None instead of zeros
        return xhat, rstd

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return the gradient of x, given those of the outputs xhat and rstd; they are None for an unused output.

        It is the sum of the gradient through xhat, which ``standardise_gradient`` computes, and the gradient through
        rstd, -xhat rstd^2 grad_rstd / M with M entries per group. ``axes`` and ``eps`` have no gradient.
        """
        grad_xhat, grad_rstd = gradients
        xhat, rstd = ctx.saved_tensors
        grad_x = None if grad_xhat is None else standardise_gradient(grad_xhat, xhat, rstd, ctx.axes)
        if grad_rstd is not None:
            through_rstd = xhat * (rstd * rstd * grad_rstd / _group_size(xhat, ctx.axes))
            grad_x = -through_rstd if grad_x is None else grad_x - through_rstd
        return grad_x, None, None


class StandardiseGradient(torch.autograd.Function):
    """Maps g, the gradient of the standardised activations xhat, to the gradient rstd P g of the layer's input x.

    P g = g - mean(g) - xhat mean(xhat g) removes the mean and the component along xhat from g, in each group.
    """

    @staticmethod
    def forward(ctx: Any, g: Tensor, xhat: Tensor, rstd: Tensor, axes: tuple[int, ...]) -> Tensor:
        """Return rstd P g; ``rstd`` is the inverse standard deviation of each group of entries along ``axes``."""
        g_mean, xhat_g_mean = g.mean(axes, keepdim=True), (xhat * g).mean(axes, keepdim=True)
        ctx.save_for_backward(g, xhat, rstd, g_mean, xhat_g_mean)
        ctx.axes = axes
        return (g - g_mean - xhat * xhat_g_mean) * rstd

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, u: Tensor) -> Any:
        """Return the gradients of g, xhat and rstd, given the gradient u of the result rstd P g; axes have none.

        They are rstd P u, -rstd (mean(xhat u) g + mean(xhat g) u), and the inner product <u, P g> within each group.
        """
        g, xhat, rstd, g_mean, xhat_g_mean = ctx.saved_tensors
        u_mean, xhat_u_mean = u.mean(ctx.axes, keepdim=True), (xhat * u).mean(ctx.axes, keepdim=True)
        grad_g = (u - u_mean - xhat * xhat_u_mean) * rstd
        grad_xhat = (xhat_u_mean * g + xhat_g_mean * u) * -rstd
        u_g_mean = (u * g).mean(ctx.axes, keepdim=True)
        grad_rstd = (u_g_mean - u_mean * g_mean - xhat_u_mean * xhat_g_mean) * _group_size(xhat, ctx.axes)
        return grad_g, grad_xhat, grad_rstd, None


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
    axis = x.dim() - 1 if channels_last else 1  # the channel axis
    # Split the channel axis into (groups, channels per group); statistics are over everything within a group.
    grouped = x.reshape(*x.shape[:axis], num_groups, -1, *x.shape[axis + 1 :])
    within_group = tuple(dim for dim in range(1, grouped.dim()) if dim != axis)
    standardised, _ = standardise(grouped, within_group, eps)
    per_channel = [1] * x.dim()  # shape of weight and bias that broadcasts along the channel axis
    per_channel[axis] = -1
    output = _scale_and_shift(standardised.flatten(axis, axis + 1), weight, bias, per_channel)
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
    standardised, _ = standardise(input, normalised_axes, eps)
    return _scale_and_shift(standardised, weight, bias, list(normalized_shape))


def _scale_and_shift(x: Tensor, weight: Tensor | None, bias: Tensor | None, shape: list[int]) -> Tensor:
    """Multiply standardised activations ``x`` by the layer's weight and add its bias, both reshaped to ``shape``."""
    if weight is not None:
        x = x * weight.reshape(shape)
    return x if bias is None else x + bias.reshape(shape)


def _group_size(x: Tensor, axes: tuple[int, ...]) -> int:
    """Return the number of entries of a group, the set of entries along ``axes``."""
    return math.prod(x.shape[axis] for axis in axes)
