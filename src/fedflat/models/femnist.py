"""The convolutional network for handwritten characters that TFF and FedJAX train on EMNIST and FEMNIST."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from fedflat.models.spec import ImageModelSpec
from fedflat.text import param


@dataclass(frozen=True)
class FemnistCnn(ImageModelSpec):
    """Two valid 3x3 convolutions, one max-pooling, one hidden layer of 128 (Reddi et al. 2021)."""

    name = "femnist-cnn"
    dropout: bool = param(
        True, "drop a quarter of the features and half of the hidden layer in training, as the original does"
    )

    def smallest_side(self) -> int:
        """The least height and width in pixels."""
        return 6

    def network(self, input_shape: tuple[int, ...], classes: int) -> nn.Module:
        """Convolutions of 32 and 64 channels, max-pooling, 128, the classes."""
        channels, height, width = input_shape
        return nn.Sequential(
            nn.Conv2d(channels, 32, 3),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            self._dropout(0.25),
            nn.Flatten(),
            nn.Linear(64 * ((height - 4) // 2) * ((width - 4) // 2), 128),
            nn.ReLU(),
            self._dropout(0.5),
            nn.Linear(128, classes),
        )

    def _dropout(self, lr: float) -> nn.Module:
        # A layer that does nothing instead of none, so that parameters keep their names either way.
        return nn.Dropout(lr) if self.dropout else nn.Identity()
