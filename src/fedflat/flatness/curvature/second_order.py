"""Torch functions with fast or correct second derivatives, in place of torch's own within a context."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from fedflat.flatness.curvature.convolution import convolution
from fedflat.flatness.curvature.normalisation import group_norm, layer_norm


def weight_norm(directions: Tensor, lengths: Tensor, dim: int = 0) -> Tensor:
    """Weights of a layer with weight normalisation; torch 2.13 differentiates its own function twice incorrectly.

    Args:
        directions: one direction per index of ``dim``, or one for the whole tensor if ``dim`` is -1.
        lengths: the norms of the weights.
        dim: the dimension of the norms.
    """
    others = [other for other in range(directions.ndim) if dim == -1 or other != dim]
    norms: Tensor = torch.linalg.vector_norm(directions, dim=others, keepdim=True)
    return directions * (lengths / norms)


REPLACEMENTS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.conv1d: partial(convolution, torch.conv1d),
    torch.conv2d: partial(convolution, torch.conv2d),
    torch.conv3d: partial(convolution, torch.conv3d),
    F.group_norm: group_norm,
    F.layer_norm: layer_norm,
    torch._weight_norm: weight_norm,
}
"""Torch functions and their versions with fast or correct second derivatives."""


class TwiceDifferentiable(TorchFunctionMode):
    """Context in which convolutions, GroupNorm and LayerNorm have fast second derivatives.

    >>> x, w = torch.ones(1, 1, 3), torch.ones(1, 1, 2)
    >>> with TwiceDifferentiable():
    ...     F.conv1d(x, w, torch.ones(1))
    tensor([[[3., 3.]]])
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call ``func`` or its replacement; torch calls this for every function in the context."""
        return REPLACEMENTS.get(func, func)(*args, **kwargs or {})
