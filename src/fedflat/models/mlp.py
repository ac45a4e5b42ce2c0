"""Fully connected networks."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import nn

from fedflat.models.registry import ModelExample, ModelSpec
from fedflat.text import param


@dataclass(frozen=True)
class Mlp(ModelSpec):
    """A multilayer perceptron: hidden layers of equal width with ReLU; layers=0 is multinomial logistic regression."""

    name = "mlp"
    dataset = "digits"
    examples = (ModelExample("mlp", (1, 8, 8), 10),)
    hidden: int = param(64, "width of each hidden layer", low=1, positional=True)
    layers: int = param(1, "number of hidden layers", low=0, high=1000)

    def network(self, input_shape: tuple[int, ...], classes: int) -> nn.Module:
        """Build the network for inputs of any shape, which it flattens."""
        layers: list[nn.Module] = [nn.Flatten()]
        width = math.prod(input_shape)
        for _ in range(self.layers):
            layers += [nn.Linear(width, self.hidden), nn.ReLU()]
            width = self.hidden
        return nn.Sequential(*layers, nn.Linear(width, classes))
