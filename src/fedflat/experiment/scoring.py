"""Scores of one model on any examples: the task's metrics, averaged, batch by batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import ceil

import numpy as np
import torch
from torch import Tensor

from fedflat.data import Examples
from fedflat.engines.contract import ModelState
from fedflat.engines.loop import one_thread
from fedflat.engines.problem import Problem, moved

Scores = dict[str, float]
"""The mean of every metric, and under ``examples`` over how many."""


class Scorer:
    """Scores one model on examples that may lie anywhere."""

    def __init__(self, problem: Problem, model: ModelState) -> None:
        self.problem, self.model = problem, model
        self._buffers = {**problem.buffers.views(model.buffers), **model.integers}

    def of(self, examples: Examples, positions: np.ndarray | None = None) -> Scores:
        """The scores on all examples, or on those at some positions."""
        total = _Total()
        with one_thread():
            for batch, output in self._outputs(examples, positions):
                total.add(self.problem.task.sums(output, batch.targets), len(batch))
        return total.means()

    def by_class(self, examples: Examples) -> dict[int, Scores]:
        """The scores on the examples of each class; where each position has a class, on the positions of each."""

        def pieces() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
            for batch, output in self._outputs(examples):
                if batch.targets.ndim > 1:
                    output = output.reshape(-1, output.shape[-1])
                yield batch.targets.reshape(-1), output, batch.targets.reshape(-1)

        return self._apart(pieces())

    def by_group(self, examples: Examples) -> dict[int, Scores]:
        """The scores on the examples of each group."""
        return self._apart((batch.tensors()["groups"], output, batch.targets) for batch, output in self._outputs(examples))

    def _apart(self, pieces: Iterator[tuple[Tensor, Tensor, Tensor]]) -> dict[int, Scores]:
        """The scores for each label of (labels, outputs, targets), whose batches are mixed: some models normalise by their batch."""
        totals: dict[int, _Total] = {}
        with one_thread():
            for labels, output, targets in pieces:
                for label in torch.unique(labels).tolist():
                    rows = labels == label
                    totals.setdefault(label, _Total()).add(self.problem.task.sums(output[rows], targets[rows]), int(rows.sum()))
        return {label: totals[label].means() for label in sorted(totals)}

    def _outputs(self, examples: Examples, positions: np.ndarray | None = None) -> Iterator[tuple[Examples, Tensor]]:
        chosen = torch.arange(len(examples)) if positions is None else torch.from_numpy(positions)
        for part in torch.split(chosen, self.problem.evaluation_batch):
            batch = moved(examples.take(part.to(examples.targets.device)), self.problem.device)
            yield batch, self.problem.predicted(self.model.weights, self._buffers, batch.inputs)


class _Total:
    def __init__(self) -> None:
        self.sums: dict[str, float] = {}
        self.count = 0

    def add(self, sums: Mapping[str, Tensor], count: int) -> None:
        for name, value in sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + float(value)
        self.count += count

    def means(self) -> Scores:
        return {**{name: value / self.count for name, value in self.sums.items()}, "examples": self.count}


def spread_over(each: Mapping[str, Scores], metric: str) -> dict[str, float]:
    """A metric over clients, classes or domains, each counting the same: mean, standard deviation, and the worst tenth.

    The deviation is that of all there are, not of a sample of them; the worst tenth is the mean over the lowest tenth, rounded up.

    >>> spread_over({"a": {"accuracy": 0.5, "loss": 2.0}, "b": {"accuracy": 1.0, "loss": 0.0}}, "accuracy")
    {'mean': 0.75, 'std': 0.25, 'worst_tenth': 0.5, 'loss': 1.0, 'count': 2}
    """
    values = np.array([scores[metric] for scores in each.values()])
    worst = np.sort(values)[: ceil(len(values) / 10)]
    found = {"mean": float(values.mean()), "std": float(values.std()), "worst_tenth": float(worst.mean())}
    if metric != "loss":
        found["loss"] = float(np.mean([scores["loss"] for scores in each.values()]))
    return {**found, "count": len(values)}
