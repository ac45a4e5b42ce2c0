"""Narrow convolutional networks on a CPU, with examples as the innermost dimension of images.

Libraries vectorise over channels, and a network like LeNet-5 has too few of them to fill a vector. Here vectors run
along the columns and examples of a row (``kernels.cpp``), of which there are always enough. Results are equal up to the
order of summation.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedflat.engines.problem.kernels import convolve, unpool, weigh

NARROW = 16
"""A convolution with fewer input channels is narrow."""
LEAST_EXAMPLES = 16
"""Smallest batch whose rows fill a vector."""


def is_narrow(model: nn.Module, examples: int) -> bool:
    """Whether a model is faster with examples innermost, for batches of ``examples``.

    All convolutions must be narrow: every change of memory layout between layers would cost a pass over the images.
    """
    convolutions = [module for module in model.modules() if isinstance(module, nn.modules.conv._ConvNd)]
    fitting = all(
        parameter.dtype == torch.float32 and parameter.device.type == "cpu" for parameter in model.parameters()
    )
    return fitting and examples >= LEAST_EXAMPLES and bool(convolutions) and all(map(_is_narrow, convolutions))


def narrowed(model: nn.Module) -> nn.Module:
    """A copy of a narrow model whose convolutions, max-pooling and ReLU layers keep examples innermost."""
    changed = copy.deepcopy(model)
    for module in list(changed.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.Conv2d):
                setattr(module, name, NarrowConvolution(child))
            elif type(child) is nn.MaxPool2d and _is_plain(child):
                setattr(module, name, NarrowMaxPool(_pair(child.kernel_size)))
            elif type(child) is nn.ReLU:
                setattr(module, name, NarrowReLU())
        if isinstance(module, nn.Sequential):
            _pool_before_relu(module)
    return changed


class NarrowConvolution(nn.Module):
    """A convolution of stride 1 that shares the parameters of ``like``."""

    def __init__(self, like: nn.Conv2d) -> None:
        super().__init__()
        self.weight, self.bias, self.padding = like.weight, like.bias, _pair(like.padding)

    def forward(self, images: Tensor) -> Tensor:
        """Images [examples, channels, height, width], in any memory layout."""
        above, beside = self.padding
        image = _in_memory_order(_padded(images.permute(1, 2, 3, 0), beside))
        bias = image.new_zeros(self.weight.shape[0]) if self.bias is None else self.bias
        weight = self.weight.permute(0, 2, 3, 1).contiguous()
        out: Tensor = _Convolve.apply(image, weight, bias, above)  # type: ignore[no-untyped-call]
        return out.permute(3, 0, 1, 2)


class NarrowMaxPool(nn.Module):
    """Max-pooling with a stride equal to the window."""

    def __init__(self, window: tuple[int, int]) -> None:
        super().__init__()
        self.window = window

    def forward(self, images: Tensor) -> Tensor:
        """Images [examples, channels, height, width], in any memory layout."""
        image = _in_memory_order(images.permute(1, 2, 3, 0))
        out: Tensor = _Pool.apply(image, *self.window)  # type: ignore[no-untyped-call]
        return out.permute(3, 0, 1, 2)


class NarrowReLU(nn.Module):
    """ReLU that preserves the memory layout of images, which the compiler would otherwise change."""

    def forward(self, values: Tensor) -> Tensor:
        """Images [examples, channels, height, width], or a tensor of any other shape."""
        return F.relu(values.permute(1, 2, 3, 0)).permute(3, 0, 1, 2) if values.ndim == 4 else F.relu(values)


class _Convolve(torch.autograd.Function):
    """Convolves an image [in, height, width, examples] with a weight [out, tall, wide, in]."""

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
            rotated = weight.flip(1, 2).transpose(0, 3).contiguous()
            no_bias, above = image.new_zeros(channels), tall - 1 - ctx.above
            image_gradient = convolve(_padded(gradient, wide - 1).contiguous(), rotated, no_bias, above)
        return image_gradient, *weigh(image, gradient, tall, wide, ctx.above), None


class _Pool(torch.autograd.Function):
    """Pools an image [channels, height, width, examples]; the gradient goes to a window's first maximum."""

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


def _in_memory_order(image: Tensor) -> Tensor:
    """A contiguous image that several kernels can read."""
    if image.requires_grad or not torch.compiler.is_compiling():
        return image.contiguous()
    from torch._inductor.inductor_prims import force_stride_order

    # Otherwise torch's compiler copies an image that no layer computed once for every kernel that reads it.
    _, height, width, examples = image.shape
    ordered: Tensor = force_stride_order(image, [height * width * examples, width * examples, examples, 1])
    return ordered


def _largest(image: Tensor, tall: int, wide: int) -> Tensor:
    height, width = image.shape[1] // tall * tall, image.shape[2] // wide * wide
    windows = [image[:, y:height:tall, x:width:wide] for y in range(tall) for x in range(wide)]
    largest = windows[0]
    for window in windows[1:]:
        largest = torch.maximum(largest, window)
    return largest


def _is_narrow(layer: nn.modules.conv._ConvNd) -> bool:
    plain = (
        type(layer) is nn.Conv2d
        and layer.stride == layer.dilation == (1, 1)
        and layer.groups == 1
        and layer.padding_mode == "zeros"
    )
    return plain and not isinstance(layer.padding, str) and layer.in_channels < NARROW


def _is_plain(layer: nn.MaxPool2d) -> bool:
    return (
        _pair(layer.kernel_size) == _pair(layer.stride)
        and _pair(layer.padding) == (0, 0)
        and _pair(layer.dilation) == (1, 1)
        and not layer.ceil_mode
        and not layer.return_indices
    )


def _pool_before_relu(layers: nn.Sequential) -> None:
    """Swap each ReLU with a max-pooling layer after it: bit-identical, and the ReLU has fewer numbers to process."""
    for number in range(len(layers) - 1):
        if type(layers[number]) is NarrowReLU and type(layers[number + 1]) is NarrowMaxPool:
            layers[number], layers[number + 1] = layers[number + 1], layers[number]


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else tuple(value)


def _padded(image: Tensor, columns: int) -> Tensor:
    """An image with ``columns`` columns of zeros on both sides."""
    return F.pad(image, (0, 0, columns, columns)) if columns else image
