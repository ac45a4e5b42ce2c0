"""Loss and error of the models of a landscape, all measured on the same training and test examples."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedflat.data import Examples, Partition
from fedflat.display import is_share
from fedflat.engines.cpu.engine import one_thread
from fedflat.engines.problem.problem import Problem
from fedflat.engines.problem.task import Totals
from fedflat.errors import UserError
from fedflat.experiment.analysis.scoring import take_on_device
from fedflat.flatness.landscapes.grid import Model
from fedflat.randomness import generator

Statistics = Literal["interpolated", "estimated"]
GPU_BATCH = 2500
"""Smallest number of examples per forward pass on a GPU; smaller batches would not use it fully."""
CACHED_BYTES = 1 << 31
"""Inputs up to this size are normalised once and cached; larger ones are normalised for every model."""


class LossAndError:
    """Measures train_loss, train_error, test_loss and test_error of a model; values stay on the device.

    Args:
        problem: the federated problem.
        partition: its partition; training examples are those that clients hold.
        integer_buffers: integer buffers of the model.
        examples: number of examples per set, the same for every model; default: all.
        seed: seed of the sample.
        statistics: BatchNorm statistics: the model's own (``interpolated``; negative variances count as 0), or
            re-estimated for each model on the training sample (``estimated``).
    """

    def __init__(
        self,
        problem: Problem,
        partition: Partition,
        integer_buffers: dict[str, Tensor],
        *,
        examples: int | None = None,
        seed: int = 0,
        statistics: Statistics = "interpolated",
    ) -> None:
        if examples is not None and examples < 1:
            raise UserError(f"examples={examples} is invalid; expected at least 1")
        self.problem, self._integer_buffers, self.statistics = problem, integer_buffers, statistics
        self._batch_size = problem.evaluation_batch
        if problem.device.type == "cuda":
            self._batch_size = max(self._batch_size, GPU_BATCH)
        train, test = problem.data.train, problem.data.test
        self.sets = {
            "train": _sample(train, partition.trained_on, examples, generator(seed, "landscape: training examples")),
            "test": _sample(test, np.arange(len(test)), examples, generator(seed, "landscape: test examples")),
        }
        self._cached = {name: self._normalised_batches(sample) for name, sample in self.sets.items()}
        variances = [name for name in problem.buffer_layout.names if name.endswith("running_var")]
        self._is_variance: Tensor | None = None
        if variances:
            device_example = torch.empty(0, device=problem.device)  # the indicator is created on this tensor's device
            self._is_variance = problem.buffer_layout.indicator(variances.__contains__, device_example)

    @property
    def counts(self) -> dict[str, int]:
        """Number of examples per set."""
        return {name: len(sample) for name, sample in self.sets.items()}

    @torch.no_grad()
    def __call__(self, model: Model) -> dict[str, Tensor]:
        """Evaluate a model on the training and the test sample.

        Returns:
            ``train_loss``, ``test_loss`` and, if the task's metric is a fraction such as accuracy, ``train_error`` and
            ``test_error`` (one minus the metric); other metrics keep their name, e.g. ``train_mae``.
        """
        problem, values = self.problem, {}
        task, metric = problem.task, problem.task.metric
        with one_thread():  # sums do not depend on the number of threads
            flat_buffers = self._buffers(model)
            for name in self.sets:
                totals = Totals(task)
                buffers = {**problem.buffer_layout.views(flat_buffers), **self._integer_buffers}
                for inputs, targets in self._batches(name):
                    output = problem.predict_normalised(model.weights, buffers, inputs)
                    totals.add(task.sums(output, targets), len(targets))
                means = totals.metric_tensors()
                values[f"{name}_loss"] = means["loss"]
                values[f"{name}_{_reported_name(metric)}"] = 1 - means[metric] if is_share(metric) else means[metric]
        return values

    def _buffers(self, model: Model) -> Tensor:
        """Return the model's flat buffers with valid BatchNorm statistics; extrapolated variances may be negative."""
        if not len(model.buffers):
            return model.buffers
        if self.statistics == "estimated":
            inputs = (inputs for inputs, _ in self._batches("train"))
            return self.problem.estimate_buffers(model.weights, self._integer_buffers, inputs)
        if self._is_variance is None:
            return model.buffers
        return torch.where(self._is_variance, model.buffers.clamp_min(0), model.buffers)

    def _normalised_batches(self, examples: Examples) -> list[tuple[Tensor, Tensor]] | None:
        """Return all batches of a set, to be cached; None if they exceed ``CACHED_BYTES`` and must be read again."""
        size = examples.inputs.numel() * torch.finfo(self.problem.dtype).bits // 8
        return list(self._read_batches(examples)) if size <= CACHED_BYTES else None

    def _batches(self, name: str) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield batches of normalised inputs and targets of the set ``train`` or ``test``."""
        cached = self._cached[name]
        yield from self._read_batches(self.sets[name]) if cached is None else cached

    def _read_batches(self, examples: Examples) -> Iterator[tuple[Tensor, Tensor]]:
        """Move the examples to the device batch by batch; yields normalised inputs and targets.

        Batch sizes differ by at most one, because estimates of BatchNorm statistics weight batches equally.
        """
        batch_count = math.ceil(len(examples) / self._batch_size)
        for positions in torch.tensor_split(torch.arange(len(examples)), batch_count):
            batch = take_on_device(self.problem, examples, positions)
            yield self.problem.normalised(batch.inputs), batch.targets


def measured_values(metric: str) -> list[str]:
    """Names of the measured values for a task with this metric.

    >>> measured_values("accuracy")
    ['train_loss', 'train_error', 'test_loss', 'test_error']
    """
    return [f"{part}_{value}" for part in ("train", "test") for value in ("loss", _reported_name(metric))]


def _reported_name(metric: str) -> str:
    """The reported name of a metric: fractions such as accuracy are reported as errors, for which lower is better."""
    return "error" if is_share(metric) else metric


def _sample(examples: Examples, positions: np.ndarray, limit: int | None, rng: np.random.Generator) -> Examples:
    """Return the examples at ``positions``, or a random sample of ``limit`` of them if there are more."""
    if limit is not None and limit < len(positions):
        positions = np.sort(rng.choice(positions, limit, replace=False))
    return examples.take(torch.from_numpy(positions).to(examples.targets.device))
