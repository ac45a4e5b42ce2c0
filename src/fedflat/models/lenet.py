"""LeNet-5, and the wider network that federated papers also call LeNet."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from fedflat.models.registry import ImageModelSpec, ModelExample

KERNEL = 5
# Without padding: 16 -> 12 -> 6 -> 2 -> 1 pixel after convolution, pooling, convolution, pooling.
SMALLEST_SIDE = 16
PADDED_BELOW = 32


@dataclass(frozen=True)
class LeNet5(ImageModelSpec):
    """LeNet-5 (LeCun et al. 1998) with ReLU and max-pooling; images smaller than 32 × 32 pixels get a border of 2."""

    name = "lenet5"
    dataset = "mnist"
    examples = (ModelExample("lenet5", (1, 28, 28), 10, "LeCun et al. 1998"),)

    def smallest_side(self) -> int:
        return SMALLEST_SIDE

    def network(self, input_shape: tuple[int, ...], classes: int) -> nn.Module:
        # The original pads 28-pixel digits to 32, so that the first layer sees strokes at the border.
        padding = 2 if min(input_shape[1:]) < PADDED_BELOW else 0
        return _two_convolutions(input_shape, (6, 16), padding, hidden=(120, 84), classes=classes)


@dataclass(frozen=True)
class Cnn(ImageModelSpec):
    """Two unpadded 5x5 convolutions (64 channels) and two hidden layers (384 and 192 units); FedSWA's LeNet-5."""

    name = "cnn"
    examples = (
        ModelExample("cnn", (3, 32, 32), 10, "FedSAM (2022); FedSWA (2025) calls it LeNet-5, FedWMSAM (2025) LeNet"),
    )

    def smallest_side(self) -> int:
        return SMALLEST_SIDE

    def network(self, input_shape: tuple[int, ...], classes: int) -> nn.Module:
        return _two_convolutions(input_shape, (64, 64), padding=0, hidden=(384, 192), classes=classes)


def _two_convolutions(
    input_shape: tuple[int, ...], channels: tuple[int, int], padding: int, hidden: tuple[int, int], classes: int
) -> nn.Module:
    """Build two 5x5 convolutions, each with ReLU and max-pooling, two hidden layers and a classifier.

    Only the first convolution is padded.
    """
    first, second = channels
    height, width = (_pooled_side(side + 2 * padding) for side in input_shape[1:])
    return nn.Sequential(
        nn.Conv2d(input_shape[0], first, KERNEL, padding=padding),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(first, second, KERNEL),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(second * height * width, hidden[0]),
        nn.ReLU(),
        nn.Linear(hidden[0], hidden[1]),
        nn.ReLU(),
        nn.Linear(hidden[1], classes),
    )


def _pooled_side(side: int) -> int:
    """Return the height or width after both convolutions and poolings."""
    for _ in range(2):
        side = (side - KERNEL + 1) // 2
    return side
