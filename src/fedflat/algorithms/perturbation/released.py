"""The perturbation of the published FedLESAM and FedWMSAM code, kept to reproduce its results."""

from __future__ import annotations

import torch
from torch import Tensor

from fedflat.models.layout import Layout


def scalar_shift(direction: Tensor, layout: Layout) -> Tensor:
    """An offset of shape (P,) that shifts all entries of parameter tensor j by one scalar, v[j] / sum_j |v[j]|.

    v[j] is entry j of the flat vector ``direction`` of shape (P,), so only its first entries are used, one per tensor.
    The published code indexes the flat vector by tensor number (FedLESAM optimizer/LESAM.py:32,48; FedWMSAM
    optimizer/WMSAM.py:36,51) and divides by a sum of norms instead of one norm.

    >>> layout = Layout(("weight", "bias"), ((2,), (1,)))
    >>> scalar_shift(torch.tensor([3.0, -1.0, 5.0]), layout)
    tensor([ 0.7500,  0.7500, -0.2500])
    """
    tensors = len(layout.names)
    # In the order of each tensor's shape, which may differ from the order in the flat vector (channels last).
    flat = torch.cat([tensor.reshape(-1)[:tensors] for tensor in layout.views(direction).values()])
    v = flat[:tensors]
    return layout.per_tensor(v / (v.abs().sum() + 1e-12))
