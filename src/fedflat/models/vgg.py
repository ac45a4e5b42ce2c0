"""VGG-11 for small images."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from fedflat.models.registry import ImageModelSpec, ModelExample
from fedflat.text import param

# Widths of configuration A of Simonyan and Zisserman; each stage ends in max-pooling.
STAGES = ((64,), (128,), (256, 256), (512, 512), (512, 512))
STRIDE = 32


@dataclass(frozen=True)
class Vgg11(ImageModelSpec):
    """VGG-11, with eight 3x3 convolutions without normalisation and a head without dropout, as in the FedSWA paper."""

    name = "vgg11"
    examples = (
        ModelExample("vgg11", (3, 32, 32), 10, "Simonyan and Zisserman 2015; head as in FedSWA's CIFAR-10 code"),
        ModelExample("vgg11(hidden=256)", (3, 32, 32), 100, "head as in FedSWA's CIFAR-100 code"),
    )
    hidden: int = param(100, "hidden units of the head: FedSWA uses 100 for CIFAR-10, 256 for CIFAR-100", low=1)

    def smallest_side(self) -> int:
        return STRIDE

    def network(self, input_shape: tuple[int, ...], classes: int) -> nn.Module:
        channels, height, width = input_shape
        layers: list[nn.Module] = []
        for stage in STAGES:
            for outputs in stage:
                layers += [nn.Conv2d(channels, outputs, 3, padding=1), nn.ReLU()]
                channels = outputs
            layers.append(nn.MaxPool2d(2))
        # STRIDE is the product of the strides of all poolings.
        features = channels * (height // STRIDE) * (width // STRIDE)
        return nn.Sequential(
            *layers, nn.Flatten(), nn.Linear(features, self.hidden), nn.ReLU(), nn.Linear(self.hidden, classes)
        )
