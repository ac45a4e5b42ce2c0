"""GroupNorm of channels-last images in Triton: one kernel forward and one backward, with an optional addition and ReLU.

torch's compiler generates about ten kernels for the same work, and the GPU needs more than a microsecond to start each.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

if torch.__version__ < "2.11":  # compares versions, not texts
    raise ImportError("within torch.func.grad, torch before 2.11 cannot compile an autograd.Function")

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Types of images that the kernels read; they compute in float32."""
CHUNK = 16384
"""Numbers that a kernel program holds at a time."""
NUMBERS_PER_WARP, MOST_WARPS = 1024, 16
"""Numbers of a chunk that each warp of a program processes, and the largest number of warps."""

# torch's compiler does not look into operators. ``FusedGroupNorm`` differentiates them, because operators with
# derivatives of their own do not work with ``torch.func.grad``.
DISPATCH_KEY = "CompositeExplicitAutograd"
torch.library.define(
    "fedflat::group_norm",
    "(Tensor images, Tensor weight, Tensor bias, int groups, float eps, Tensor? added, bool relu) -> (Tensor, Tensor)",
)
torch.library.define(
    "fedflat::group_norm_backward",
    "(Tensor gradient, Tensor images, Tensor output, Tensor statistics, Tensor weight, bool relu, bool has_added)"
    " -> (Tensor, Tensor, Tensor)",
)


class FusedGroupNorm(torch.autograd.Function):
    """``relu(group_norm(images) + added)`` for images [n, channels, height, width] on a GPU, channels last.

    The arguments of ``apply`` are images of a type in ``DTYPES``, weight and bias of each channel, the number of
    groups, the number added to variances, the tensor to add (None for none), and whether to apply a ReLU.
    """

    @staticmethod
    def forward(
        images: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float, added: Tensor | None, relu: bool
    ) -> tuple[Tensor, Tensor]:
        result: tuple[Tensor, Tensor] = torch.ops.fedflat.group_norm(images, weight, bias, groups, eps, added, relu)
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        images, weight, _, _, _, added, relu = inputs
        ctx.save_for_backward(images, weight, *output)
        ctx.mark_non_differentiable(output[1])
        ctx.relu, ctx.has_added = relu, added is not None

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        images, weight, output, statistics = ctx.saved_tensors
        image_gradient, added_gradient, by_example = torch.ops.fedflat.group_norm_backward(
            gradient, images, output, statistics, weight, ctx.relu, ctx.has_added
        )
        parameters = by_example.sum(0).to(weight.dtype)
        return image_gradient, parameters[0], parameters[1], None, None, added_gradient if ctx.has_added else None, None


@torch.library.impl("fedflat::group_norm", DISPATCH_KEY)
def _forward(
    images: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float, added: Tensor | None, relu: bool
) -> tuple[Tensor, Tensor]:
    """The output, and mean and 1 / standard deviation of each example and group [n * groups, 2]."""
    images, output = _channels_last(images), torch.empty_like(images, memory_format=torch.channels_last)
    added_or_any = images if added is None else _channels_last(added)
    weight, bias = weight.contiguous(), bias.contiguous()
    statistics = images.new_empty(len(images) * groups, 2, dtype=torch.float32)
    floor = 0.0 if relu else -math.inf
    _forward_kernel[(len(statistics),)](
        images, added_or_any, weight, bias, output, statistics, groups, eps, int(added is not None), floor,
        **_tile(images, groups),
    )  # fmt: skip
    return output, statistics


