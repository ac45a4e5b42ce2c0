"""Normalisation layers by policy, so that every family offers the same choice.

``group`` (Wu and He 2018) is the default: it keeps no statistics, which differ between clients when their data do, and so has no
buffers to average. ``batch`` keeps running means and variances as buffers; what happens to them is the experiment's choice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedflat.errors import UserError
from fedflat.models.spec import ImageModelSpec
from fedflat.text import param


@dataclass(frozen=True)
class NormalisedModelSpec(ImageModelSpec):
    """The description of a model for images whose convolutions are each followed by a normalisation."""

    norm: Literal["group", "batch"] = param(
        "group", "normalisation: group keeps no buffers, batch keeps running statistics"
    )
    groups: int = param(2, "channel groups of each GroupNorm (without effect for norm=batch)", low=1)

    def norm_layer(self, channels: int) -> nn.Module:
        """The normalisation of this many channels, with one learned scale and shift per channel."""
        if self.norm == "batch":
            return BatchNorm(channels)
        if channels % self.groups:
            raise UserError(
                f"model {self.name}: groups={self.groups} does not divide the {channels} channels of a layer; expected a divisor such as 2"
            )
        return nn.GroupNorm(self.groups, channels)


class BatchNorm(nn.BatchNorm2d):
    """torch's BatchNorm without counting batches: the count is not used, and writing it would be refused under grad and vmap."""

    def forward(self, input: Tensor) -> Tensor:
        """The normalised features; in training the running statistics follow the batch's with the layer's momentum.

        A batch with a single value per channel, one image after global pooling, has no variance: the running statistics stand in for it.
        """
        momentum = 0.0 if self.momentum is None else self.momentum
        of_batch = self.training and input.numel() > input.shape[1]
        weight, bias = (None if p is None else p.to(_precision(self.running_mean, p)) for p in (self.weight, self.bias))
        return F.batch_norm(input, self.running_mean, self.running_var, weight, bias, of_batch, momentum, self.eps)


def _precision(statistics: Tensor | None, parameter: Tensor) -> torch.dtype:
    """That of the statistics, which are kept in full where a network computes in less: torch wants both alike."""
    return parameter.dtype if statistics is None else statistics.dtype
