"""Metrics of one model on any examples: in total, by class, by group, and their spread over clients or classes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import ceil

import numpy as np
import torch
from torch import Tensor

from fedflat.data import IGNORED_TOKEN, Examples
from fedflat.data.batches import move_examples
from fedflat.engines.cpu.engine import one_thread
from fedflat.engines.problem.problem import Problem
from fedflat.engines.problem.task import Totals
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
        self._buffers = {**problem.buffer_layout.views(model.buffers), **model.integer_buffers}

    def scores(self, examples: Examples, positions: np.ndarray | None = None) -> Scores:
        """Return the metrics on all examples, or on those at ``positions``."""
        return scores_of(self.totals(examples, positions))

    def totals(self, examples: Examples, positions: np.ndarray | None = None) -> Totals:
        """The task's sums over all examples, or over those at ``positions``."""
        totals = Totals(self.problem.task)
        with one_thread():  # sums do not depend on the number of threads
            for batch, output in self._outputs(examples, positions):
                totals.add(self.problem.task.sums(output, batch.targets), len(batch))
        return totals

    def scores_by_class(self, examples: Examples) -> dict[int, Scores]:
        """Metrics per class; for sequences and segmentation, per class of a position or pixel."""
        by_class = getattr(self.problem.task, "by_class", None)
        if by_class is not None:
            scores: dict[int, Scores] = by_class(self.totals(examples).sums)
            return scores

        def outputs_by_class() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
            """Yield batches of (labels, outputs, targets) with one row per label; an example's label is its target."""
            for batch, output in self._outputs(examples):
                targets = batch.targets
                if targets.ndim > 1:  # sequences: every position becomes a sequence of length 1
                    output, targets = output.reshape(-1, 1, output.shape[-1]), targets.reshape(-1, 1)
                labels = targets.reshape(-1)
                counts = labels != IGNORED_TOKEN
                yield labels[counts], output[counts], targets[counts]

        return {label: scores_of(totals) for label, totals in self._totals_by_label(outputs_by_class()).items()}

    def totals_by_group(self, examples: Examples, positions: np.ndarray) -> dict[int, Totals]:
        """The task's sums per group of the examples at ``positions``, e.g. per domain or writer."""
        return self._totals_by_label(
            (batch.tensors()["groups"], output, batch.targets) for batch, output in self._outputs(examples, positions)
        )

    def _totals_by_label(self, outputs: Iterable[tuple[Tensor, Tensor, Tensor]]) -> dict[int, Totals]:
        """The task's sums per label (a class or group), from batches of (labels, outputs, targets).

        Each batch contains several labels, because models that normalise by batch need mixed batches.
        """
        task = self.problem.task
        totals: dict[int, Totals] = {}
        with one_thread():
            for labels, output, targets in outputs:
                for label in torch.unique(labels).tolist():
                    rows = labels == label
                    label_totals = totals.setdefault(label, Totals(task))
                    label_totals.add(task.sums(output[rows], targets[rows]), int(rows.sum()))
        return dict(sorted(totals.items()))

    def _outputs(self, examples: Examples, positions: np.ndarray | None = None) -> Iterator[tuple[Examples, Tensor]]:
        """Yield every batch of the examples (or of those at ``positions``) with the model's output."""
        chosen = torch.arange(len(examples)) if positions is None else torch.from_numpy(positions)
        for part in self.problem.evaluation_batches(len(chosen), self._batch_statistics):
            batch = take_on_device(self.problem, examples, chosen[part.cpu()])
            yield batch, self.problem.predict(self.model.weights, self._buffers, batch.inputs, self._batch_statistics)


def take_on_device(problem: Problem, examples: Examples, positions: Tensor) -> Examples:
    """The examples at ``positions`` [count], on the problem's device; datasets may be stored on another."""
    return move_examples(examples.take(positions.to(examples.targets.device)), problem.device, problem.dtype)


def scores_of(totals: Totals) -> Scores:
    """Return the metrics computed from sums, and the number of examples."""
    return {**totals.metrics(), "examples": totals.count}


def spread_over(scores_by_name: Mapping[str, Scores], metric: str, lower_is_better: bool = False) -> dict[str, float]:
    """Return unweighted statistics of a metric over clients, classes or domains.

    ``std`` is the population standard deviation; ``worst_tenth`` is the mean of the worst tenth (rounded up).

    >>> spread_over({"a": {"accuracy": 0.5, "loss": 2.0}, "b": {"accuracy": 1.0, "loss": 0.0}}, "accuracy")
    {'mean': 0.75, 'std': 0.25, 'worst_tenth': 0.5, 'loss': 1.0, 'count': 2}
    """
    values = np.array([scores[metric] for scores in scores_by_name.values()])
    worst_first = np.sort(values)[::-1] if lower_is_better else np.sort(values)
    worst = worst_first[: ceil(len(values) / 10)]
    statistics = {"mean": float(values.mean()), "std": float(values.std()), "worst_tenth": float(worst.mean())}
    # A user-defined task may have no loss per class.
    if metric != "loss" and all("loss" in scores for scores in scores_by_name.values()):
        statistics["loss"] = float(np.mean([scores["loss"] for scores in scores_by_name.values()]))
    return {**statistics, "count": len(values)}
