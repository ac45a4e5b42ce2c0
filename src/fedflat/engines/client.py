"""One client's round, as every CPU engine runs it: local steps over its batches, reading from and writing to a table of rows."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedflat.algorithms.algorithm import flat_state, nested_state
from fedflat.engines.contract import Training
from fedflat.engines.problem import Batch, Problem
from fedflat.engines.randomness import generator, seed_torch
from fedflat.engines.table import Table


class Report(NamedTuple):
    """What a client reports beside its vectors."""

    rates: float
    loss: float
    steps: int
    backward_passes: int
    samples: int
    integers: dict[str, Tensor]


class StepGradient:
    """The gradient of one batch at any point. BatchNorm statistics move with the first call alone, so a second pass leaves no trace."""

    def __init__(self, problem: Problem, batch: Batch, buffers: dict[str, Tensor]) -> None:
        self.problem, self.batch, self.buffers = problem, batch, buffers
        self.passes = 0
        self.loss = 0.0

    def __call__(self, point: Tensor) -> Tensor:
        buffers = self.buffers if self.passes == 0 else {name: b.clone() for name, b in self.buffers.items()}
        loss, gradient = self.problem.loss_and_gradient(point, buffers, self.batch)
        if self.passes == 0:
            self.loss = loss.item()
        self.passes += 1
        return gradient


def train_client(
    problem: Problem, training: Training, table: Table, round: int, row: int, client: int, indices: np.ndarray, integers: dict[str, Tensor]
) -> Report:
    """Train one client: its state is read from its row of the table and written back, with its message beside it."""
    algorithm, schedule, descent = training.algorithm, training.schedule, training.descent
    batches = training.plan.batches(training.seed, round, client, len(indices))
    draws = problem.augmentation.draw(
        generator(training.seed, "augment", round, client), len(batches), training.plan.batch, problem.data.input_shape
    )
    z = table.z
    statistics = table.buffers[row]
    integers = {name: value.clone() for name, value in integers.items()}
    buffers = {**problem.buffers.views(statistics), **integers}
    seed_torch(training.seed, "dropout", round, client)
    problem.model.train()

    passes = samples = 0
    own = None
    if algorithm.drift.whole_gradient == "own":
        own, passes, samples = whole_gradient(problem, training, table, round, client, indices, row)
    local = algorithm.begin(
        z,
        nested_state(table.server),
        nested_state({name: rows[row] for name, rows in table.client.items()}),
        problem.layout,
        schedule,
        torch.tensor(round, dtype=z.dtype, device=z.device),
        torch.tensor(len(batches), dtype=z.dtype, device=z.device),
        descent,
        own_gradient=own,
        common_gradient=table.common_gradient if algorithm.drift.whole_gradient == "common" else None,
    )
    losses = 0.0
    for k, positions in enumerate(batches):
        batch = _batch(problem, indices[positions], {name: draw[k].to(z.device) for name, draw in draws.items()})
        gradient = StepGradient(problem, batch, buffers)
        local = algorithm.step(local, gradient, schedule, descent)
        passes, samples, losses = passes + gradient.passes, samples + gradient.passes * len(positions), losses + gradient.loss
    kept, message = algorithm.finish(local)

    table.displacement[row].copy_(message.displacement)
    for name, value in flat_state(kept).items():
        table.client[name][row].copy_(value)
    for name, value in flat_state(message.sent).items():
        table.sent[name][row].copy_(value)
    return Report(float(message.rates), losses, len(batches), passes, samples, integers)


def whole_gradient(
    problem: Problem, training: Training, table: Table, round: int, client: int, indices: np.ndarray, row: int
) -> tuple[Tensor, int, int]:
    """The gradient of a client's data at z, without augmentation; with the passes and samples it took."""
    size, chunk = len(indices), problem.evaluation_batch
    if training.algorithm.drift.whole_gradient_batches:
        count = min(size, training.algorithm.drift.whole_gradient_batches * training.plan.batch)
        indices = indices[generator(training.seed, "whole gradient", round, client).permutation(size)[:count]]
        size = count
    total = torch.zeros_like(table.z)
    problem.model.train()
    for start in range(0, size, chunk):
        chosen = problem.train_examples(indices[start : start + chunk])
        buffers = {name: b.clone() for name, b in problem.buffers.views(table.buffers[row]).items()}
        _, gradient = problem.loss_and_gradient(table.z, buffers, Batch(problem.normalised(chosen.inputs), chosen.targets))
        total.add_(gradient, alpha=len(chosen) / size)
    return total, -(-size // training.plan.batch), size


def _batch(problem: Problem, indices: np.ndarray, draws: dict[str, Tensor]) -> Batch:
    chosen = problem.train_examples(indices)
    inputs = problem.augmented(chosen.inputs, draws)
    mixing = problem.augmentation.mix(draws, len(indices))
    if mixing is None:
        return Batch(inputs, chosen.targets)
    share, permutation = mixing
    return Batch(inputs, chosen.targets, chosen.targets[permutation], share)
