"""The layers that replace torch's on a GPU compute the same values."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

from fedflat import models
from fedflat.engines.gpu.layers import (
    MOST_PATCHES,
    ChannelsLastGroupNorm,
    FusedBasicBlock,
    PatchConvolution,
    with_gpu_layers,
)
from fedflat.models.resnet import BasicBlock

CONVOLUTIONS = [
    nn.Conv2d(3, 6, 5),
    nn.Conv2d(3, 6, 5, padding=2, bias=False),
    nn.Conv2d(3, 6, 7, stride=2, padding=3),
    nn.Conv2d(4, 6, (3, 9), stride=(2, 1), padding=(1, 4)),
]


def passed(model: nn.Module, images: torch.Tensor) -> list[torch.Tensor]:
    """A model's output, and the gradients of a weighted sum of it: by the images first, then by the parameters."""
    images = images.clone().requires_grad_()
    output = model(images)
    weighting = torch.linspace(-1, 2, output.numel(), dtype=output.dtype).view(output.shape).cos()
    return [output.detach(), *torch.autograd.grad((output * weighting).sum(), [images, *model.parameters()])]


def assert_same(one: nn.Module, other: nn.Module, images: torch.Tensor) -> None:
    for expected, found in zip(passed(one, images), passed(other, images), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("layer", CONVOLUTIONS, ids=str)
def test_patches_make_a_convolution(layer: nn.Conv2d, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(layer).double()
    changed = with_gpu_layers(model)
    assert type(changed[0]) is PatchConvolution  # type: ignore[index]
    images = torch.randn(2, layer.in_channels, 28, 27, dtype=torch.float64)
    assert_same(model, changed, images)
    monkeypatch.setattr(F, "conv2d", None)
    assert changed(images.contiguous(memory_format=torch.channels_last)).is_contiguous(
        memory_format=torch.channels_last
    )


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(3, 6, 3),
        nn.Conv2d(5, 6, 5),
        nn.Conv2d(3, 6, 5, dilation=2),
        nn.Conv2d(3, 6, 5, groups=3),
        nn.Conv2d(3, 6, 5, padding="same"),
        nn.Conv2d(3, 6, 5, padding=1, padding_mode="circular"),
        nn.GroupNorm(2, 6, affine=False),
        nn.Conv3d(3, 6, 5),
    ],
    ids=str,
)
def test_other_layers_are_not_replaced(layer: nn.Module) -> None:
    assert type(with_gpu_layers(nn.Sequential(layer))[0]) is type(layer)  # type: ignore[index]


def test_large_images_use_an_ordinary_convolution(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Conv2d(3, 2, 5))
    changed, images = with_gpu_layers(model), torch.randn(2, 3, 8, 8)
    assert MOST_PATCHES > 2 * 4 * 4 * 75
    monkeypatch.setattr("fedflat.engines.gpu.layers.MOST_PATCHES", 2 * 4 * 4 * 75 - 1)
    monkeypatch.setattr(torch, "bmm", None)
    assert torch.equal(changed(images), model(images))


@pytest.mark.parametrize("shape", [(3, 6, 5, 4), (3, 6, 1, 1), (3, 6), (3, 6, 7)], ids=str)
def test_group_norm_agrees_with_torch(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.GroupNorm(2, 6, eps=0.1)).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    changed = with_gpu_layers(model)
    assert type(changed[0]) is ChannelsLastGroupNorm  # type: ignore[index]
    assert_same(model, changed, 3 + torch.randn(shape, dtype=torch.float64))


def test_group_norm_keeps_channels_last_and_sums_in_float32() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.GroupNorm(2, 8)).bfloat16()
    images = (20 + torch.randn(2, 8, 16, 16)).bfloat16().contiguous(memory_format=torch.channels_last)
    found = with_gpu_layers(model)(images)
    assert found.dtype == torch.bfloat16 and found.is_contiguous(memory_format=torch.channels_last)
    expected = nn.functional.group_norm(images.double(), 2)
    assert (found.double() - expected).abs().max() < 0.01 * expected.abs().max()


@pytest.mark.parametrize("text", ["cnn", "resnet18(stem=torchvision)", "resnet20", "mobilenetv2"])
def test_replaced_models_share_tensors_and_agree(text: str) -> None:
    torch.manual_seed(0)
    model = models.build(text, (3, 32, 32), 10).double()
    changed = with_gpu_layers(model)
    assert any(isinstance(module, ChannelsLastGroupNorm | PatchConvolution) for module in changed.modules())
    assert {name: id(tensor) for name, tensor in changed.named_parameters()} == {
        name: id(p) for name, p in model.named_parameters()
    }
    assert not any(isinstance(module, ChannelsLastGroupNorm | PatchConvolution) for module in model.modules())
    images = torch.randn(3, 3, 32, 32, dtype=torch.float64)
    other = {name: torch.randn_like(tensor) * 0.05 for name, tensor in model.named_parameters()}
    torch.testing.assert_close(
        functional_call(changed, other, (images,)), functional_call(model, other, (images,)), rtol=1e-8, atol=1e-8
    )


def test_only_blocks_of_group_norms_and_a_relu_are_fused() -> None:
    def block_of(text: str) -> BasicBlock:
        return next(
            module for module in models.build(text, (3, 32, 32), 10).modules() if isinstance(module, BasicBlock)
        )

    assert type(with_gpu_layers(block_of("resnet18"))) is FusedBasicBlock
    assert type(with_gpu_layers(block_of("resnet18(norm=batch)"))) is BasicBlock
    changed, longer, hooked, hooked_norm = (block_of("resnet18") for _ in range(4))
    hooked_norm.residual[1].register_forward_hook(lambda module, inputs, output: output / 2)
    changed.residual[2] = nn.GELU()
    longer.residual.append(nn.Dropout(0.1))
    hooked.residual.register_forward_hook(lambda module, inputs, output: output / 2)
    assert all(type(with_gpu_layers(block)) is BasicBlock for block in (changed, longer, hooked, hooked_norm))


class Winding(nn.Module):
    """One normalisation layer used twice, and layers that are also in a plain list."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = (
            nn.Conv2d(3, 4, 5, padding=2),
            nn.Conv2d(4, 4, 3, padding=1),
            nn.GroupNorm(2, 4),
        )
        self.again = nn.Sequential(self.norm, nn.ReLU())
        self.steps = [self.first, self.norm, self.second, self.again]

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        assert self.norm.num_channels == 4
        for step in self.steps:
            images = step(images)
        return images.mean((2, 3))


def test_shared_layers_stay_shared() -> None:
    torch.manual_seed(0)
    model = Winding().double()
    changed = with_gpu_layers(model)
    assert isinstance(changed, Winding) and type(changed.again[0]) is type(changed.steps[1]) is ChannelsLastGroupNorm
    images = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    assert_same(model, changed, images)
    for tied in (False, True):
        other = {name: torch.randn_like(tensor) for name, tensor in model.named_parameters()}
        expected, found = (functional_call(one, other, (images,), tie_weights=tied) for one in (model, changed))
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_a_model_without_such_layers_is_not_copied() -> None:
    without_bias = nn.GroupNorm(2, 8)
    without_bias.bias = None  # type: ignore[assignment]  # older versions of torch lack the argument
    model = nn.Sequential(nn.Conv2d(8, 8, 3), without_bias, nn.BatchNorm2d(8))
    assert with_gpu_layers(model) is model
