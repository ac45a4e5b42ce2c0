"""What a task summed over batches, and the figures that are made of it in the end."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fedflat.engines.problem.task import Pooling, Task


class Totals:
    """The sums of a task over any number of batches, in double precision; nothing here waits for a device before ``figures``."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self.sums: dict[str, Tensor] = {}
        self.count = 0

    def add(self, sums: Mapping[str, Tensor], count: int) -> None:
        """The sums of one more batch of so many examples."""
        for name, value in sums.items():
            wide = torch.as_tensor(value).double()
            self.sums[name] = self.sums[name] + wide if name in self.sums else wide
        self.count += count

    def merge(self, other: Totals) -> None:
        """Everything that another has summed."""
        self.add(other.sums, other.count)

    def means(self) -> dict[str, Tensor]:
        """The same figures as tensors, for which nothing waits for a device where they are means over examples."""
        if isinstance(self._task, Pooling):
            return {name: torch.tensor(value, dtype=torch.float64) for name, value in self.figures().items()}
        return {name: value / self.count for name, value in self.sums.items()}

    def figures(self) -> dict[str, float]:
        """Every metric: what the task makes of its totals, or else the mean over examples."""
        totals = {name: value.cpu() for name, value in self.sums.items()}
        if isinstance(self._task, Pooling):
            return self._task.finish(totals, self.count)
        return {name: float(value) / self.count for name, value in totals.items()}
