"""Loss and error of a model on a fixed sample of training and test examples, for landscapes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedflat.data import Examples, Partition
from fedflat.engines.cpu.engine import one_thread
from fedflat.engines.problem.problem import Problem, move_examples
from fedflat.engines.problem.totals import Totals
from fedflat.engines.round.plan import generator
from fedflat.errors import UserError
from fedflat.flatness.landscapes.grid import Model
from fedflat.units import is_share

Statistics = Literal["interpolated", "estimated"]
CACHED_BYTES = 1 << 31
"""Inputs up to this size are normalised once and cached; larger ones are normalised for every model."""
BATCH_ON_GPU = 2500
"""Examples per forward pass on a GPU, which smaller batches would not fill."""


class LossAndError:
    """Measures train_loss, train_error, test_loss and test_error of a model; values stay on the device.

    Args:
        problem: the federated problem.
        partition: its partition; training examples are those that clients hold.
        integers: integer buffers of the model.
        examples: number of examples per set, the same for every model; default: all.
        seed: seed of the sample.
        statistics: BatchNorm statistics: the model's own (``interpolated``; negative variances count as 0), or
            re-estimated for each model on the training sample (``estimated``).
    """

    def __init__(
        self,
        problem: Problem,
        partition: Partition,
        integers: dict[str, Tensor],
        *,
        examples: int | None = None,
        seed: int = 0,
        statistics: Statistics = "interpolated",
    ) -> None:
        if examples is not None and examples < 1:
            raise UserError(f"examples={examples} is invalid; expected at least 1")
        self.problem, self._integers, self.statistics = problem, integers, statistics
        held = np.unique(np.concatenate([np.asarray(indices) for indices in partition.described_clients]))
        self.sets = {
            "train": _sample(problem.data.train, held, examples, generator(seed, "landscape: training examples")),
            "test": _sample(
                problem.data.test,
                np.arange(len(problem.data.test)),
                examples,
                generator(seed, "landscape: test examples"),
            ),
        }
        self._batch = (
            max(problem.evaluation_batch, BATCH_ON_GPU) if problem.device.type == "cuda" else problem.evaluation_batch
        )
        self._cached = {name: self._prepared(sample) for name, sample in self.sets.items()}
        variances = [name for name in problem.buffers.names if name.endswith("running_var")]
        self._variances = (
            problem.buffers.indicator(variances.__contains__, torch.empty(0, device=problem.device))
            if variances
            else None
        )

    @property
    def counts(self) -> dict[str, int]:
        """Number of examples per set."""
        return {name: len(sample) for name, sample in self.sets.items()}

    @torch.no_grad()
    def __call__(self, model: Model) -> dict[str, Tensor]:
        """Measure one model."""
        with one_thread():
            return self._measure(model.weights, self._buffers(model))

    def _measure(self, weights: Tensor, flat_buffers: Tensor) -> dict[str, Tensor]:
        """Loss and error (or the task's metric, if it is not a share) on each set, as ``train_loss`` and so on."""
        problem, values = self.problem, {}
        metric = problem.task.metric
        for name in self.sets:
            totals = Totals(problem.task)
            buffers = {**problem.buffers.views(flat_buffers), **self._integers}
            for inputs, targets in self._batches(name):
                totals.add(
                    problem.task.sums(problem.predict_normalised(weights, buffers, inputs), targets), len(targets)
                )
            means = totals.metric_tensors()
            values[f"{name}_loss"] = means["loss"]
            values[f"{name}_{_reported_name(metric)}"] = 1 - means[metric] if is_share(metric) else means[metric]
        return values

    def _buffers(self, model: Model) -> Tensor:
        if not len(model.buffers):
            return model.buffers
        if self.statistics == "estimated":
            return self.problem.estimate_buffers(
                model.weights, self._integers, (inputs for inputs, _ in self._batches("train"))
            )
        return (
            model.buffers
            if self._variances is None
            else torch.where(self._variances, model.buffers.clamp_min(0), model.buffers)
        )

    def _prepared(self, examples: Examples) -> list[tuple[Tensor, Tensor]] | None:
        """All normalised batches, or None if they are too large to cache."""
        floats = examples.inputs.numel() * torch.finfo(self.problem.dtype).bits // 8
        return list(self._read(examples)) if floats <= CACHED_BYTES else None

    def _batches(self, name: str) -> Iterator[tuple[Tensor, Tensor]]:
        cached = self._cached[name]
        yield from self._read(self.sets[name]) if cached is None else cached

    def _read(self, examples: Examples) -> Iterator[tuple[Tensor, Tensor]]:
        for part in torch.split(torch.arange(len(examples), device=examples.targets.device), self._batch):
            batch = move_examples(examples.take(part), self.problem.device)
            yield self.problem.normalised(batch.inputs), batch.targets


def measured_values(metric: str) -> list[str]:
    """Names of the measured values for a task with this metric.

    >>> measured_values("accuracy")
    ['train_loss', 'train_error', 'test_loss', 'test_error']
    """
    return [f"{part}_{what}" for part in ("train", "test") for what in ("loss", _reported_name(metric))]


def _reported_name(metric: str) -> str:
    """Accuracy is reported as error, so that lower is better, as for the loss."""
    return "error" if is_share(metric) else metric


def _sample(examples: Examples, positions: np.ndarray, most: int | None, rng: np.random.Generator) -> Examples:
    if most is not None and most < len(positions):
        positions = np.sort(rng.choice(positions, most, replace=False))
    return examples.take(torch.from_numpy(positions).to(examples.targets.device))
