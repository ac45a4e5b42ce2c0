"""Layers that a GPU's compiler does better than torch's own, in a copy of a model: the same numbers, up to the order of sums.

Images lie channels last. torch's GroupNorm turns them round on a GPU, so that every convolution after one, and every gradient before one,
copies them back. And convolutions of three channels do not fill matrix units.
"""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FEW_CHANNELS = 4
LEAST_PATCH, MOST_PATCHES = 64, 2**25
"""A convolution of few channels is a product of matrices from so many numbers in a patch on, up to so many in all patches of a batch."""
MULTIPLE = 8
"""Matrix units want rows of a multiple of this many numbers."""


def with_gpu_layers(model: nn.Module) -> nn.Module:
    """A copy of a model with the same tensors, in which a GPU's layers stand for torch's; the model itself where nothing is exchanged."""
    if not any(_for_gpu(module) for module in model.modules()):
        return model
    changed = copy.deepcopy(model, {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]})
    for module in changed.modules():
        # The module stays, and only what it computes by changes: it may be used in several places, and by several names.
        module.__class__ = _for_gpu(module) or module.__class__
    return changed


class GroupNorm(nn.GroupNorm):
    """A GroupNorm of images that lie channels last, and stay so."""

    def forward(self, input: Tensor) -> Tensor:
        """Images in torch's order of dimensions, or anything else; statistics have at least single precision.

        A scale and a shift for each example and channel: all gradients then come from two sums over pixels, which are taken in one pass.
        """
        if input.ndim != 4:
            return super().forward(input)
        examples, channels, height, width = input.shape
        pixels = input.permute(0, 2, 3, 1).reshape(
            examples, height, width, self.num_groups, channels // self.num_groups
        )
        values = pixels.to(torch.promote_types(input.dtype, torch.float32))
        variance, mean = torch.var_mean(values, (1, 2, 4), correction=0, keepdim=True)
        scale = torch.rsqrt(variance + self.eps) * self.weight.view(self.num_groups, -1)
        shift = self.bias.view(self.num_groups, -1) - mean * scale
        normalised = (values * scale + shift).to(input.dtype)
        return normalised.reshape(examples, height, width, channels).permute(0, 3, 1, 2)


class PatchConvolution(nn.Conv2d):
    """A convolution as a product of matrices: a row for each patch of an image, a product for each image.

    One product for all images would leave the weight's gradient, which is small, to few of the GPU's processors.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Images in torch's order of dimensions; the outcome lies channels last."""
        outputs, _, tall, wide = self.weight.shape
        above, beside = (int(side) for side in self.padding)
        pixels = F.pad(input, (beside, beside, above, above)).permute(0, 2, 3, 1)
        patches = pixels.unfold(1, tall, self.stride[0]).unfold(2, wide, self.stride[1]).permute(0, 1, 2, 4, 5, 3)
        examples, height, width = patches.shape[:3]
        if (
            patches.numel() > MOST_PATCHES or height * width < self.weight[0].numel()
        ):  # gradients of so few patches are larger than they
            return super().forward(input)
        rows = _filled_up(patches.reshape(examples, height * width, -1))
        kernel = _filled_up(self.weight.permute(0, 2, 3, 1).reshape(outputs, -1))
        product = torch.bmm(rows, kernel.T.expand(examples, -1, -1))
        convolved = product.view(examples, height, width, outputs).permute(0, 3, 1, 2)
        return convolved if self.bias is None else convolved + self.bias[:, None, None]


def _filled_up(rows: Tensor) -> Tensor:
    return F.pad(rows, (0, -rows.shape[-1] % MULTIPLE))


def _for_gpu(layer: nn.Module) -> type[nn.Module] | None:
    """The class of layer that stands for one of torch's."""
    if type(layer) is nn.GroupNorm and layer.weight is not None and layer.bias is not None:
        return GroupNorm
    return PatchConvolution if type(layer) is nn.Conv2d and _has_few_channels(layer) else None


def _has_few_channels(one: nn.Conv2d) -> bool:
    plain = (
        one.dilation == (1, 1) and one.groups == 1 and one.padding_mode == "zeros" and not isinstance(one.padding, str)
    )
    return plain and one.in_channels <= FEW_CHANNELS and one.weight[0].numel() >= LEAST_PATCH
