"""Our convolutions have the same values, first and second derivatives as torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedflat.flatness.curvature.second_order import TwiceDifferentiable

KINDS: dict[str, tuple[Any, tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "plain": (F.conv2d, (2, 3, 5, 6), (4, 3, 2, 3), {}),
    "strided and padded": (F.conv2d, (2, 3, 6, 5), (4, 3, 3, 3), {"stride": 2, "padding": 1}),
    "uneven": (F.conv2d, (2, 2, 7, 5), (3, 2, 2, 1), {"stride": (2, 1), "padding": (1, 0), "dilation": (2, 1)}),
    "in groups": (F.conv2d, (2, 4, 4, 4), (6, 2, 3, 3), {"groups": 2, "padding": 1}),
    "depthwise": (F.conv2d, (1, 3, 4, 4), (3, 1, 3, 3), {"groups": 3}),
    "along a line": (F.conv1d, (2, 3, 8), (2, 3, 3), {"dilation": 2, "stride": 2}),
    "in space": (F.conv3d, (1, 2, 4, 3, 4), (2, 2, 2, 2, 2), {"padding": 1, "stride": (1, 2, 1)}),
    "padded by name": (F.conv2d, (2, 2, 4, 4), (3, 2, 3, 3), {"padding": "same"}),
    "one example": (F.conv2d, (2, 4, 4), (3, 2, 3, 3), {}),
}


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_()


@pytest.mark.parametrize("name", KINDS)
def test_values_and_both_derivatives_are_those_of_torch(name: str) -> None:
    function, shape, filters, how = KINDS[name]
    x, w, b = drawn(*shape), drawn(*filters, seed=1), drawn(filters[0], seed=2)
    found: list[list[Tensor]] = []
    for mode in (TwiceDifferentiable(), None):
        if mode is not None:
            mode.__enter__()
        y = function(x, w, b, **how)
        first = torch.autograd.grad((y**3).sum(), [x, w, b], create_graph=True)
        second = torch.autograd.grad([(piece.sin()).sum() for piece in first], [x, w, b])
        found.append([y, *first, *second])
        if mode is not None:
            mode.__exit__(None, None, None)
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def test_second_derivatives_are_those_of_finite_differences() -> None:
    def three(x: Tensor, w: Tensor) -> Tensor:
        with TwiceDifferentiable():
            return F.conv2d(x, w, stride=(1, 2), padding=1, dilation=(2, 1), groups=2)

    inputs = drawn(2, 4, 5, 4), drawn(2, 2, 3, 2, seed=1)
    assert torch.autograd.gradcheck(three, inputs) and torch.autograd.gradgradcheck(three, inputs)


def test_modules_use_them_and_other_functions_are_unchanged() -> None:
    network = nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), nn.ReLU(), nn.ConvTranspose2d(3, 1, 2)
    ).double()
    x = drawn(1, 2, 4, 4)
    with TwiceDifferentiable():
        inside = network(x)
        assert "ConvolutionBackward" in str(network[0](x).grad_fn.next_functions[0][0])
    torch.testing.assert_close(inside, network(x))
    assert "Convolution" in str(network[0](x).grad_fn)
