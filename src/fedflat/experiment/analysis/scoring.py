"""Metrics of one model on any examples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import ceil

import numpy as np
import torch
from torch import Tensor

from fedflat.data import Examples
from fedflat.engines.cpu.engine import one_thread
from fedflat.engines.problem.problem import Problem, move_examples
from fedflat.engines.problem.task import PooledTask
from fedflat.engines.problem.totals import Totals
from fedflat.engines.round.contract import ModelState

Scores = dict[str, float]
"""Metrics by name, and the number of examples under ``examples``."""


class Scorer:
    """Computes metrics of one model.

    Args:
        problem: the federated problem.
        model: weights and buffers.
        batch_statistics: whether BatchNorm normalises by batch; default: as the problem does.
    """

    def __init__(self, problem: Problem, model: ModelState, batch_statistics: bool | None = None) -> None:
        self.problem, self.model, self._batch_statistics = problem, model, batch_statistics
        self._buffers = {**problem.buffers.views(model.buffers), **model.integers}

    def of(self, examples: Examples, positions: np.ndarray | None = None) -> Scores:
        """Metrics on all examples, or on those at ``positions``."""
        return scores_of(self.totals(examples, positions))

    def totals(self, examples: Examples, positions: np.ndarray | None = None) -> Totals:
        """The task's sums over all examples, or over those at ``positions``."""
        totals = Totals(self.problem.task)
        with one_thread():
            for batch, output in self._outputs(examples, positions):
                totals.add(self.problem.task.sums(output, batch.targets), len(batch))
        return totals

    def by_class(self, examples: Examples) -> dict[int, Scores]:
        """Metrics per class; for sequences and segmentation, per class of a position or pixel."""
        if isinstance(self.problem.task, PooledTask):
            return self.problem.task.by_class(self.totals(examples).sums)

        def pieces() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
            for batch, output in self._outputs(examples):
                if batch.targets.ndim > 1:
                    output = output.reshape(-1, output.shape[-1])
                yield batch.targets.reshape(-1), output, batch.targets.reshape(-1)

        return {label: scores_of(totals) for label, totals in self._apart(pieces()).items()}

    def by_group(self, examples: Examples, positions: np.ndarray | None = None) -> dict[int, Totals]:
        """The task's sums per group."""
        return self._apart(
            (batch.tensors()["groups"], output, batch.targets) for batch, output in self._outputs(examples, positions)
        )

    def _apart(self, pieces: Iterator[tuple[Tensor, Tensor, Tensor]]) -> dict[int, Totals]:
        """Sums per label. Batches stay mixed, because some models normalise by batch."""
        totals: dict[int, Totals] = {}
        with one_thread():
            for labels, output, targets in pieces:
                for label in torch.unique(labels).tolist():
                    rows = labels == label
                    label_totals = totals.setdefault(label, Totals(self.problem.task))
                    label_totals.add(self.problem.task.sums(output[rows], targets[rows]), int(rows.sum()))
        return dict(sorted(totals.items()))

    def _outputs(self, examples: Examples, positions: np.ndarray | None = None) -> Iterator[tuple[Examples, Tensor]]:
        chosen = torch.arange(len(examples)) if positions is None else torch.from_numpy(positions)
        for part in self.problem.evaluation_batches(len(chosen), self._batch_statistics):
            batch = move_examples(examples.take(chosen[part.cpu()].to(examples.targets.device)), self.problem.device)
            yield batch, self.problem.predict(self.model.weights, self._buffers, batch.inputs, self._batch_statistics)


def scores_of(totals: Totals) -> Scores:
    """Metrics from sums, and the number of examples."""
    return {**totals.metrics(), "examples": totals.count}


def spread_over(each: Mapping[str, Scores], metric: str) -> dict[str, float]:
    """Unweighted statistics of a metric over clients, classes or domains.

    ``std`` is the population standard deviation; ``worst_tenth`` is the mean of the lowest tenth (rounded up).

    >>> spread_over({"a": {"accuracy": 0.5, "loss": 2.0}, "b": {"accuracy": 1.0, "loss": 0.0}}, "accuracy")
    {'mean': 0.75, 'std': 0.25, 'worst_tenth': 0.5, 'loss': 1.0, 'count': 2}
    """
    values = np.array([scores[metric] for scores in each.values()])
    worst = np.sort(values)[: ceil(len(values) / 10)]
    statistics = {"mean": float(values.mean()), "std": float(values.std()), "worst_tenth": float(worst.mean())}
    # A user-defined task may have no loss per class.
    if metric != "loss" and all("loss" in scores for scores in each.values()):
        statistics["loss"] = float(np.mean([scores["loss"] for scores in each.values()]))
    return {**statistics, "count": len(values)}
