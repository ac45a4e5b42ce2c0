"""VGG-11 for small images."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from fedflat.models.spec import ImageModelSpec
from fedflat.text import param

# Widths of configuration A of Simonyan and Zisserman; each inner tuple ends in a max-pooling.
STAGES = ((64,), (128,), (256, 256), (512, 512), (512, 512))
SHRINKS_BY = 32


@dataclass(frozen=True)
class Vgg11(ImageModelSpec):
    """Eight 3x3 convolutions with bias and without normalisation, and a short head without dropout, as FedSWA trains it on CIFAR."""

    name = "vgg11"
    hidden: int = param(
        100, "width of the head's hidden layer: FedSWA's code has 100 for CIFAR-10 and 256 for CIFAR-100", low=1
    )

    def smallest_side(self) -> int:
        """The least height and width in pixels."""
        return SHRINKS_BY

    def network(self, input_shape: tuple[int, ...], classes: int) -> nn.Module:
        """Five stages of convolutions, then the hidden layer and the classes."""
        channels, height, width = input_shape
        layers: list[nn.Module] = []
        for stage in STAGES:
            for wide in stage:
                layers += [nn.Conv2d(channels, wide, 3, padding=1), nn.ReLU()]
                channels = wide
            layers.append(nn.MaxPool2d(2))
        features = channels * (height // SHRINKS_BY) * (width // SHRINKS_BY)
        return nn.Sequential(
            *layers, nn.Flatten(), nn.Linear(features, self.hidden), nn.ReLU(), nn.Linear(self.hidden, classes)
        )
