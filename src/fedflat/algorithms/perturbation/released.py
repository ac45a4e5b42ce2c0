"""The scalar shift of the released FedLESAM and FedWMSAM code, kept to reproduce their published numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from fedflat.models.layout import Layout


def scalar_shift(direction: Tensor, layout: Layout) -> Tensor:
    """Every tensor j shifted by one number, v[j] / sum_j |v[j]|, where v[j] is the j-th coordinate of the whole flat direction.

    The released code indexes a flat vector by the number of the tensor (FedLESAM optimizer/LESAM.py:32,48; FedWMSAM
    optimizer/WMSAM.py:36,51) and divides by a sum of norms instead of one norm.
    """
    needed, coordinates = len(layout.names), []
    for tensor in layout.views(direction).values():
        coordinates.append(tensor.reshape(-1)[:needed])
        needed -= coordinates[-1].numel()
    v = torch.cat(coordinates)
    return layout.per_tensor(v / (v.abs().sum() + 1e-12))
