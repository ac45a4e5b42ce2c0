"""Replacements for layers that are faster on a GPU; results are equal up to rounding.

Images are stored channels last. On a GPU, torch's GroupNorm copies them to the default memory format, and the next
convolution copies them back. Convolutions of three channels do not fill the GPU's matrix units.
"""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedflat.engines.problem.layer_chain import is_changed
from fedflat.models.resnet import BasicBlock

try:
    from fedflat.engines.gpu.triton_norm import DTYPES, FusedGroupNorm
except ImportError:  # torch for CPUs comes without Triton, and an older torch cannot compile the kernels' derivative
    DTYPES, FusedGroupNorm = (), None  # type: ignore[assignment,misc]

FEW_CHANNELS = 4
"""Input channels up to which a convolution may be replaced."""
LEAST_PATCH, MOST_PATCHES = 64, 2**25
"""Bounds for computing a convolution as a matrix product of patches, i.e. the parts of the image under the kernel.

One patch must contain at least ``LEAST_PATCH`` numbers, and all patches of a batch together at most ``MOST_PATCHES``.
"""
MULTIPLE = 8
"""Matrix units need rows whose length is a multiple of this."""


def with_gpu_layers(model: nn.Module) -> nn.Module:
    """Return a copy of a model that shares its tensors but has faster GroupNorm and convolution layers.

    A model without layers to replace is returned itself.
    """
    if not any(_replacement(module) for module in model.modules()):
        return model
    shared_tensors = {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]}
    fast_model = copy.deepcopy(model, memo=shared_tensors)
    for module in fast_model.modules():
        # Change the class in place: a module may be used in several places and under several names.
        module.__class__ = _replacement(module) or module.__class__
    return fast_model


class ChannelsLastGroupNorm(nn.GroupNorm):
    """A GroupNorm that keeps images channels last."""

    def forward(self, input: Tensor, added: Tensor | None = None, relu: bool = False) -> Tensor:
        """Normalise images [n, channels, height, width]; torch's GroupNorm handles inputs of other shapes.

        Means and variances are computed in float32 or higher precision. On a GPU, a Triton kernel does all the work.

        Args:
            input: the images.
            added: added to the normalised images; None adds nothing.
            relu: whether to apply a ReLU to the result.
        """
        fits = input.is_cuda and input.dtype in DTYPES and input.ndim == 4 and input.shape[1] == self.num_channels
        if fits and (added is None or (added.shape, added.dtype) == (input.shape, input.dtype)):
            parameters = self.weight, self.bias, self.num_groups, self.eps
            result: Tensor = FusedGroupNorm.apply(input, *parameters, added, relu)[0]  # type: ignore[no-untyped-call]
            return result
        output = self._normalised(input) if input.ndim == 4 else super().forward(input)
        output = output if added is None else output + added
        return F.relu(output) if relu else output

    def _normalised(self, input: Tensor) -> Tensor:
        """Normalise images by one scale and one shift per example and channel, so that one pass gives all gradients."""
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


class FusedBasicBlock(BasicBlock):
    """A block whose ReLUs and sum are computed together with its GroupNorm layers."""

    def forward(self, x: Tensor) -> Tensor:
        first, first_norm, _, second, second_norm = self.residual
        hidden = first_norm(first(x), relu=True)
        output: Tensor = second_norm(second(hidden), added=self.shortcut(x), relu=True)
        return output


class PatchConvolution(nn.Conv2d):
    """A convolution computed as one matrix product per image ("im2col").

    A patch is the part of the image under the kernel at one position. The matrix of an image has one row per patch, and
    its product with the flattened kernels gives all output pixels. A single product for all images would compute the
    weight's small gradient on only a few of the GPU's processors.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Convolve images [n, channels, height, width]; the result is channels last.

        Falls back to torch's convolution if the matrix of patches would be too large or too short to pay off.
        """
        outputs, _, kernel_height, kernel_width = self.weight.shape
        row_padding, column_padding = (int(padding) for padding in self.padding)
        padded = F.pad(input, (column_padding, column_padding, row_padding, row_padding)).permute(0, 2, 3, 1)
        windows = padded.unfold(1, kernel_height, self.stride[0]).unfold(2, kernel_width, self.stride[1])
        patches = windows.permute(0, 1, 2, 4, 5, 3)  # [n, height, width, kernel_height, kernel_width, channels]
        examples, height, width = patches.shape[:3]  # height and width of the output
        # With fewer patches than weights, the gradients would be larger than the patches.
        if patches.numel() > MOST_PATCHES or height * width < self.weight[0].numel():
            return super().forward(input)
        matrices = _pad_to_multiple(patches.reshape(examples, height * width, -1))  # [n, patches, weights of a kernel]
        kernels = _pad_to_multiple(self.weight.permute(0, 2, 3, 1).reshape(outputs, -1))  # in the order of the patches
        product = torch.bmm(matrices, kernels.T.expand(examples, -1, -1))  # [n, patches, outputs]
        convolved = product.view(examples, height, width, outputs).permute(0, 3, 1, 2)
        return convolved if self.bias is None else convolved + self.bias[:, None, None]


def _pad_to_multiple(rows: Tensor) -> Tensor:
    """Append zeros to each row until its length is a multiple of ``MULTIPLE``."""
    return F.pad(rows, (0, -rows.shape[-1] % MULTIPLE))


def _replacement(layer: nn.Module) -> type[nn.Module] | None:
    """The faster class to use for a layer instead of its own; None to keep the layer."""
    if type(layer) is nn.GroupNorm and layer.weight is not None and layer.bias is not None:
        return ChannelsLastGroupNorm
    if type(layer) is BasicBlock and _suits_fusion(layer):
        return FusedBasicBlock
    return PatchConvolution if type(layer) is nn.Conv2d and _suits_patches(layer) else None


def _suits_fusion(block: BasicBlock) -> bool:
    """Whether a block is unmodified and has GroupNorm layers."""
    if len(block.residual) != 5 or is_changed(block.residual):
        return False
    _, first_norm, activation, _, second_norm = block.residual
    norms = {_replacement(first_norm), _replacement(second_norm)}
    is_default = norms == {ChannelsLastGroupNorm} and type(activation) is nn.ReLU
    return is_default and not any(map(is_changed, (first_norm, activation, second_norm)))


def _suits_patches(layer: nn.Conv2d) -> bool:
    """Whether a convolution is plain, has few input channels, and has patches large enough for a matrix product."""
    zero_padded = layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    plain = layer.dilation == (1, 1) and layer.groups == 1 and zero_padded
    return plain and layer.in_channels <= FEW_CHANNELS and layer.weight[0].numel() >= LEAST_PATCH
