"""BiSeNetV2 (Yu et al. 2021): a wide, shallow branch for details and a narrow, deep one for semantics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedflat.models.norms import NORM_HELP, MakeNorm, NormalisedModelSpec
from fedflat.models.registry import ModelExample
from fedflat.text import param

EXPANSION = 6
"""Expansion factor of a gather-and-expansion layer (the paper's epsilon)."""


@dataclass(frozen=True)
class BiSeNetV2(NormalisedModelSpec):
    """A bilateral segmentation network that predicts a class per pixel, with four auxiliary heads in training."""

    name = "bisenetv2"
    dataset = "camvid"
    examples = (ModelExample("bisenetv2", (3, 180, 240), 11, "Yu et al. 2021; FedSAM (2022) on Cityscapes and IDDA"),)
    norm: Literal["group", "batch"] = param("batch", NORM_HELP)
    width: float = param(1.0, "factor on all channel counts", above=0)
    auxiliary: bool = param(True, "whether to train four auxiliary heads; they are unused in evaluation")

    def smallest_side(self) -> int:
        return 32

    def network(self, input_shape: tuple[int, ...], classes: int) -> nn.Module:
        return BilateralNetwork(input_shape[0], classes, self.scale_channels, self.norm_layer, self.auxiliary)

    def scale_channels(self, channels: int) -> int:
        """Multiply a channel count by ``width`` and round it to an even number, so that two groups divide it."""
        return max(2, 2 * round(channels * self.width / 2))


class BilateralNetwork(nn.Module):
    """BiSeNet V2 (Yu et al. 2021), which maps images [n, C, H, W] to logits [n, classes, H, W].

    In training, a network with auxiliary heads returns a tuple of logits, those of the main head first.
    """

    def __init__(
        self, channels: int, classes: int, scale_channels: Callable[[int], int], norm: MakeNorm, auxiliary: bool
    ) -> None:
        """Build both branches and the heads; ``scale_channels`` maps channel counts of table 1 to this network's."""
        super().__init__()
        c16, c32, c64, c128 = (scale_channels(count) for count in (16, 32, 64, 128))
        self.detail = nn.Sequential(
            convolution(channels, c64, norm, stride=2), convolution(c64, c64, norm),
            convolution(c64, c64, norm, stride=2), convolution(c64, c64, norm), convolution(c64, c64, norm),
            convolution(c64, c128, norm, stride=2), convolution(c128, c128, norm), convolution(c128, c128, norm),
        )  # fmt: skip
        self.stem = Stem(channels, c16, scale_channels(8), norm)
        self.stage3 = nn.Sequential(Expansion(c16, c32, norm, stride=2), Expansion(c32, c32, norm))
        self.stage4 = nn.Sequential(Expansion(c32, c64, norm, stride=2), Expansion(c64, c64, norm))
        self.stage5 = nn.Sequential(
            Expansion(c64, c128, norm, stride=2), *(Expansion(c128, c128, norm) for _ in range(3))
        )
        self.context = ContextEmbedding(c128, norm)
        self.aggregation = GuidedAggregation(c128, norm)
        stage_channels = (c16, c32, c64, c128) if auxiliary else ()
        self.auxiliary = nn.ModuleList(head(inputs, c128, classes, norm) for inputs in stage_channels)
        self.head = head(c128, scale_channels(1024), classes, norm)

    def forward(self, images: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Return logits at the images' size; in training, also those of the auxiliary heads."""
        size = images.shape[2:]
        semantic = [self.stem(images)]
        for stage in (self.stage3, self.stage4, self.stage5):
            semantic.append(stage(semantic[-1]))
        features = self.aggregation(self.detail(images), self.context(semantic[-1]))
        logits = upsample(self.head(features), size)
        if not self.training or not len(self.auxiliary):
            return logits
        auxiliary = [upsample(head(output), size) for head, output in zip(self.auxiliary, semantic, strict=True)]
        return (logits, *auxiliary)


class Stem(nn.Module):
    """Downsamples by 4 on two paths, convolution and pooling (figure 4a)."""

    def __init__(self, inputs: int, outputs: int, bottleneck: int, norm: MakeNorm) -> None:
        """Build the stem, whose convolutional path has ``bottleneck`` channels in between."""
        super().__init__()
        self.first = convolution(inputs, outputs, norm, stride=2)
        self.left = nn.Sequential(
            convolution(outputs, bottleneck, norm, kernel=1), convolution(bottleneck, outputs, norm, stride=2)
        )
        self.right = nn.MaxPool2d(3, 2, padding=1)
        self.fuse = convolution(2 * outputs, outputs, norm)

    def forward(self, images: Tensor) -> Tensor:
        """Map images [n, inputs, H, W] to features [n, outputs, H / 4, W / 4]."""
        x = self.first(images)
        fused: Tensor = self.fuse(torch.cat([self.left(x), self.right(x)], 1))
        return fused


class Expansion(nn.Module):
    """Gather-and-expansion layer: 3x3 convolution, depthwise convolution that expands, projection, shortcut (figure 5).

    With stride 2, the residual branch has two depthwise convolutions, and the shortcut has one.
    """

    def __init__(self, inputs: int, outputs: int, norm: MakeNorm, stride: int = 1) -> None:
        """Build the layer with stride 1, where ``outputs`` must equal ``inputs``, or with stride 2."""
        super().__init__()
        expanded = EXPANSION * inputs
        # nn.Identity has no parameters; it keeps the parameter names independent of the stride.
        second_depthwise = depthwise(expanded, expanded, norm) if stride == 2 else nn.Identity()
        self.residual = nn.Sequential(
            convolution(inputs, inputs, norm),
            depthwise(inputs, expanded, norm, stride),
            second_depthwise,
            projection(expanded, outputs),
            norm(outputs),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride == 2:
            self.shortcut = nn.Sequential(
                depthwise(inputs, inputs, norm, stride), projection(inputs, outputs), norm(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.residual(x) + self.shortcut(x))


class ContextEmbedding(nn.Module):
    """Adds the global mean to every position (figure 4b)."""

    def __init__(self, channels: int, norm: MakeNorm) -> None:
        """Build the layers: ``whole`` acts on the global mean, ``last`` on the sum."""
        super().__init__()
        self.whole = nn.Sequential(norm(channels), convolution(channels, channels, norm, kernel=1))
        self.last = nn.Conv2d(channels, channels, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return features of the shape of ``x``, [n, channels, h, w]."""
        global_mean = x.mean((2, 3), keepdim=True)
        embedded: Tensor = self.last(x + self.whole(global_mean))
        return embedded


class GuidedAggregation(nn.Module):
    """Bilateral guided aggregation: each branch gates the other, then both are added (figure 6)."""

    def __init__(self, channels: int, norm: MakeNorm) -> None:
        """Build for each branch a path that keeps its resolution and one that changes it to the other's."""
        super().__init__()
        self.detail_kept = nn.Sequential(depthwise(channels, channels, norm), projection(channels, channels))
        self.detail_shrunk = nn.Sequential(
            nn.Conv2d(channels, channels, 3, 2, padding=1, bias=False), norm(channels), nn.AvgPool2d(3, 2, padding=1)
        )
        self.semantic_enlarged = nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1, bias=False), norm(channels))
        self.semantic_kept = nn.Sequential(depthwise(channels, channels, norm), projection(channels, channels))
        self.fuse = nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1, bias=False), norm(channels))

    def forward(self, detail: Tensor, semantic: Tensor) -> Tensor:
        """Combine detail features [n, channels, h, w] with semantic features [n, channels, h / 4, w / 4]."""
        size = detail.shape[2:]
        fine = self.detail_kept(detail) * torch.sigmoid(upsample(self.semantic_enlarged(semantic), size))
        coarse = self.detail_shrunk(detail) * torch.sigmoid(self.semantic_kept(semantic))
        fused: Tensor = self.fuse(fine + upsample(coarse, size))
        return fused


def head(inputs: int, hidden: int, classes: int, norm: MakeNorm) -> nn.Module:
    """Build a segmentation head: a 3x3 convolution, then a 1x1 convolution with bias to logits (figure 7)."""
    return nn.Sequential(convolution(inputs, hidden, norm), nn.Conv2d(hidden, classes, 1))


def convolution(inputs: int, outputs: int, norm: MakeNorm, kernel: int = 3, stride: int = 1) -> nn.Module:
    """Build a convolution without bias, a normalisation and a ReLU."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False), norm(outputs), nn.ReLU()
    )


def depthwise(inputs: int, outputs: int, norm: MakeNorm, stride: int = 1) -> nn.Module:
    """Build a depthwise 3x3 convolution with normalisation; each input channel has ``outputs / inputs`` outputs."""
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride, padding=1, groups=inputs, bias=False), norm(outputs))


def projection(inputs: int, outputs: int) -> nn.Module:
    """Build a 1x1 convolution without bias."""
    return nn.Conv2d(inputs, outputs, 1, bias=False)


def upsample(x: Tensor, size: torch.Size) -> Tensor:
    """Resize features [n, C, h, w] bilinearly to ``size``."""
    return F.interpolate(x, size=tuple(size), mode="bilinear", align_corners=False)
