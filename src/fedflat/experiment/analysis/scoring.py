"""Scores of one model on any examples: the task's metrics, batch by batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import ceil

import numpy as np
import torch
from torch import Tensor

from fedflat.data import Examples
from fedflat.engines.cpu.engine import one_thread
from fedflat.engines.problem.problem import Problem, moved
from fedflat.engines.problem.task import PooledTask
from fedflat.engines.problem.totals import Totals
from fedflat.engines.round.contract import ModelState

Scores = dict[str, float]
"""Every metric, and under ``examples`` over how many."""


class Scorer:
    """Scores one model on examples that may lie anywhere; ``batch_statistics`` says otherwise than the problem how it normalises."""

    def __init__(self, problem: Problem, model: ModelState, batch_statistics: bool | None = None) -> None:
        self.problem, self.model, self._batch_statistics = problem, model, batch_statistics
        self._buffers = {**problem.buffers.views(model.buffers), **model.integers}

    def of(self, examples: Examples, positions: np.ndarray | None = None) -> Scores:
        """The scores on all examples, or on those at some positions."""
        return scores_of(self.totals(examples, positions))

    def totals(self, examples: Examples, positions: np.ndarray | None = None) -> Totals:
        """What the task summed over all examples, or over those at some positions."""
        totals = Totals(self.problem.task)
        with one_thread():
            for batch, output in self._outputs(examples, positions):
                totals.add(self.problem.task.sums(output, batch.targets), len(batch))
        return totals

    def by_class(self, examples: Examples) -> dict[int, Scores]:
        """The scores on the examples of each class; where each position or pixel has a class, on those of each."""
        if isinstance(self.problem.task, PooledTask):
            return self.problem.task.by_class(self.totals(examples).sums)

        def pieces() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
            for batch, output in self._outputs(examples):
                if batch.targets.ndim > 1:
                    output = output.reshape(-1, output.shape[-1])
                yield batch.targets.reshape(-1), output, batch.targets.reshape(-1)

        return {label: scores_of(totals) for label, totals in self._apart(pieces()).items()}

    def by_group(self, examples: Examples, positions: np.ndarray | None = None) -> dict[int, Totals]:
        """What the task summed over the examples of each group."""
        return self._apart(
            (batch.tensors()["groups"], output, batch.targets) for batch, output in self._outputs(examples, positions)
        )

    def _apart(self, pieces: Iterator[tuple[Tensor, Tensor, Tensor]]) -> dict[int, Totals]:
        """The sums for each label of (labels, outputs, targets), whose batches are mixed: some models normalise by their batch."""
        totals: dict[int, Totals] = {}
        with one_thread():
            for labels, output, targets in pieces:
                for label in torch.unique(labels).tolist():
                    rows = labels == label
                    one = totals.setdefault(label, Totals(self.problem.task))
                    one.add(self.problem.task.sums(output[rows], targets[rows]), int(rows.sum()))
        return dict(sorted(totals.items()))

    def _outputs(self, examples: Examples, positions: np.ndarray | None = None) -> Iterator[tuple[Examples, Tensor]]:
        chosen = torch.arange(len(examples)) if positions is None else torch.from_numpy(positions)
        for part in self.problem.evaluation_batches(len(chosen), self._batch_statistics):
            batch = moved(examples.take(chosen[part.cpu()].to(examples.targets.device)), self.problem.device)
            yield batch, self.problem.predicted(self.model.weights, self._buffers, batch.inputs, self._batch_statistics)


def scores_of(totals: Totals) -> Scores:
    """The figures of some sums, and over how many examples they are."""
    return {**totals.figures(), "examples": totals.count}


def spread_over(each: Mapping[str, Scores], metric: str) -> dict[str, float]:
    """A metric over clients, classes or domains, each counting the same: mean, standard deviation, and the worst tenth.

    The deviation is that of all there are, not of a sample of them; the worst tenth is the mean over the lowest tenth, rounded up.

    >>> spread_over({"a": {"accuracy": 0.5, "loss": 2.0}, "b": {"accuracy": 1.0, "loss": 0.0}}, "accuracy")
    {'mean': 0.75, 'std': 0.25, 'worst_tenth': 0.5, 'loss': 1.0, 'count': 2}
    """
    values = np.array([scores[metric] for scores in each.values()])
    worst = np.sort(values)[: ceil(len(values) / 10)]
    found = {"mean": float(values.mean()), "std": float(values.std()), "worst_tenth": float(worst.mean())}
    if metric != "loss" and all(
        "loss" in scores for scores in each.values()
    ):  # a user's own task may have none per class
        found["loss"] = float(np.mean([scores["loss"] for scores in each.values()]))
    return {**found, "count": len(values)}
