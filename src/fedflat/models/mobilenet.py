"""MobileNetV2 (Sandler et al. 2018): inverted residuals with linear bottlenecks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from fedflat.models.norms import GROUPS_HELP, NormalisedModelSpec
from fedflat.models.registry import ModelExample
from fedflat.text import param

# Table 2 of the paper: expansion, channels, blocks, stride of the first block.
STAGES = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
STEM_CHANNELS, LAST_CHANNELS = 32, 1280


@dataclass(frozen=True)
class MobileNetV2(NormalisedModelSpec):
    """MobileNetV2, with 17 inverted residual blocks and a linear classifier, but without dropout."""

    name = "mobilenetv2"
    dataset = "landmarks"
    partition = "natural"
    examples = (
        ModelExample(
            "mobilenetv2", (3, 224, 224), 2028, "Sandler et al. 2018; FedSAM (2022) and WiMA (2023) on landmarks"
        ),
        ModelExample("mobilenetv2(stem=small)", (3, 32, 32), 10),
    )
    groups: int = param(8, GROUPS_HELP, low=1)
    width: float = param(1.0, "factor on all channel counts, which are rounded to multiples of 8", above=0)
    stem: Literal["standard", "small"] = param(
        "standard", "total stride: 32 (standard), or 8 for images of CIFAR's size (small)"
    )

    def smallest_side(self) -> int:
        return 32 if self.stem == "standard" else 8

    def network(self, input_shape: tuple[int, ...], classes: int) -> nn.Module:
        """Build the stem, the stages of inverted residual blocks, the last 1x1 convolution and the classifier."""
        # For small images the stem and the second stage have stride 1; the weights have the same shapes.
        small = self.stem == "small"
        channels = _round_channels(STEM_CHANNELS * self.width)
        layers: list[nn.Module] = [self._conv_norm_relu(input_shape[0], channels, 3, 1 if small else 2)]
        for stage, (expansion, stage_channels, depth, first_stride) in enumerate(STAGES):
            outputs = _round_channels(stage_channels * self.width)
            stride = 1 if small and stage == 1 else first_stride
            for block in range(depth):
                layers.append(self._block(channels, outputs, expansion, stride if block == 0 else 1))
                channels = outputs
        # As in the paper, a width below 1 does not shrink the last layer.
        last = _round_channels(LAST_CHANNELS * max(1.0, self.width))
        layers.append(self._conv_norm_relu(channels, last, 1))
        return MobileNetwork(nn.Sequential(*layers), nn.Linear(last, classes))

    def _block(self, inputs: int, outputs: int, expansion: int, stride: int) -> nn.Module:
        """Build an inverted residual block: expand the channels, filter each of them, project to ``outputs`` channels.

        A block that keeps the shape adds its input to its output.
        """
        expanded = inputs * expansion
        layers = [self._conv_norm_relu(inputs, expanded, 1)] if expansion > 1 else []
        layers += [
            self._conv_norm_relu(expanded, expanded, 3, stride, channel_groups=expanded),
            nn.Conv2d(expanded, outputs, 1, bias=False),
            self.norm_layer(outputs),
        ]
        return InvertedResidual(nn.Sequential(*layers), residual=stride == 1 and inputs == outputs)

    def _conv_norm_relu(
        self, inputs: int, outputs: int, kernel: int, stride: int = 1, channel_groups: int = 1
    ) -> nn.Module:
        """Build a convolution without bias, a normalisation and a ReLU6."""
        conv = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, groups=channel_groups, bias=False)
        return nn.Sequential(conv, self.norm_layer(outputs), nn.ReLU6())


def _round_channels(channels: float) -> int:
    """Round a channel count to a multiple of 8 that is at most a tenth smaller, as in the authors' code."""
    rounded = max(8, int(channels + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * channels else rounded


class MobileNetwork(nn.Module):
    """Maps images [n, channels, height, width] to logits [n, classes]: features, global mean, linear classifier."""

    def __init__(self, features: nn.Module, classifier: nn.Module) -> None:
        super().__init__()
        self.features = features
        self.classifier = classifier

    def forward(self, images: Tensor) -> Tensor:
        """Return logits [n, classes]."""
        features: Tensor = self.features(images)
        logits: Tensor = self.classifier(features.mean((2, 3)))
        return logits


class InvertedResidual(nn.Module):
    """Applies ``branch``, which expands the channels, filters each and projects; adds the input if ``residual``."""

    def __init__(self, branch: nn.Module, residual: bool) -> None:
        super().__init__()
        self.branch = branch
        self.residual = residual

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.branch(x)
        return x + y if self.residual else y
