"""Normalisation layers, with the same options in every model family.

``group`` (Wu and He 2018) is the default: it has no running statistics, which differ between clients with different
data, and so no buffers to average. ``batch`` has running means and variances as buffers; the experiment decides how to
aggregate them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn
from torch.nn import functional as F

from fedflat.errors import UserError
from fedflat.models.registry import ImageModelSpec
from fedflat.text import param

NORM_HELP = "normalisation: group has no buffers, batch has running statistics"
GROUPS_HELP = "channel groups of each GroupNorm (no effect for norm=batch)"
MakeNorm = Callable[[int], nn.Module]
"""Makes a normalisation layer for a number of channels."""


@dataclass(frozen=True)
class NormalisedModelSpec(ImageModelSpec):
    """Base class of image models with a normalisation layer after each convolution."""

    norm: Literal["group", "batch"] = param("group", NORM_HELP)
    groups: int = param(2, GROUPS_HELP, low=1)

    def norm_layer(self, channels: int) -> nn.Module:
        """Build a normalisation layer for ``channels`` channels, with a learned scale and shift per channel."""
        if self.norm == "batch":
            return BatchNorm(channels)
        if channels % self.groups:
            raise UserError(
                f"model {self.name}: groups={self.groups} does not divide the {channels} channels of a layer; "
                "expected a divisor such as 2"
            )
        return nn.GroupNorm(self.groups, channels)


class BatchNorm(nn.BatchNorm2d):
    """torch's BatchNorm without its batch counter, which is unused and cannot be written under grad and vmap."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalise features [n, channels, height, width]; in training, update the running statistics.

        A batch with one value per channel (one image after global pooling) has no variance; it is normalised by the
        running statistics.
        """
        mean, variance = self.running_mean, self.running_var
        # torch requires parameters and statistics of one type; statistics stay in full precision.
        weight, bias = (
            values if values is None or mean is None else values.to(mean.dtype) for values in (self.weight, self.bias)
        )
        use_batch_statistics = self.training and input.numel() > input.shape[1]
        # In torch, None means a cumulative mean, which needs the batch counter; here it disables updates.
        momentum = 0.0 if self.momentum is None else self.momentum
        return F.batch_norm(input, mean, variance, weight, bias, use_batch_statistics, momentum, self.eps)
