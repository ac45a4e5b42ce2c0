"""fedflat's own CPU kernels: the forward and backward pass of a chain of layers, compiled for its shapes.

A step of a small network spends more time in Python and torch than in arithmetic. Here each pass is a single call of a
C++ function (``kernels.cpp``), on flat vectors of weights. Compiled files are kept in the user's cache.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from ctypes import CDLL, c_void_p
from functools import cache
from pathlib import Path
from uuid import uuid4

import torch
from torch import Tensor

from fedflat.algorithms.teacher import Teacher
from fedflat.data.batches import Batch
from fedflat.data.sources.source import user_cache
from fedflat.engines.problem.layer_chain import ChainSource
from fedflat.engines.problem.objective import batch_loss, distillation_loss
from fedflat.engines.problem.task import Task
from fedflat.errors import UserError
from fedflat.operating_system import kill_group

# Fused multiply-add is faster and more accurate than separate operations.
FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-ffp-contract=fast", "-w")
SIMD_FLAGS = {
    "AVX2": ("-mavx2", "-mfma"),
    "AVX512": ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma"),
}
"""Flags by the instruction set that torch detects; other processors have vector instructions without flags, or none."""


class KernelError(UserError):
    """Kernels cannot be compiled, loaded or used as a run requires."""


@cache
def compiler() -> str | None:
    """The C++ compiler: ``$CXX``, or the first one found; None if there is none."""
    candidates = (os.environ.get("CXX"), "c++", "g++", "clang++")
    return next((name for name in candidates if name and shutil.which(name)), None)


class ChainKernels:
    """The compiled forward and backward pass of a chain of layers, for one batch size."""

    def __init__(self, source: ChainSource) -> None:
        """Compile the passes, or load them; raises a ``KernelError`` if this is not possible."""
        self._source = source
        layers = Path(__file__).with_suffix(".cpp").read_text(encoding="utf-8")
        library = _library(f"constexpr long EXAMPLES = {source.batch_size};\n{layers}{source.text}")
        self._forward, self._backward = library.forward, library.backward

    def forward(self, weights: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the output of a batch.

        Args:
            weights: flat weights [parameters].
            inputs: [batch, ...], contiguous.

        Returns:
            The output [batch, classes], and the activations, which ``backward`` needs.
        """
        output = weights.new_empty(len(inputs), self._source.classes)
        memory = weights.new_empty(self._source.memory)
        arguments = weights.contiguous(), inputs.contiguous(), memory, output  # kept alive during the call
        self._forward(*map(_address, arguments))
        return output, memory

    def backward(self, weights: Tensor, memory: Tensor, output_gradient: Tensor) -> Tensor:
        """Compute the gradient of the weights [parameters] from that of the output [batch, classes].

        Args:
            weights: flat weights [parameters], as in the forward pass.
            memory: the activations of the forward pass.
            output_gradient: gradient of the output, contiguous.
        """
        scratch = weights.new_empty(self._source.scratch)
        gradient = torch.zeros_like(weights, memory_format=torch.contiguous_format)  # some weights may be unused
        arguments = weights.contiguous(), memory, output_gradient.contiguous(), scratch, gradient
        self._backward(*map(_address, arguments))
        return gradient


def check_kernels(
    source: ChainSource, output_of: Callable[..., Tensor], weights: Tensor, sizes: list[int], inputs: Tensor
) -> None:
    """Compile kernels and compare them with torch; raises a ``KernelError`` if they do not work.

    Args:
        source: source of the kernels.
        output_of: computes the model's output with torch, from ``vector`` and ``inputs``.
        weights: flat weights [parameters].
        sizes: number of elements of each parameter, in order.
        inputs: a batch.
    """
    kernels, rng = ChainKernels(source), torch.Generator().manual_seed(0)
    # Weights of a last layer that starts at zero would hide the others' gradients.
    leaf = (weights + 0.05 * torch.randn(weights.shape, generator=rng)).requires_grad_()
    expected = output_of(vector=leaf, inputs=inputs.clone())  # the model may change its inputs in place
    output, memory = kernels.forward(leaf.detach(), inputs)
    agree = expected.shape == output.shape and _is_close(output, expected.detach())
    if agree:
        weighting = torch.randn(output.shape, generator=rng)
        (expected_gradient,) = torch.autograd.grad((weighting * expected).sum(), leaf)
        gradient = kernels.backward(leaf.detach(), memory, weighting)
        agree = all(map(_is_close, torch.split(gradient, sizes), torch.split(expected_gradient, sizes)))
    if not agree:
        raise KernelError("the model's output or gradient differs between fedflat's kernels and torch's")


