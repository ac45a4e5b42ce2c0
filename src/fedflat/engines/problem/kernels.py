"""The functions in ``kernels.cpp`` as torch operators, compiled for each shape on first use.

Images are [channels, height, width, examples] and weights [out, kernel_height, kernel_width, in], float32 on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import c_void_p
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

Operator = TypeVar("Operator", bound=Callable[..., Any])


def _operator(signature: str, empty_outputs: Callable[..., Any]) -> Callable[[Operator], Operator]:
    """Decorate a function that runs a C++ kernel: it becomes a torch operator, which compiled code can call.

    Args:
        signature: the operator's arguments and result in torch's schema language.
        empty_outputs: allocates the outputs for the same arguments; torch's compiler derives their shapes from it.
    """

    def register(function: Operator) -> Operator:
        """Register the function as an operator of torch's CPU backend, and return the operator."""
        name = f"fedflat::{function.__name__}"
        torch.library.define(name, signature)
        torch.library.register_fake(name, empty_outputs)
        torch.library.impl(name, "CPU", function)
        operator: Operator = getattr(torch.ops.fedflat, function.__name__)
        return operator

    return register


def _empty_convolution(image: Tensor, weight: Tensor, bias: Tensor, padding_rows: int) -> Tensor:
    """Allocate the output of ``convolve``, which has the same arguments."""
    out, kernel_height, kernel_width, _ = weight.shape
    _, height, width, examples = image.shape
    return image.new_empty(out, height + 2 * padding_rows - kernel_height + 1, width - kernel_width + 1, examples)


@_operator("(Tensor image, Tensor weight, Tensor bias, int padding_rows) -> Tensor", _empty_convolution)
def convolve(image: Tensor, weight: Tensor, bias: Tensor, padding_rows: int) -> Tensor:
    """Convolve with stride 1, after padding ``padding_rows`` rows of zeros at the top and bottom, but no columns.

    Args:
        image: [in, height, width, examples].
        weight: [out, kernel_height, kernel_width, in].
        bias: [out].
        padding_rows: rows of zero padding on each side.

    Returns:
        The image [out, output height, output width, examples].
    """
    output = _empty_convolution(image, weight, bias, padding_rows)
    compiled_convolve = _compiled("convolve", image.shape, weight.shape[1:3], weight.shape[0], padding_rows)
    compiled_convolve(image, weight, bias, output)
    return output


def _empty_convolution_gradients(
    image: Tensor, gradient: Tensor, kernel_height: int, kernel_width: int, padding_rows: int
) -> tuple[Tensor, Tensor]:
    """Allocate the outputs of ``convolution_gradients``, which has the same arguments: weight and bias gradients."""
    out = gradient.shape[0]
    return image.new_empty(out, kernel_height, kernel_width, image.shape[0]), image.new_empty(out)


@_operator(
    "(Tensor image, Tensor gradient, int kernel_height, int kernel_width, int padding_rows) -> (Tensor, Tensor)",
    _empty_convolution_gradients,
)
def convolution_gradients(
    image: Tensor, gradient: Tensor, kernel_height: int, kernel_width: int, padding_rows: int
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of a convolution's weight and bias from the gradient of its output.

    Args:
        image: input of the convolution [in, height, width, examples].
        gradient: gradient of its output [out, output height, output width, examples].
        kernel_height: height of the kernel.
        kernel_width: width of the kernel.
        padding_rows: rows of zero padding at the top and bottom.

    Returns:
        The gradients of the weight [out, kernel_height, kernel_width, in] and of the bias [out].
    """
    weight, bias = _empty_convolution_gradients(image, gradient, kernel_height, kernel_width, padding_rows)
    size = kernel_height, kernel_width
    compiled_gradients = _compiled("convolution_gradients", image.shape, size, gradient.shape[0], padding_rows)
    compiled_gradients(image, gradient, weight, bias)
    return weight, bias


def _empty_max_pool_gradient(image: Tensor, gradient: Tensor, window_height: int, window_width: int) -> Tensor:
    return image.new_empty(image.shape)


@_operator("(Tensor image, Tensor gradient, int window_height, int window_width) -> Tensor", _empty_max_pool_gradient)
def max_pool_gradient(image: Tensor, gradient: Tensor, window_height: int, window_width: int) -> Tensor:
    """Compute the input gradient of max-pooling whose stride equals its window.

    The gradient of each window goes to its first maximum.

    Args:
        image: input of the pooling [channels, height, width, examples].
        gradient: gradient of its output [channels, height // window_height, width // window_width, examples].
        window_height: height of the window.
        window_width: width of the window.

    Returns:
        The gradient of the image, of the same shape.
    """
    _, height, width, _ = image.shape
    windows_cover_image = height % window_height == width % window_width == 0
    # The kernel writes only inside windows: pixels in no window keep a gradient of zero.
    output = image.new_empty(image.shape) if windows_cover_image else image.new_zeros(image.shape)
    _compiled("max_pool_gradient", image.shape, (window_height, window_width))(image, gradient, output)
    return output


@lru_cache(maxsize=64)
def _compiled(
    name: str, image: tuple[int, ...], window: tuple[int, ...], out: int = 0, padding_rows: int = 0
) -> Callable[..., None]:
    """Compile a function of ``kernels.cpp`` for one shape; torch's compiler caches the result on disk.

    Args:
        name: name of the function.
        image: shape of the image, [in, height, width, examples].
        window: height and width of the convolution's kernel or of the pooling window.
        out: output channels of a convolution; 0 selects the part of the file with max-pooling.
        padding_rows: rows of zero padding at the top and bottom.

    Returns:
        A function that takes all input and output tensors, in the order of the C++ function.
    """
    from torch._inductor.codecache import CppCodeCache

    constants = ("IN", "HEIGHT", "WIDTH", "EXAMPLES", "KERNEL_HEIGHT", "KERNEL_WIDTH", "OUT", "PADDING_ROWS")
    values = (*image, *window, out, padding_rows)
    definitions = "".join(f"#define {constant} {value}L\n" for constant, value in zip(constants, values, strict=True))
    source = Path(__file__).with_suffix(".cpp").read_text(encoding="utf-8")
    # Allow fused multiply-add, which torch's compiler disables for bitwise equality with eager mode.
    library: Any = CppCodeCache.load_async(definitions + source, extra_flags=("-ffp-contract=fast",))()
    function = getattr(library, name)

    def call(*tensors: Tensor) -> None:
        contiguous = [tensor.contiguous() for tensor in tensors]  # keeps copies alive during the call
        function(*[c_void_p(tensor.data_ptr()) for tensor in contiguous])

    return call
