"""The functions in ``kernels.cpp`` as torch operators, compiled for each shape on first use.

Images are [channels, height, width, examples] and weights [out, tall, wide, in], float32 on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import c_void_p
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def convolve(image: Tensor, weight: Tensor, bias: Tensor, above: int) -> Tensor:
    """Stride-1 convolution; pads ``above`` rows of zeros at the top and bottom, and nothing left or right."""
    out: Tensor = torch.ops.fedflat.convolve(image, weight, bias, above)
    return out


def weigh(image: Tensor, gradient: Tensor, tall: int, wide: int, above: int) -> tuple[Tensor, Tensor]:
    """Gradients of a convolution's weight and bias, from that of its output."""
    weight, bias = torch.ops.fedflat.weigh(image, gradient, tall, wide, above)
    return weight, bias


def unpool(image: Tensor, gradient: Tensor, tall: int, wide: int) -> Tensor:
    """Gradient of max-pooling with a stride equal to the window; it goes to each window's first maximum."""
    out: Tensor = torch.ops.fedflat.unpool(image, gradient, tall, wide)
    return out


def _convolved(image: Tensor, weight: Tensor, bias: Tensor, above: int) -> Tensor:
    out, tall, wide, _ = weight.shape
    _, height, width, examples = image.shape
    return image.new_empty(out, height + 2 * above - tall + 1, width - wide + 1, examples)


def _convolve(image: Tensor, weight: Tensor, bias: Tensor, above: int) -> Tensor:
    out = _convolved(image, weight, bias, above)
    _compiled("convolve", image.shape, weight.shape[1:3], weight.shape[0], above)(image, weight, bias, out)
    return out


def _weighed(image: Tensor, gradient: Tensor, tall: int, wide: int, above: int) -> tuple[Tensor, Tensor]:
    out = gradient.shape[0]
    return image.new_empty(out, tall, wide, image.shape[0]), image.new_empty(out)


def _weigh(image: Tensor, gradient: Tensor, tall: int, wide: int, above: int) -> tuple[Tensor, Tensor]:
    weight, bias = _weighed(image, gradient, tall, wide, above)
    _compiled("weigh", image.shape, (tall, wide), gradient.shape[0], above)(image, gradient, weight, bias)
    return weight, bias


def _unpooled(image: Tensor, gradient: Tensor, tall: int, wide: int) -> Tensor:
    return image.new_empty(image.shape)


def _unpool(image: Tensor, gradient: Tensor, tall: int, wide: int) -> Tensor:
    covered = image.shape[1] % tall == image.shape[2] % wide == 0  # otherwise the margin is in no window
    out = image.new_empty(image.shape) if covered else image.new_zeros(image.shape)
    _compiled("unpool", image.shape, (tall, wide))(image, gradient, out)
    return out


for _name, _signature, _shaped, _computed in (
    ("convolve", "(Tensor image, Tensor weight, Tensor bias, int above) -> Tensor", _convolved, _convolve),
    ("weigh", "(Tensor image, Tensor gradient, int tall, int wide, int above) -> (Tensor, Tensor)", _weighed, _weigh),
    ("unpool", "(Tensor image, Tensor gradient, int tall, int wide) -> Tensor", _unpooled, _unpool),
):
    torch.library.define(f"fedflat::{_name}", _signature)
    torch.library.register_fake(f"fedflat::{_name}", _shaped)
    torch.library.impl(f"fedflat::{_name}", "CPU", _computed)


@lru_cache(maxsize=64)
def _compiled(
    name: str, image: tuple[int, ...], kernel: tuple[int, ...], out: int = 0, above: int = 0
) -> Callable[..., None]:
    """A kernel for one shape, compiled and cached on disk by torch's own compiler cache."""
    from torch._inductor.codecache import CppCodeCache

    names, sizes = ("IN", "HEIGHT", "WIDTH", "EXAMPLES", "TALL", "WIDE", "OUT", "ABOVE"), (*image, *kernel, out, above)
    constants = "".join(f"#define {name} {size}L\n" for name, size in zip(names, sizes, strict=True))
    source = Path(__file__).with_suffix(".cpp").read_text(encoding="utf-8")
    # Allow fused multiply-add, which torch's compiler disables for bitwise equality with eager mode.
    function: Any = getattr(CppCodeCache.load(constants + source, extra_flags=("-ffp-contract=fast",)), name)

    def call(*tensors: Tensor) -> None:
        laid_out = [tensor.contiguous() for tensor in tensors]
        function(*[c_void_p(tensor.data_ptr()) for tensor in laid_out])

    return call
