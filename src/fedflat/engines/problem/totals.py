"""Metrics of models over sets of examples: batches to evaluate, running sums, and the final metrics."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fedflat.data import Examples
from fedflat.engines.problem.problem import Problem
from fedflat.engines.problem.task import PooledTask, Task

Metrics = dict[str, float]


class Totals:
    """A task's sums over any number of batches, in float64. Only ``metrics`` waits for the device."""

    def __init__(self, task: Task) -> None:
        """Start with no examples; ``task`` turns sums into metrics."""
        self._task = task
        self.sums: dict[str, Tensor] = {}
        self.count = 0

    def add(self, sums: Mapping[str, Tensor], count: int) -> None:
        """Add the sums of a batch of ``count`` examples."""
        for name, value in sums.items():
            batch_sum = torch.as_tensor(value).double()
            self.sums[name] = self.sums[name] + batch_sum if name in self.sums else batch_sum
        self.count += count

    def merge(self, other: Totals) -> None:
        """Add everything that ``other`` has summed."""
        self.add(other.sums, other.count)

    def metric_tensors(self) -> dict[str, Tensor]:
        """The metrics as float64 tensors; waits for the device only if the task is a ``PooledTask``."""
        if isinstance(self._task, PooledTask):
            return {name: torch.tensor(value, dtype=torch.float64) for name, value in self.metrics().items()}
        return {name: value / self.count for name, value in self.sums.items()}

    def metrics(self) -> Metrics:
        """The metrics as numbers: means over examples, or the result of a ``PooledTask``'s ``finish``."""
        totals = {name: value.cpu() for name, value in self.sums.items()}
        if isinstance(self._task, PooledTask):
            return self._task.finish(totals, self.count)
        return {name: float(value) / self.count for name, value in totals.items()}


class EvaluationBatch(NamedTuple):
    """One batch to evaluate: index of the model, name of the set of examples, positions in it [batch]."""

    model: int
    examples: str
    positions: Tensor


def evaluation_plan(problem: Problem, models: int, examples: Mapping[str, Examples]) -> list[EvaluationBatch]:
    """All batches of an evaluation, in the order in which their sums must be added.

    Args:
        problem: decides how a set is divided into batches.
        models: number of models.
        examples: the sets to evaluate on, by name.
    """
    return [
        EvaluationBatch(model, name, positions)
        for model in range(models)
        for name, examples_of_set in examples.items()
        for positions in problem.evaluation_batches(len(examples_of_set))
    ]


def evaluation_result(
    task: Task,
    plan: Sequence[EvaluationBatch],
    sums: Sequence[Mapping[str, Tensor]],
    models: Sequence[str],
    examples: Collection[str],
) -> dict[str, dict[str, Metrics]]:
    """Metrics by model and set of examples: model -> set -> metric -> value.

    Args:
        task: turns sums into metrics.
        plan: the evaluated batches, from ``evaluation_plan``.
        sums: the task's sums over each batch of the plan, in the same order.
        models: names of the models.
        examples: names of the sets.
    """
    totals = {model: {name: Totals(task) for name in examples} for model in models}
    for batch, batch_sums in zip(plan, sums, strict=True):
        totals[models[batch.model]][batch.examples].add(batch_sums, len(batch.positions))
    return {model: {name: total.metrics() for name, total in sets.items()} for model, sets in totals.items()}