def kernel_gradient(
    kernels: ChainKernels, task: Task, weights: Tensor, batch: Batch, teacher: Teacher | None
) -> tuple[Tensor, Tensor]:
    """``Problem.loss_and_gradient`` with kernels; torch differentiates the loss by the output alone."""
    leaf, memory = kernels.forward(weights, batch.inputs)
    output = leaf.requires_grad_().clone()  # the loss may change it in place
    loss = objective = batch_loss(task, output, batch)
    if teacher is not None:
        teacher_output, _ = kernels.forward(teacher.model, batch.inputs)
        objective = distillation_loss(task, loss, output, teacher_output, batch, teacher)
    (output_gradient,) = torch.autograd.grad(objective, leaf)
    return loss.detach(), kernels.backward(weights, memory, output_gradient)


def _is_close(computed: Tensor, expected: Tensor) -> bool:
    """Whether two tensors are equal up to rounding, which may also switch single ReLUs on or off."""
    return bool((computed - expected).norm() <= 0.01 * expected.norm())


def _address(tensor: Tensor) -> c_void_p:
    return c_void_p(tensor.data_ptr())


@cache
def _library(source: str) -> CDLL:
    """Load compiled C++ source, from the cache if an earlier process compiled it for the same instruction set."""
    command = (compiler() or "c++", *FLAGS, *SIMD_FLAGS.get(torch.backends.cpu.get_cpu_capability(), ()))
    key = _hash(" ".join((platform.machine(), *command, source)).encode())
    failure: object
    try:
        folder = user_cache() / "kernels"
        with suppress(OSError):  # a folder or file that cannot be read is compiled anew
            for file in folder.glob(f"{key}-*.so"):
                if file.stem == f"{key}-{_hash(file.read_bytes())}":  # loading a damaged file could crash the process
                    return _load(file)
        with tempfile.TemporaryDirectory() as directory:
            built = Path(directory) / "kernel.so"
            _compile(command, source, built)
            stored = folder / f"{key}-{_hash(built.read_bytes())}.so"
            file = stored if _store(built, stored) else built
            try:
                return _load(file)
            except OSError as error:
                raise KernelError(f"fedflat's kernels could not be loaded ({error})") from None
    except subprocess.CalledProcessError as error:
        failure = next((line for line in error.stderr.splitlines() if "error" in line), f"{command[0]} failed")
    except (OSError, RuntimeError) as error:
        failure = error if compiler() else "there is no C++ compiler"
    raise KernelError(f"fedflat's kernels could not be compiled ({failure})")


def _compile(command: Sequence[str], source: str, built: Path) -> None:
    """Compile C++ source to the shared library ``built``; an interruption also ends the compiler's subprocesses.

    The compiler puts its temporary files into the library's folder, which the caller deletes.
    """
    with subprocess.Popen(
        [*command, "-x", "c++", "-o", str(built), "-"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(built.parent)},
        process_group=0,
    ) as process:
        try:
            _, messages = process.communicate(source)
        except BaseException:
            kill_group(process.pid)
            raise
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, stderr=messages)


def _load(file: Path) -> CDLL:
    """Load a compiled library; from a temporary copy if its file system does not allow executable files."""
    try:
        return CDLL(str(file))
    except OSError:
        with tempfile.TemporaryDirectory() as directory:
            return CDLL(shutil.copy(file, directory))


def _store(built: Path, file: Path) -> bool:
    """Copy a compiled library into the cache atomically, if it is writable; otherwise every process compiles anew.

    Returns whether the library is in the cache.
    """
    temporary = file.with_suffix(f".{uuid4().hex}")
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
