"""The convolutional network that TFF and FedJAX train on EMNIST and FEMNIST."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from fedflat.models.registry import ImageModelSpec, ModelExample
from fedflat.text import param


@dataclass(frozen=True)
class FemnistCnn(ImageModelSpec):
    """Two unpadded 3x3 convolutions, max-pooling, and a hidden layer of 128 units (Reddi et al. 2021)."""

    name = "femnist-cnn"
    dataset = "femnist"
    partition = "natural"
    examples = (ModelExample("femnist-cnn", (1, 28, 28), 62, "Reddi et al. 2021; TFF, FedJAX; WiMA (2023)"),)
    dropout: bool = param(
        True, "drop a quarter of the features and half of the hidden units in training, as in the original"
    )

    def smallest_side(self) -> int:
        return 6

    def network(self, input_shape: tuple[int, ...], classes: int) -> nn.Module:
        channels, height, width = input_shape
        # Each unpadded convolution removes 2 rows and columns; pooling halves the rest.
        features = 64 * ((height - 4) // 2) * ((width - 4) // 2)
        return nn.Sequential(
            nn.Conv2d(channels, 32, 3),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            self._dropout(0.25),
            nn.Flatten(),
            nn.Linear(features, 128),
            nn.ReLU(),
            self._dropout(0.5),
            nn.Linear(128, classes),
        )

    def _dropout(self, share: float) -> nn.Module:
        # Identity keeps the parameter names independent of dropout.
        return nn.Dropout(share) if self.dropout else nn.Identity()
