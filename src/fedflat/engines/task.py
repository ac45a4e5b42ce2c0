"""What a model is trained for: its loss and its metrics. Users may bring their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch.nn.functional as F
from torch import Tensor


@runtime_checkable
class Task(Protocol):
    """A loss to train on, and metrics that add up over batches."""

    @property
    def metric(self) -> str:
        """The name of the metric by which models are compared; higher is better."""
        ...

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """The mean loss of a batch."""
        ...

    def sums(self, output: Tensor, target: Tensor) -> dict[str, Tensor]:
        """Every metric, and ``loss``, summed over the examples of a batch; divided by the number of examples in the end."""
        ...


@dataclass(frozen=True)
class Classification:
    """Cross-entropy, and the share of examples classified right."""

    metric: str = "accuracy"

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Mean cross-entropy."""
        return F.cross_entropy(output, target)

    def sums(self, output: Tensor, target: Tensor) -> dict[str, Tensor]:
        """Summed cross-entropy and the number of right answers."""
        right = (output.argmax(1) == target).sum()
        return {"loss": F.cross_entropy(output, target, reduction="sum"), "accuracy": right}
