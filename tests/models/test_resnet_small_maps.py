"""A padded 3x3 convolution of one pixel, by its centre alone."""

from __future__ import annotations

import torch
from torch import nn

from fedflat.models.resnet import Conv3x3


def test_one_pixel_uses_only_the_central_weights() -> None:
    torch.manual_seed(0)
    convolution = Conv3x3(6, 4, stride=2).double()
    pixel = torch.randn(5, 6, 1, 1, dtype=torch.float64, requires_grad=True)
    fast, whole = convolution(pixel), nn.Conv2d.forward(convolution, pixel)
    assert torch.allclose(fast, whole, rtol=0, atol=1e-14)
    ours, theirs = (torch.autograd.grad(out.sin().sum(), [pixel, convolution.weight]) for out in (fast, whole))
    assert all(torch.allclose(one, other, rtol=0, atol=1e-14) for one, other in zip(ours, theirs, strict=True))


def test_larger_images_use_the_full_convolution() -> None:
    convolution = Conv3x3(2, 3)
    image = torch.randn(1, 2, 1, 2)
    assert torch.equal(convolution(image), nn.Conv2d.forward(convolution, image))
