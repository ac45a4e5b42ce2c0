"""Residual networks of basic blocks (He et al. 2016): ResNet-18, and ResNet-20 for CIFAR."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn
from torch.nn import functional as F

from fedflat.models.norms import MakeNorm, NormalisedModelSpec
from fedflat.models.registry import ModelExample
from fedflat.text import param

MakeShortcut = Callable[[int, int, int], nn.Module]
"""Makes a shortcut, given its input channels, output channels and stride."""


@dataclass(frozen=True)
class ResNet18(NormalisedModelSpec):
    """ResNet-18, with four stages of two basic blocks (64 to 512 channels) and 1x1 projections where shapes change."""

    name = "resnet18"
    examples = (
        ModelExample("resnet18", (3, 32, 32), 10, "He et al. 2016; FedSWA (2025)"),
        ModelExample("resnet18(stem=torchvision)", (3, 32, 32), 10, "FedWMSAM (2025)"),
    )
    stem: Literal["small", "torchvision"] = param(
        "small",
        "first layer: a 3x3 convolution (small; FedSWA), or 7x7 with stride 2 and max-pooling (torchvision; FedWMSAM)",
    )

    def smallest_side(self) -> int:
        return 8 if self.stem == "small" else 32

    def network(self, input_shape: tuple[int, ...], classes: int) -> nn.Module:
        kernel, stride = (3, 1) if self.stem == "small" else (7, 2)
        conv = nn.Conv2d(input_shape[0], 64, kernel, stride, padding=kernel // 2, bias=False)
        layers = [conv, self.norm_layer(64), nn.ReLU()]
        if self.stem == "torchvision":
            layers.append(nn.MaxPool2d(3, 2, padding=1))

        def projection(inputs: int, outputs: int, stride: int) -> nn.Module:
            return nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), self.norm_layer(outputs))

        stem = nn.Sequential(*layers)
        widths = (64, 128, 256, 512)
        return ResidualNetwork(stem, widths, depth=2, norm=self.norm_layer, shortcut=projection, classes=classes)


@dataclass(frozen=True)
class ResNet20(NormalisedModelSpec):
    """ResNet-20 for CIFAR, with three stages of three basic blocks, 16 to 64 channels, and parameter-free shortcuts."""

    name = "resnet20"
    examples = (ModelExample("resnet20", (3, 32, 32), 10, "He et al. 2016; WiMA (2023)"),)

    def smallest_side(self) -> int:
        return 4

    def network(self, input_shape: tuple[int, ...], classes: int) -> nn.Module:
        stem = nn.Sequential(nn.Conv2d(input_shape[0], 16, 3, padding=1, bias=False), self.norm_layer(16), nn.ReLU())
        return ResidualNetwork(
            stem, (16, 32, 64), depth=3, norm=self.norm_layer, shortcut=PaddedShortcut, classes=classes
        )


class ResidualNetwork(nn.Module):
    """Maps images [n, channels, height, width] to logits [n, classes].

    It consists of a stem, stages of basic blocks, the global mean and a linear classifier. From the second stage on,
    the first block of a stage has stride 2.
    """

    def __init__(
        self, stem: nn.Module, widths: tuple[int, ...], depth: int, norm: MakeNorm, shortcut: MakeShortcut, classes: int
    ) -> None:
        """Build a stage of ``depth`` blocks for each of ``widths``; ``stem`` has ``widths[0]`` output channels."""
        super().__init__()
        blocks, inputs = [], widths[0]
        for stage, outputs in enumerate(widths):
            for block in range(depth):
                stride = 2 if stage > 0 and block == 0 else 1
                blocks.append(BasicBlock(inputs, outputs, stride, norm, shortcut))
                inputs = outputs
        self.stem = stem
        self.blocks = nn.Sequential(*blocks)
        self.classifier = nn.Linear(inputs, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits [n, classes]."""
        features: Tensor = self.blocks(self.stem(images))
        logits: Tensor = self.classifier(features.mean((2, 3)))
        return logits


class BasicBlock(nn.Module):
    """``relu(shortcut(x) + norm(conv(relu(norm(conv(x))))))`` with 3x3 convolutions."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: MakeNorm, shortcut: MakeShortcut) -> None:
        """Build a block with stride 1 or 2; ``shortcut`` is used only if the shape changes."""
        super().__init__()
        self.residual = nn.Sequential(
            Conv3x3(inputs, outputs, stride), norm(outputs), nn.ReLU(), Conv3x3(outputs, outputs), norm(outputs)
        )
        same_shape = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same_shape else shortcut(inputs, outputs, stride)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.residual(x) + self.shortcut(x))


class Conv3x3(nn.Conv2d):
    """A padded 3x3 convolution without bias."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__(inputs, outputs, 3, stride, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Convolve; on 1x1 features use only the central weights, because all others meet padding.

        This is faster, and some compilers fail on the general case.
        """
        if x.shape[2:] == (1, 1):
            return F.conv2d(x, self.weight[:, :, 1:2, 1:2])
        return super().forward(x)


class PaddedShortcut(nn.Module):
    """Option A of He et al. 2016: strided subsampling, with zeros for the additional channels."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        """Build a shortcut from ``inputs`` to ``outputs`` channels that keeps every ``stride``-th row and column."""
        super().__init__()
        self.new_channels = outputs - inputs
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.new_channels))
