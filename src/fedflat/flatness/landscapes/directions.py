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

from typing import Literal

import torch
from torch import Tensor

from fedflat.errors import UserError, one_of
from fedflat.flatness.batches import normal
from fedflat.models.layout import Layout

OneDimensional = Literal["zero", "scaled"]
ONE_DIMENSIONAL: tuple[OneDimensional, ...] = ("zero", "scaled")


def directions_around(
    layout: Layout, weights: Tensor, seed: int = 0, count: int = 2, one_dimensional: OneDimensional = "zero"
) -> tuple[Tensor, ...]:
    """Draw ``count`` random filter-normalised directions [P].

    The random numbers depend only on ``seed`` and P, so models of the same layout share them.

    Args:
        layout: names and shapes of the model's parameters.
        weights: the model's weights, [P].
        seed: seed of the random numbers.
        count: number of directions.
        one_dimensional: treatment of one-dimensional tensors such as biases: ``zero`` leaves them out of the
            directions, ``scaled`` rescales each like a filter.
    """
    return tuple(
        filter_normalised(layout, normal(weights, seed, "landscape", number), weights, one_dimensional)
        for number in range(count)
    )


def filter_normalised(
    layout: Layout, direction: Tensor, weights: Tensor, one_dimensional: OneDimensional = "zero"
) -> Tensor:
    """Return ``direction`` [P] with each filter d rescaled to the norm of the model's filter w: d ||w|| / ||d||.

    A filter that is zero in ``weights`` or in ``direction`` is zero in the result.

    Args:
        layout: names and shapes of the model's parameters.
        direction: the vector to rescale, [P].
        weights: the model's weights, [P].
        one_dimensional: treatment of one-dimensional tensors such as biases: ``zero`` sets them to zero, ``scaled``
            rescales each like a filter.
    """
    if one_dimensional not in ONE_DIMENSIONAL:
        raise one_of("treatment of one-dimensional tensors", one_dimensional, ONE_DIMENSIONAL)
    if not len(direction) == len(weights) == layout.size:
        raise UserError(
            f"direction has {len(direction)} entries and weights {len(weights)}; expected {layout.size} each"
        )
    weight_tensors = layout.views(weights)
    rescaled = {}
    for name, tensor in layout.views(direction).items():
        if tensor.ndim <= 1 and one_dimensional == "zero":
            rescaled[name] = torch.zeros_like(tensor)
        else:
            rescaled[name] = _rescale_filters(tensor, weight_tensors[name])
    return layout.flatten(rescaled)


def _rescale_filters(direction: Tensor, weights: Tensor) -> Tensor:
    """Return ``direction`` with each filter rescaled to the norm of that filter in ``weights``, of the same shape.

    A filter of norm 0 stays 0.
    """
    direction_norms, weight_norms = _filter_norms(direction), _filter_norms(weights)
    factors = weight_norms / direction_norms
    return direction * torch.where(direction_norms > 0, factors, torch.zeros_like(factors))


def _filter_norms(tensor: Tensor) -> Tensor:
    """Return the norm of each filter, in a shape that broadcasts against ``tensor``.

    The filters of a tensor are its slices along the first dimension; a tensor of at most one dimension is one filter.
    """
    if tensor.ndim == 0:
        return tensor.abs()
    filter_axes = tuple(range(1, tensor.ndim)) if tensor.ndim > 1 else (0,)
    norms: Tensor = torch.linalg.vector_norm(tensor, dim=filter_axes, keepdim=True)
    return norms
