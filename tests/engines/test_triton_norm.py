"""The Triton kernels of GroupNorm, on a GPU or in Triton's interpreter.

Without a GPU, with the version of Triton that belongs to torch 2.11 (3.9 fails)::

    pip install triton==3.6.0
    TRITON_INTERPRET=1 pytest tests/engines/test_triton_norm.py
"""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

pytest.importorskip("triton")

from fedflat.engines.gpu import triton_norm
from fedflat.engines.gpu.triton_norm import CHUNK, FusedGroupNorm

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if IS_INTERPRETED else "cuda"
pytestmark = pytest.mark.skipif(
    not IS_INTERPRETED and not torch.cuda.is_available(), reason="needs a GPU or TRITON_INTERPRET=1"
)
EPS = 1e-3
SHAPES = [
    pytest.param(4, 64, 16, 16, 2, id="one chunk"),
    pytest.param(2, 32, 40, 40, 2, id="several chunks, the last one partly filled"),
    pytest.param(2, 12, 5, 3, 4, id="no powers of 2"),
    pytest.param(3, 6, 1, 1, 2, id="one pixel"),
    pytest.param(2, 8, 4, 4, 8, id="one channel per group"),
    pytest.param(1, 2 * CHUNK + 2, 2, 1, 1, id="more channels than a chunk"),
]


def random_images(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (3 + torch.randn(shape)).to(DEVICE, dtype).contiguous(memory_format=torch.channels_last)


def reference(images: Tensor, weight: Tensor, bias: Tensor, groups: int, added: Tensor | None, relu: bool) -> Tensor:
    output = F.group_norm(images.double(), groups, weight.double(), bias.double(), EPS)
    output = output if added is None else output + added.double()
    return F.relu(output) if relu else output


def fused(images: Tensor, weight: Tensor, bias: Tensor, groups: int, added: Tensor | None, relu: bool) -> Tensor:
    output: Tensor = FusedGroupNorm.apply(images, weight, bias, groups, EPS, added, relu)[0]
    return output


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 3e-5), (torch.bfloat16, 1e-2)], ids=str)
@pytest.mark.parametrize("relu", [False, True], ids=["linear", "relu"])
@pytest.mark.parametrize("has_added", [False, True], ids=["alone", "sum"])
@pytest.mark.parametrize("n, channels, height, width, groups", SHAPES)
def test_output_and_gradients_agree_with_torch(
    n: int, channels: int, height: int, width: int, groups: int, has_added: bool, relu: bool, dtype: torch.dtype,
    tolerance: float,
) -> None:  # fmt: skip
    torch.manual_seed(0)
    images = random_images(n, channels, height, width, dtype=dtype)
    added = random_images(n, channels, height, width, dtype=dtype) if has_added else None
    weight, bias = torch.randn(2, channels, device=DEVICE)
    weighting = torch.randn(images.shape, device=DEVICE)
    results = []
    for function in (reference, fused):
        inputs = [tensor.clone().requires_grad_() for tensor in (images, weight, bias, added) if tensor is not None]
        output = function(*inputs[:3], groups, inputs[3] if has_added else None, relu)
        results.append([output, *torch.autograd.grad((output.double() * weighting).sum(), inputs)])
    for expected, found in zip(*results, strict=True):
        assert (found.double() - expected.double()).norm() <= tolerance * expected.double().norm()
    assert results[1][0].dtype == dtype and results[1][0].is_contiguous(memory_format=torch.channels_last)


def test_inputs_of_any_memory_format() -> None:
    torch.manual_seed(0)
    images, weight = torch.randn(2, 8, 4, 3, device=DEVICE), torch.randn(16, device=DEVICE)[::2]
    bias, added = torch.ones(1, device=DEVICE).expand(8), torch.randn(1, 8, 1, 1, device=DEVICE).expand_as(images)
    expected = reference(images, weight, bias, 2, added, True)
    torch.testing.assert_close(fused(images, weight, bias, 2, added, True).double(), expected, rtol=1e-5, atol=1e-5)


def test_nan_reaches_the_output_through_the_relu() -> None:
    images = random_images(2, 4, 3, 3)
    images[0, 1, 2, 0] = float("nan")
    output = fused(images, torch.ones(4, device=DEVICE), torch.zeros(4, device=DEVICE), 2, None, True)
    assert output[0, :2].isnan().all() and not output[0, 2:].isnan().any() and not output[1].isnan().any()


def test_results_do_not_depend_on_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group is kept in registers if it fits into one chunk, and is read twice otherwise."""
    torch.manual_seed(0)
    arguments = random_images(2, 8, 8, 8), *torch.randn(2, 8, device=DEVICE), 2, random_images(2, 8, 8, 8), True
    expected = fused(*arguments)
    monkeypatch.setattr(triton_norm, "CHUNK", 64)
    torch.testing.assert_close(fused(*arguments), expected)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_gradient(backend: str) -> None:
    """Compiled local steps differentiate with ``torch.func.grad``."""
    torch.manual_seed(0)
    images, parameters = random_images(2, 8, 5, 4), torch.randn(16, device=DEVICE)

    def loss(vector: Tensor, norm: object) -> Tensor:
        output = norm(images * vector[0], vector[:8], vector[8:], 2, images, True)  # type: ignore[operator]
        weighting = torch.arange(output.numel(), device=DEVICE).view(output.shape).cos()
        total: Tensor = (output * weighting).sum()
        return total

    gradient = torch.compile(lambda vector: torch.func.grad(loss)(vector, fused), fullgraph=True, backend=backend)
    expected = torch.func.grad(loss)(parameters, reference)
    torch.testing.assert_close(gradient(parameters), expected, rtol=1e-4, atol=1e-4)
