"""Fully connected networks."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import nn

from fedflat.models.spec import ModelSpec
from fedflat.text import param


@dataclass(frozen=True)
class Mlp(ModelSpec):
    """Flattened samples through equally wide hidden layers with ReLU; with layers=0 it is multinomial logistic regression."""

    name = "mlp"
    hidden: int = param(64, "width of each hidden layer", low=1)
    layers: int = param(1, "number of hidden layers", low=0)

    def check(self, input_shape: tuple[int, ...]) -> None:
        """Every shape will do."""

    def network(self, input_shape: tuple[int, ...], classes: int) -> nn.Module:
        """Flatten, then Linear and ReLU for each hidden layer, then the classifier."""
        stack: list[nn.Module] = [nn.Flatten()]
        width = math.prod(input_shape)
        for _ in range(self.layers):
            stack += [nn.Linear(width, self.hidden), nn.ReLU()]
            width = self.hidden
        return nn.Sequential(*stack, nn.Linear(width, classes))
