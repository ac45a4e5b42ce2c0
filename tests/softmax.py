"""The softmax regression of the numpy reference as a torch model and dataset."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from fedflat.data import Augmentation, Dataset, Examples
from fedflat.engines.problem.problem import Problem
from fedflat.engines.problem.task import Classification

from .reference.softmax import Softmax


def softmax_problem(reference: Softmax, x0: np.ndarray, device: str = "cpu") -> Problem:
    """A linear layer whose weight and bias start as ``x0``, and the examples of all clients."""
    classes, features = reference.shapes[0]
    model = nn.Linear(features, classes, dtype=torch.float64)
    weight, bias = torch.tensor(x0).split([classes * features, classes])
    with torch.no_grad():
        model.weight.copy_(weight.view(classes, features))
        model.bias.copy_(bias)
    inputs, labels = (torch.tensor(np.concatenate(rows)) for rows in (reference.features, reference.labels))
    examples = Examples(inputs, labels)
    data = Dataset("softmax", examples, examples, ("a", "b", "c"), kind="vector")
    return Problem(model, Classification(), data, Augmentation(), torch.float64, device=torch.device(device))
