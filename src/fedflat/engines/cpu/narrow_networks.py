"""Narrow convolutional networks on a CPU, where images lie with their examples innermost.

Libraries run vectors along channels, of which a network like LeNet-5 has too few to fill them. Here vectors run along a row's columns and
examples (``kernels.cpp``), which are always many. The numbers are the same up to the order of sums.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedflat.engines.cpu.kernels import convolve, unpool, weigh

NARROW = 16
"""Channels of its input below which a convolution is narrow."""
LEAST_EXAMPLES = 16
"""Examples from which on a row fills vectors."""


def is_narrow(model: nn.Module, examples: int) -> bool:
    """Whether examples are to lie innermost in this model on a CPU.

    A model is changed whole or not at all: every border between two memory orders would cost a pass over an image.
    """
    convolutions = [module for module in model.modules() if isinstance(module, nn.modules.conv._ConvNd)]
    fitting = all(
        parameter.dtype == torch.float32 and parameter.device.type == "cpu" for parameter in model.parameters()
    )
    return (
        fitting and examples >= LEAST_EXAMPLES and bool(convolutions) and all(_is_narrow(one) for one in convolutions)
    )


def narrowed(model: nn.Module) -> nn.Module:
    """A copy of a narrow model whose convolutions and max-poolings keep examples innermost."""
    changed = copy.deepcopy(model)
    for module in list(changed.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.Conv2d):
                setattr(module, name, Convolution(child))
            elif type(child) is nn.MaxPool2d and _is_plain(child):
                setattr(module, name, Pooling(_pair(child.kernel_size)))
            elif type(child) is nn.ReLU:
                setattr(module, name, Rectifier())
        if isinstance(module, nn.Sequential):
            _pool_before_relu(module)
    return changed


class Convolution(nn.Module):
    """A convolution of stride 1, with the parameters of another."""

    def __init__(self, like: nn.Conv2d) -> None:
        super().__init__()
        self.weight, self.bias, self.padding = like.weight, like.bias, _pair(like.padding)

    def forward(self, images: Tensor) -> Tensor:
        """Images in torch's order of dimensions, whatever their order in memory."""
        above, beside = self.padding
        image = _settled(_wider(images.permute(1, 2, 3, 0), beside))
        bias = image.new_zeros(self.weight.shape[0]) if self.bias is None else self.bias
        out: Tensor = _Convolve.apply(image, self.weight.permute(0, 2, 3, 1).contiguous(), bias, above)  # type: ignore[no-untyped-call]
        return out.permute(3, 0, 1, 2)


class Pooling(nn.Module):
    """Max-pooling over windows that lie side by side."""

    def __init__(self, window: tuple[int, int]) -> None:
        super().__init__()
        self.window = window

    def forward(self, images: Tensor) -> Tensor:
        """Images in torch's order of dimensions, whatever their order in memory."""
        out: Tensor = _Pool.apply(_settled(images.permute(1, 2, 3, 0)), *self.window)  # type: ignore[no-untyped-call]
        return out.permute(3, 0, 1, 2)


class Rectifier(nn.Module):
    """ReLU of images in their order in memory, which the compiler would lose sight of, or of anything else."""

    def forward(self, values: Tensor) -> Tensor:
        """What is positive."""
        return F.relu(values.permute(1, 2, 3, 0)).permute(3, 0, 1, 2) if values.ndim == 4 else F.relu(values)


class _Convolve(torch.autograd.Function):
    """Image [in, height, width, examples], weight [out, tall, wide, in]; the image's gradient is a convolution with the weight turned."""

    @staticmethod
    def forward(image: Tensor, weight: Tensor, bias: Tensor, above: int) -> Tensor:
        return convolve(image, weight, bias, above)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:2])
        ctx.above = inputs[3]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor, Tensor, None]:
        image, weight = ctx.saved_tensors
        _, tall, wide, channels = weight.shape
        gradient = gradient.contiguous()
        image_gradient = None
        if ctx.needs_input_grad[0]:
            turned = weight.flip(1, 2).transpose(0, 3).contiguous()
            nothing, above = image.new_zeros(channels), tall - 1 - ctx.above
            image_gradient = convolve(_wider(gradient, wide - 1).contiguous(), turned, nothing, above)
        return image_gradient, *weigh(image, gradient, tall, wide, ctx.above), None


class _Pool(torch.autograd.Function):
    """Image [channels, height, width, examples]; the gradient goes to the first of a window's largest numbers, as torch's does."""

    @staticmethod
    def forward(image: Tensor, tall: int, wide: int) -> Tensor:
        return _largest(image, tall, wide)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.window = inputs[1:]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return unpool(ctx.saved_tensors[0], gradient.contiguous(), *ctx.window), None, None


def _settled(image: Tensor) -> Tensor:
    """An image as it lies in memory, where several functions can read it."""
    if image.requires_grad or not torch.compiler.is_compiling():
        return image.contiguous()
    from torch._inductor.inductor_prims import force_stride_order

    # What is not computed by a layer, torch's compiler would copy for each of the functions that read it; this asks for one copy.
    _, height, width, examples = image.shape
    settled: Tensor = force_stride_order(image, [height * width * examples, width * examples, examples, 1])
    return settled


def _largest(image: Tensor, tall: int, wide: int) -> Tensor:
    height, width = image.shape[1] // tall * tall, image.shape[2] // wide * wide
    windows = [image[:, y:height:tall, x:width:wide] for y in range(tall) for x in range(wide)]
    largest = windows[0]
    for window in windows[1:]:
        largest = torch.maximum(largest, window)
    return largest


def _is_narrow(one: nn.modules.conv._ConvNd) -> bool:
    plain = (
        type(one) is nn.Conv2d
        and one.stride == one.dilation == (1, 1)
        and one.groups == 1
        and one.padding_mode == "zeros"
    )
    return plain and not isinstance(one.padding, str) and one.in_channels < NARROW


def _is_plain(one: nn.MaxPool2d) -> bool:
    side_by_side = _pair(one.kernel_size) == _pair(one.stride)
    return (
        side_by_side
        and _pair(one.padding) == (0, 0)
        and _pair(one.dilation) == (1, 1)
        and not one.ceil_mode
        and not one.return_indices
    )


def _pool_before_relu(layers: nn.Sequential) -> None:
    """Let a ReLU follow the pooling that it precedes, which is the same to the bit and leaves it a part of the numbers."""
    for number in range(len(layers) - 1):
        if type(layers[number]) is Rectifier and type(layers[number + 1]) is Pooling:
            layers[number], layers[number + 1] = layers[number + 1], layers[number]


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else tuple(value)


def _wider(image: Tensor, columns: int) -> Tensor:
    """An image with columns of zeros at both sides."""
    return F.pad(image, (0, 0, columns, columns)) if columns else image
