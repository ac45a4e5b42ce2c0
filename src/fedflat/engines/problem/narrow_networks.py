"""Narrow convolutional networks on a CPU, with examples as the innermost dimension of images.

Libraries vectorise over channels, and a network like LeNet-5 has too few of them to fill a vector. Here vectors run
along the columns and examples of a row (``kernels.cpp``), of which there are always enough. Results are equal up to the
order of summation.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fedflat.engines.problem.kernels import KernelError, convolution_gradients, convolve, max_pool, max_pool_gradient
from fedflat.engines.problem.parameters import FunctionalCall

NARROW_CHANNELS = 16
"""A convolution with fewer input channels is narrow."""
MIN_EXAMPLES = 8
"""Smallest batch for which the kernels save clearly more time than their calls from Python cost."""


def is_narrow(model: nn.Module, examples: int) -> bool:
    """Whether a model is faster with examples as the innermost dimension, for batches of ``examples`` examples.

    All convolutions must be narrow: every change of memory layout between layers would cost a pass over the images.
    """
    if examples < MIN_EXAMPLES:
        return False
    if any(parameter.dtype != torch.float32 or parameter.device.type != "cpu" for parameter in model.parameters()):
        return False
    convolutions = [module for module in model.modules() if isinstance(module, nn.modules.conv._ConvNd)]
    return bool(convolutions) and all(_is_narrow_convolution(layer) for layer in convolutions)


def narrowed(model: nn.Module) -> nn.Module:
    """Copy a narrow model, with convolutions and max-pooling that store examples innermost in memory."""
    narrow_model = copy.deepcopy(model)
    for module in narrow_model.modules():
        # Changing the class keeps everything that a model may read from its layers, such as ``kernel_size`` and hooks.
        if type(module) is nn.Conv2d:
            module.__class__ = NarrowConvolution
        elif type(module) is nn.MaxPool2d and _can_use_narrow_max_pool(module):
            module.__class__ = NarrowMaxPool
    for module in narrow_model.modules():
        if isinstance(module, nn.Sequential):
            _pool_before_relu(module)
    return narrow_model


class NarrowCall:
    """Calls a copy of a narrow model, which uses the kernels, with other tensors in place of its own."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._call: FunctionalCall | None = None
        self._is_usable: bool | None = None  # not known before the first call

    def __call__(self, tensors: Mapping[str, Tensor], inputs: Tensor) -> Any:
        """The model's output on ``inputs`` with ``tensors`` (by name); None if the kernels cannot compute it.

        The first call compiles the kernels and compares output and gradients with those of the model itself.
        """
        if self._is_usable is None:
            fault = self._fault(tensors, inputs)
            self._is_usable = fault is None
            if fault:
                warnings.warn(f"{fault}; training continues with torch's kernels, which are slower", stacklevel=3)
            else:
                self._call = FunctionalCall(narrowed(self._model))
        return self._call.call(tensors, inputs) if self._call else None

    def _fault(self, tensors: Mapping[str, Tensor], inputs: Tensor) -> str | None:
        """Why the kernels cannot be used; None if they can."""
        try:
            expected = _output_and_gradients(copy.deepcopy(self._model), tensors, inputs)
            computed = _output_and_gradients(narrowed(self._model), tensors, inputs)
        except torch.OutOfMemoryError:
            raise
        except KernelError as error:
            return f"the kernels for narrow networks could not be compiled ({error})"
        except Exception as error:  # models fail in many ways; if this one does so without kernels, torch raises again
            return f"the kernels for narrow networks do not work with this model ({type(error).__name__}: {error})"
        if len(expected) == len(computed) and all(map(_is_close, computed, expected)):
            return None
        # The copy applies max-pooling before ReLU, and a model may use what its layers compute in between.
        return "the model computes a different output with the kernels for narrow networks"


def _output_and_gradients(model: nn.Module, tensors: Mapping[str, Tensor], inputs: Tensor) -> list[Tensor]:
    """The output of a model in evaluation mode and the gradients of its squares, without side effects."""
    trained = [tensor for tensor in tensors.values() if tensor.requires_grad]
    # The forward pass may change buffers and inputs in place, and draw random numbers.
    own = {name: tensor if tensor.requires_grad else tensor.clone() for name, tensor in tensors.items()}
    with torch.random.fork_rng(devices=[]):
        outputs = tree_leaves(FunctionalCall(model.eval()).call(own, inputs.clone()))
        outputs = [output for output in outputs if isinstance(output, Tensor)]
        loss = torch.stack([output.square().mean() for output in outputs]).sum()
        gradients = torch.autograd.grad(loss, trained, allow_unused=True, materialize_grads=True)
    return [*(output.detach() for output in outputs), *gradients]


def _is_close(computed: Tensor, expected: Tensor) -> bool:
    """Whether two tensors are equal up to rounding, relative to the largest finite value."""
    if computed.shape != expected.shape or not expected.numel():
        return computed.shape == expected.shape
    largest = float(expected.abs().nan_to_num(0.0, 0.0, 0.0).max())
    return torch.allclose(computed, expected, rtol=1e-3, atol=1e-4 * largest, equal_nan=True)


def _suits_kernels(images: Tensor) -> bool:
    """Whether images are a batch of enough examples, in the type that the kernels expect."""
    return images.ndim == 4 and len(images) >= MIN_EXAMPLES and images.dtype == torch.float32


