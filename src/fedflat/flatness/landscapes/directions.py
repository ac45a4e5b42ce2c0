"""Random, filter-normalised directions, so that landscapes of models of any scale are comparable.

Scaling one layer of a ReLU network up and the next one down leaves its function unchanged, but along a plain random
direction the larger weights look flatter. Filter normalisation (Li et al. 2018, section 4) gives each filter of the
direction the norm of the model's filter,

    d_ij <- d_ij / ||d_ij|| * ||w_ij||,

where filter j of tensor i produces one output: a convolution kernel, a row of a linear layer, an embedding or a gate.
One-dimensional tensors (biases, normalisation scales and shifts) have no filters. They are not moved (``zero``, as in
the commands published with the paper), or each counts as one filter (``scaled``).

>>> layout = Layout.of({"a.weight": torch.zeros(2, 2), "a.bias": torch.zeros(2)})
>>> direction, weights = torch.tensor([3.0, 4.0, 0.0, 2.0, 1.0, 1.0]), torch.tensor([0.0, 10.0, 0.0, 1.0, 5.0, 5.0])
>>> filter_normalised(layout, direction, weights).tolist()
[6.0, 8.0, 0.0, 1.0, 0.0, 0.0]
"""

from __future__ import annotations

import zlib
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedflat.errors import UserError, one_of
from fedflat.models.layout import Layout

OneDimensional = Literal["zero", "scaled"]
ONE_DIMENSIONAL: tuple[OneDimensional, ...] = ("zero", "scaled")


def random_direction(size: int, seed: int, number: int, like: Tensor) -> Tensor:
    """Direction ``number`` of a seed, [size]: standard normal, identical on every device."""
    draws = np.random.default_rng(np.random.SeedSequence([seed, zlib.crc32(b"landscape"), number])).standard_normal(
        size
    )
    return torch.from_numpy(draws).to(like.device, like.dtype)


def filter_normalised(
    layout: Layout, direction: Tensor, weights: Tensor, one_dimensional: OneDimensional = "zero"
) -> Tensor:
    """``direction`` [P] rescaled so that each filter has the norm of the model's: d_ij ||w_ij|| / ||d_ij||.

    A filter that is zero in ``weights`` or in ``direction`` is zero in the result.
    """
    if one_dimensional not in ONE_DIMENSIONAL:
        raise one_of("treatment of one-dimensional tensors", one_dimensional, ONE_DIMENSIONAL)
    if not len(direction) == len(weights) == layout.size:
        raise UserError(
            f"direction has {len(direction)} entries and weights {len(weights)}; expected {layout.size} each"
        )
    views = layout.views(weights)
    return layout.flatten(
        {name: _scaled(d, views[name], one_dimensional) for name, d in layout.views(direction).items()}
    )


def _scaled(direction: Tensor, weights: Tensor, one_dimensional: OneDimensional) -> Tensor:
    if direction.ndim <= 1 and one_dimensional == "zero":
        return torch.zeros_like(direction)
    inside = tuple(range(1, direction.ndim)) if direction.ndim > 1 else tuple(range(direction.ndim))
    old, new = (_norms(tensor, inside) for tensor in (direction, weights))
    return direction * torch.where(old > 0, new / old, torch.zeros_like(old))


def _norms(tensor: Tensor, inside: tuple[int, ...]) -> Tensor:
    return tensor.abs() if not inside else torch.linalg.vector_norm(tensor, dim=inside, keepdim=True)


def directions_around(
    layout: Layout, weights: Tensor, seed: int = 0, count: int = 2, one_dimensional: OneDimensional = "zero"
) -> tuple[Tensor, ...]:
    """``count`` random, filter-normalised directions [P]; the same random numbers for every model of this layout."""
    return tuple(
        filter_normalised(layout, random_direction(layout.size, seed, number, weights), weights, one_dimensional)
        for number in range(count)
    )
