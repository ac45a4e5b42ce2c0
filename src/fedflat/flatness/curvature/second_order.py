"""Layers that stand in for torch's own while a Hessian is looked at: the same values, and second derivatives that cost little."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from fedflat.flatness.curvature.convolution import convolution
from fedflat.flatness.curvature.normalisation import group_norm, layer_norm

STAND_INS: dict[Callable[..., Any], Callable[..., Any]] = {
    **{theirs: partial(convolution, theirs) for theirs in (torch.conv1d, torch.conv2d, torch.conv3d)},
    F.group_norm: group_norm,
    F.layer_norm: layer_norm,
}


class TwiceDifferentiable(TorchFunctionMode):
    """Within it, every convolution, GroupNorm and LayerNorm of a model is one of ours.

    >>> x, w = torch.ones(1, 1, 3), torch.ones(1, 1, 2)
    >>> with TwiceDifferentiable():
    ...     F.conv1d(x, w, torch.ones(1))
    tensor([[[3., 3.]]])
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call a function of torch, or what stands in for it."""
        return STAND_INS.get(func, func)(*args, **kwargs or {})