class NarrowConvolution(nn.Conv2d):
    """A convolution of stride 1 that stores examples innermost."""

    def forward(self, images: Tensor) -> Tensor:
        """Convolve images [examples, channels, height, width], in any memory layout.

        The kernel takes [channels, height, width, examples], pads rows itself, and expects padded columns.
        """
        if not _suits_kernels(images) or images.shape[1] != self.in_channels:
            return super().forward(images)
        padding_rows, padding_columns = _pair(self.padding)
        image = _pad_columns(images.permute(1, 2, 3, 0), padding_columns).contiguous()
        bias = image.new_zeros(self.weight.shape[0]) if self.bias is None else self.bias
        weight = self.weight.permute(0, 2, 3, 1).contiguous()
        output: Tensor = _Convolve.apply(image, weight, bias, padding_rows)  # type: ignore[no-untyped-call]
        return output.permute(3, 0, 1, 2)


class NarrowMaxPool(nn.MaxPool2d):
    """Max-pooling with a stride equal to the window, which stores examples innermost."""

    def forward(self, images: Tensor) -> Any:
        """Pool images [examples, channels, height, width], in any memory layout.

        They are pooled as [channels, height, width, examples], and permuted back without moving them in memory.
        """
        if not _suits_kernels(images):
            return super().forward(images)
        image = images.permute(1, 2, 3, 0).contiguous()
        output: Tensor = _MaxPool.apply(image, *_pair(self.kernel_size))  # type: ignore[no-untyped-call]
        return output.permute(3, 0, 1, 2)


class _Convolve(torch.autograd.Function):
    """``convolve`` with its gradients: images [channels, height, width, examples], weight [out, height, width, in].

    It has no ``setup_context``, with which torch would inspect the signature of ``forward`` in every call.
    """

    @staticmethod
    def forward(ctx: Any, image: Tensor, weight: Tensor, bias: Tensor, padding_rows: int) -> Tensor:
        ctx.save_for_backward(image, weight)
        ctx.padding_rows = padding_rows
        return convolve(image, weight, bias, padding_rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor, Tensor, None]:
        """Return the gradients of the inputs of ``forward``, given the gradient of its output.

        These are image, weight and bias; the padding has no gradient (None). Neither has an image that needs none, such
        as the network's input.
        """
        image, weight = ctx.saved_tensors
        _, kernel_height, kernel_width, channels = weight.shape
        gradient = gradient.contiguous()
        image_gradient = None
        if ctx.needs_input_grad[0]:
            # The gradient is convolved with the rotated kernel. ``convolve`` pads rows itself, but not columns.
            padded = _pad_columns(gradient, kernel_width - 1).contiguous()
            rotated = weight.flip(1, 2).transpose(0, 3).contiguous()
            no_bias = image.new_zeros(channels)
            image_gradient = convolve(padded, rotated, no_bias, kernel_height - 1 - ctx.padding_rows)
        weight_gradient, bias_gradient = convolution_gradients(
            image, gradient, kernel_height, kernel_width, ctx.padding_rows
        )
        return image_gradient, weight_gradient, bias_gradient, None


class _MaxPool(torch.autograd.Function):
    """Max-pooling of an image [channels, height, width, examples], with ``max_pool_gradient`` as its gradient."""

    @staticmethod
    def forward(ctx: Any, image: Tensor, window_height: int, window_width: int) -> Tensor:
        ctx.save_for_backward(image)
        ctx.window = window_height, window_width
        return max_pool(image, window_height, window_width)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (image,) = ctx.saved_tensors
        return max_pool_gradient(image, gradient.contiguous(), *ctx.window), None, None


def _is_narrow_convolution(layer: nn.modules.conv._ConvNd) -> bool:
    """Whether ``NarrowConvolution`` can replace a layer: a plain 2-D convolution with few input channels."""
    return (
        type(layer) is nn.Conv2d
        and layer.stride == layer.dilation == (1, 1)
        and layer.groups == 1
        and layer.padding_mode == "zeros"
        and not isinstance(layer.padding, str)
        and layer.in_channels < NARROW_CHANNELS
    )


def _can_use_narrow_max_pool(layer: nn.MaxPool2d) -> bool:
    """Whether ``NarrowMaxPool`` can replace a layer: its stride equals its window, and it has no other options."""
    return (
        _pair(layer.kernel_size) == _pair(layer.stride)
        and _pair(layer.padding) == (0, 0)
        and _pair(layer.dilation) == (1, 1)
        and not layer.ceil_mode
        and not layer.return_indices
    )


def _pool_before_relu(layers: nn.Sequential) -> None:
    """Swap each ReLU with a max-pooling layer after it: bit-identical, and the ReLU has fewer numbers to process."""
    for i in range(len(layers) - 1):
        if type(layers[i]) is nn.ReLU and type(layers[i + 1]) is NarrowMaxPool:
            layers[i], layers[i + 1] = layers[i + 1], layers[i]


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else tuple(value)


def _pad_columns(image: Tensor, columns: int) -> Tensor:
    """Pad an image [channels, height, width, examples] with ``columns`` columns of zeros on both sides."""
    return F.pad(image, (0, 0, columns, columns)) if columns else image
