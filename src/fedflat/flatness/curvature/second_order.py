"""Torch functions with fast second derivatives, in place of torch's own within a context."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from fedflat.flatness.curvature.convolution import convolution
from fedflat.flatness.curvature.normalisation import group_norm, layer_norm

REPLACEMENTS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.conv1d: partial(convolution, torch.conv1d),
    torch.conv2d: partial(convolution, torch.conv2d),
    torch.conv3d: partial(convolution, torch.conv3d),
    F.group_norm: group_norm,
    F.layer_norm: layer_norm,
}
"""Torch functions and their versions with fast second derivatives."""


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
