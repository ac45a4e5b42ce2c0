"""The functions in ``kernels.cpp``, compiled for each shape on first use.

Images are [channels, height, width, examples] and weights [out, kernel_height, kernel_width, in], contiguous float32
tensors on a CPU. Compiled files are kept in the user's cache.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import suppress
from ctypes import CDLL, c_void_p
from functools import cache, lru_cache
from pathlib import Path

import torch
from torch import Tensor

from fedflat.data.sources.source import user_cache

# Fused multiply-add is faster and more accurate than separate operations.
FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-ffp-contract=fast", "-w")
SIMD_FLAGS = {
    "AVX2": ("-mavx2", "-mfma"),
    "AVX512": ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma"),
}
"""Flags by the instruction set that torch detects; other processors have vector instructions without flags, or none."""


class KernelError(Exception):
    """A kernel could not be compiled or loaded."""


@cache
def compiler() -> str | None:
    """The C++ compiler: ``$CXX``, or the first one found; None if there is none."""
    candidates = (os.environ.get("CXX"), "c++", "g++", "clang++")
    return next((name for name in candidates if name and shutil.which(name)), None)


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
    out, kernel_height, kernel_width, _ = weight.shape
    _, height, width, examples = image.shape
    output = image.new_empty(out, height + 2 * padding_rows - kernel_height + 1, width - kernel_width + 1, examples)
    compiled_convolve = _compiled("convolve", image.shape, (kernel_height, kernel_width), out, padding_rows)
    compiled_convolve(image, weight, bias, output)
    return output


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
    out = gradient.shape[0]
    weight, bias = image.new_empty(out, kernel_height, kernel_width, image.shape[0]), image.new_empty(out)
    kernel_size = kernel_height, kernel_width
    compiled_gradients = _compiled("convolution_gradients", image.shape, kernel_size, out, padding_rows)
    compiled_gradients(image, gradient, weight, bias)
    return weight, bias


def max_pool(image: Tensor, window_height: int, window_width: int) -> Tensor:
    """Max-pool with a stride equal to the window; pixels beyond the last whole window are ignored.

    Args:
        image: [channels, height, width, examples].
        window_height: height of the window.
        window_width: width of the window.

    Returns:
        The image [channels, height // window_height, width // window_width, examples].
    """
    channels, height, width, examples = image.shape
    output = image.new_empty(channels, height // window_height, width // window_width, examples)
    _compiled("max_pool", image.shape, (window_height, window_width))(image, output)
    return output


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
    """Compile a function of ``kernels.cpp`` for one shape.

    Args:
        name: name of the function.
        image: shape of the image, [in, height, width, examples].
        window: height and width of the convolution's kernel or of the pooling window.
        out: output channels of a convolution; 0 selects the part of the file with max-pooling.
        padding_rows: rows of zero padding at the top and bottom.

    Returns:
        A function that takes all input and output tensors, in the order of the C++ function.
    """
    constants = ("IN", "HEIGHT", "WIDTH", "EXAMPLES", "KERNEL_HEIGHT", "KERNEL_WIDTH", "OUT", "PADDING_ROWS")
    values = (*image, *window, out, padding_rows)
    definitions = "".join(f"#define {constant} {value}L\n" for constant, value in zip(constants, values, strict=True))
    source = Path(__file__).with_suffix(".cpp").read_text(encoding="utf-8")
    function = getattr(_library(definitions + source), name)
    return lambda *tensors: function(*(c_void_p(tensor.data_ptr()) for tensor in tensors))


@cache
def _library(source: str) -> CDLL:
    """Load compiled C++ source, from the cache if an earlier process compiled it for the same instruction set."""
    command = (compiler() or "c++", *FLAGS, *SIMD_FLAGS.get(torch.backends.cpu.get_cpu_capability(), ()))
    key = _hash(" ".join(command).encode() + source.encode())
    folder = user_cache() / "kernels"
    with suppress(OSError):  # a folder or file that cannot be read is compiled anew
        for file in folder.glob(f"{key}-*.so"):
            if file.stem == f"{key}-{_hash(file.read_bytes())}":  # loading a damaged file could crash the process
                return CDLL(str(file))
    with tempfile.TemporaryDirectory() as directory:
        built = Path(directory) / "kernel.so"
        try:
            subprocess.run(
                [*command, "-x", "c++", "-o", str(built), "-"], input=source, text=True, check=True, capture_output=True
            )
            stored = folder / f"{key}-{_hash(built.read_bytes())}.so"
            return CDLL(str(stored if _store(built, stored) else built))
        except subprocess.CalledProcessError as error:
            errors = [line for line in error.stderr.splitlines() if "error" in line]
            raise KernelError(next(iter(errors), f"{command[0]} failed")) from None
        except OSError as error:
            raise KernelError(str(error)) from None


def _store(built: Path, file: Path) -> bool:
    """Copy a compiled library into the cache atomically, if it is writable; otherwise every process compiles anew.

    Returns whether the library is in the cache.
    """
    temporary = file.with_suffix(f".{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(built, temporary)
        temporary.replace(file)
        return True
    except OSError:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        return False


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:24]
