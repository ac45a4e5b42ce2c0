"""LeNet-5 and the wider network that federated papers call by the same name."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from fedflat.models.spec import ImageModelSpec

KERNEL = 5
# Without padding: 16 -> 12 -> 6 -> 2 -> 1 pixel after convolution, pooling, convolution, pooling.
SMALLEST_SIDE = 16
PADDED_BELOW = 32


@dataclass(frozen=True)
class LeNet5(ImageModelSpec):
    """The classic 6-16-120-84 network (LeCun et al. 1998), with ReLU and max-pooling; below 32 pixels the first layer pads by 2."""

    name = "lenet5"

    def smallest_side(self) -> int:
        """The least height and width in pixels."""
        return SMALLEST_SIDE

    def network(self, input_shape: tuple[int, ...], classes: int) -> nn.Module:
        """Two convolutions of 6 and 16 channels, then 120, 84 and the classes."""
        # The original pads 28-pixel digits to 32, which keeps strokes at the rim in view of the first layer.
        padding = 2 if min(input_shape[1:]) < PADDED_BELOW else 0
        return _two_convolutions(input_shape, (6, 16), padding, (120, 84), classes)


@dataclass(frozen=True)
class Cnn(ImageModelSpec):
    """64-64-384-192: two valid 5x5 convolutions, two hidden layers; the network of FedSAM, and what FedSWA calls LeNet-5."""

    name = "cnn"

    def smallest_side(self) -> int:
        """The least height and width in pixels."""
        return SMALLEST_SIDE

    def network(self, input_shape: tuple[int, ...], classes: int) -> nn.Module:
        """Two convolutions of 64 channels, then 384, 192 and the classes."""
        return _two_convolutions(input_shape, (64, 64), 0, (384, 192), classes)


def _two_convolutions(
    input_shape: tuple[int, ...], channels: tuple[int, int], padding: int, hidden: tuple[int, int], classes: int
) -> nn.Module:
    first, second = channels
    height, width = (_side_after(side + 2 * padding) for side in input_shape[1:])
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


def _side_after(side: int) -> int:
    for _ in range(2):
        side = (side - KERNEL + 1) // 2
    return side