@torch.library.impl("fedflat::group_norm_backward", DISPATCH_KEY)
def _backward(
    gradient: Tensor, images: Tensor, output: Tensor, statistics: Tensor, weight: Tensor, relu: bool, has_added: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of the images and of ``added`` (empty without), and of weight and bias by example [n, 2, channels].

    ``gradient`` is that of the output; ``output`` and ``statistics`` are the results of the forward pass.
    """
    gradient, images, output = (_channels_last(each) for each in (gradient, images, output))
    weight = weight.contiguous()
    image_gradient = torch.empty_like(images)
    added_gradient = torch.empty_like(images) if has_added else images.new_empty(0)
    parameter_gradients = images.new_empty(len(images), 2, images.shape[1], dtype=torch.float32)
    groups = len(statistics) // len(images)
    _backward_kernel[(len(statistics),)](
        gradient, images, output, statistics, weight, image_gradient, added_gradient, parameter_gradients,
        groups, int(relu), int(has_added), **_tile(images, groups),
    )  # fmt: skip
    return image_gradient, added_gradient, parameter_gradients


@triton.jit(do_not_specialize=["groups", "has_added"])
def _forward_kernel(
    images, added, weight, bias, output, statistics, groups, eps, has_added, floor,
    PIXELS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Normalise one group of one example: statistics first, by chunks of pixels, then the output."""
    program = tl.program_id(0).to(tl.int64)
    group = program % groups
    columns = tl.arange(0, COLUMNS)[None, :]
    start = program // groups * PIXELS * groups * WIDTH + group * WIDTH
    values = tl.zeros((ROWS, COLUMNS), images.dtype.element_ty)
    count, mean, squares = 0.0, 0.0, 0.0
    for first in range(0, PIXELS, ROWS):
        rows = first + tl.arange(0, ROWS)[:, None]
        inside = (rows < PIXELS) & (columns < WIDTH)
        values = tl.load(images + start + rows * (groups * WIDTH) + columns, mask=inside, other=0.0)
        # Merge the chunk's mean and squared deviations with those so far (Chan et al. 1983).
        new = tl.sum(inside.to(tl.float32))
        new_mean = tl.sum(values.to(tl.float32)) / new
        deviations = tl.where(inside, values.to(tl.float32) - new_mean, 0.0)
        squares += tl.sum(deviations * deviations) + (new_mean - mean) * (new_mean - mean) * count * new / (count + new)
        mean += (new_mean - mean) * new / (count + new)
        count += new
    inverse_deviation = 1 / tl.sqrt(squares / count + eps)
    tl.store(statistics + 2 * program, mean)
    tl.store(statistics + 2 * program + 1, inverse_deviation)
    scale = tl.load(weight + group * WIDTH + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
    shift = tl.load(bias + group * WIDTH + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
    for first in range(0, PIXELS, ROWS):
        rows = first + tl.arange(0, ROWS)[:, None]
        inside = (rows < PIXELS) & (columns < WIDTH)
        places = start + rows * (groups * WIDTH) + columns
        if ROWS < PIXELS:  # otherwise the only chunk is still in registers
            values = tl.load(images + places, mask=inside, other=0.0)
        result = (values.to(tl.float32) - mean) * inverse_deviation * scale + shift
        result += tl.load(added + places, mask=inside & (has_added != 0), other=0.0).to(tl.float32)
        result = tl.where(result < floor, floor, result)  # keeps NaN
        tl.store(output + places, result.to(output.dtype.element_ty), mask=inside)


@triton.jit
def _load_slopes(gradient, output, places, inside, relu):
    """Gradients after the ReLU, if there is one: those of a positive output."""
    slopes = tl.load(gradient + places, mask=inside, other=0.0)
    active = tl.load(output + places, mask=inside & (relu != 0), other=1.0)
    return tl.where(active <= 0.0, tl.zeros_like(slopes), slopes)


@triton.jit(do_not_specialize=["groups", "relu", "has_added"])
def _backward_kernel(
    gradient, images, output, statistics, weight, image_gradient, added_gradient, parameter_gradients,
    groups, relu, has_added, PIXELS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of one group of one example: sums over pixels first, by chunks, then those of images."""
    program = tl.program_id(0).to(tl.int64)
    example, group = program // groups, program % groups
    columns = tl.arange(0, COLUMNS)[None, :]
    start = example * PIXELS * groups * WIDTH + group * WIDTH
    mean, inverse_deviation = tl.load(statistics + 2 * program), tl.load(statistics + 2 * program + 1)
    slopes = tl.zeros((ROWS, COLUMNS), gradient.dtype.element_ty)
    values = tl.zeros((ROWS, COLUMNS), images.dtype.element_ty)
    weight_gradient = tl.zeros((1, COLUMNS), tl.float32)
    bias_gradient = tl.zeros((1, COLUMNS), tl.float32)
    for first in range(0, PIXELS, ROWS):
        rows = first + tl.arange(0, ROWS)[:, None]
        inside = (rows < PIXELS) & (columns < WIDTH)
        places = start + rows * (groups * WIDTH) + columns
        slopes = _load_slopes(gradient, output, places, inside, relu)
        values = tl.load(images + places, mask=inside, other=0.0)
        normalised = (values.to(tl.float32) - mean) * inverse_deviation
        weight_gradient += tl.sum(slopes.to(tl.float32) * normalised, 0, keep_dims=True)
        bias_gradient += tl.sum(slopes.to(tl.float32), 0, keep_dims=True)
    sums = parameter_gradients + 2 * example * groups * WIDTH + group * WIDTH + columns
    tl.store(sums, weight_gradient, mask=columns < WIDTH)
    tl.store(sums + groups * WIDTH, bias_gradient, mask=columns < WIDTH)
    scale = tl.load(weight + group * WIDTH + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
    mean_slope = tl.sum(scale * bias_gradient) / (PIXELS * WIDTH)
    mean_product = tl.sum(scale * weight_gradient) / (PIXELS * WIDTH)
    for first in range(0, PIXELS, ROWS):
        rows = first + tl.arange(0, ROWS)[:, None]
        inside = (rows < PIXELS) & (columns < WIDTH)
        places = start + rows * (groups * WIDTH) + columns
        if ROWS < PIXELS:  # otherwise the only chunk is still in registers
            slopes = _load_slopes(gradient, output, places, inside, relu)
            values = tl.load(images + places, mask=inside, other=0.0)
        tl.store(added_gradient + places, slopes.to(added_gradient.dtype.element_ty), mask=inside & (has_added != 0))
        normalised = (values.to(tl.float32) - mean) * inverse_deviation
        result = inverse_deviation * (scale * slopes.to(tl.float32) - mean_slope - normalised * mean_product)
        tl.store(image_gradient + places, result.to(image_gradient.dtype.element_ty), mask=inside)


def _channels_last(images: Tensor) -> Tensor:
    return images.contiguous(memory_format=torch.channels_last)


def _tile(images: Tensor, groups: int) -> dict[str, int]:
    """Constants of a kernel: pixels, channels of a group, rows and columns of a chunk (powers of 2), and warps."""
    pixels, width = images.shape[2] * images.shape[3], images.shape[1] // groups
    columns = triton.next_power_of_2(width)
    rows = min(triton.next_power_of_2(pixels), max(1, CHUNK // columns))
    warps = max(1, min(MOST_WARPS, rows * columns // NUMBERS_PER_WARP))
    return {"PIXELS": pixels, "WIDTH": width, "ROWS": rows, "COLUMNS": columns, "num_warps": warps}


@torch.library.register_fake("fedflat::group_norm")
def _(
    images: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float, added: Tensor | None, relu: bool
) -> tuple[Tensor, Tensor]:
    statistics = images.new_empty(len(images) * groups, 2, dtype=torch.float32)
    return torch.empty_like(images, memory_format=torch.channels_last), statistics


@torch.library.register_fake("fedflat::group_norm_backward")
def _(
    gradient: Tensor, images: Tensor, output: Tensor, statistics: Tensor, weight: Tensor, relu: bool, has_added: bool
) -> tuple[Tensor, Tensor, Tensor]:
    image_gradient = torch.empty_like(images, memory_format=torch.channels_last)
    added_gradient = torch.empty_like(image_gradient) if has_added else images.new_empty(0)
    return image_gradient, added_gradient, images.new_empty(len(images), 2, images.shape[1], dtype=torch.float32)
