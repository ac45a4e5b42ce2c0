"""The perturbation of the published FedLESAM and FedWMSAM code, kept to reproduce its results."""

from __future__ import annotations

import torch
from torch import Tensor

from fedflat.models.layout import Layout


def scalar_shift(direction: Tensor, layout: Layout) -> Tensor:
    """An offset of shape (P,) that shifts all entries of parameter tensor j by one scalar, v[j] / sum_j |v[j]|.

    v[j] is entry j of the flat vector ``direction`` of shape (P,), so only its first entries matter, one per parameter
    tensor. This reproduces an error of the published code, which indexes the flat vector by the number of the tensor
    (FedLESAM optimizer/LESAM.py:32,48; FedWMSAM optimizer/WMSAM.py:36,51) and divides by a sum of norms instead of one
    norm.

    >>> layout = Layout(("weight", "bias"), ((2,), (1,)))
    >>> scalar_shift(torch.tensor([3.0, -1.0, 5.0]), layout)
    tensor([ 0.7500,  0.7500, -0.2500])
    """
    count = len(layout.names)
    # Flatten each tensor in the order of its shape; ``direction`` may store it in another order (channels last).
    # More than ``count`` entries of a tensor are never needed.
    flat = torch.cat([tensor.reshape(-1)[:count] for tensor in layout.views(direction).values()])
    v = flat[:count]
    return layout.per_tensor(v / (v.abs().sum() + 1e-12))
