"""One client's round, as every CPU engine runs it: local steps over its batches, reading from and writing to a table of rows."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fedflat.algorithms.algorithm import flat_state, nested_state
from fedflat.engines.problem.problem import Batch, Problem
from fedflat.engines.round.cohort_buffers import Table
from fedflat.engines.round.contract import Training
from fedflat.engines.round.randomness import generator, seed_torch
from fedflat.engines.round.reduction import Report
from fedflat.errors import UserError

ONE_VALUE = "Expected more than 1 value per channel"
"""What torch says of a batch that BatchNorm cannot normalise."""


class StepGradient:
    """The gradient of one batch at any point. BatchNorm statistics move with the first call alone, so a second pass leaves no trace."""

    def __init__(self, problem: Problem, batch: Batch, buffers: dict[str, Tensor]) -> None:
        self.problem, self.batch, self.buffers = problem, batch, buffers
        self.passes = 0
        self.loss: Tensor

    def __call__(self, point: Tensor) -> Tensor:
        buffers = self.buffers if self.passes == 0 else {name: b.clone() for name, b in self.buffers.items()}
        try:
            loss, gradient = self.problem.loss_and_gradient(point, buffers, self.batch)
        except ValueError as error:
            if ONE_VALUE not in str(error):
                raise
            raise UserError(
                f"BatchNorm cannot normalise a batch of {len(self.batch.targets)}, on which an epoch of some client ends; choose "
                "another training.batch_size or another normalisation"
            ) from None
        if self.passes == 0:
            self.loss = loss
        self.passes += 1
        return gradient


def train_client(
    problem: Problem,
    training: Training,
    table: Table,
    round: int,
    row: int,
    client: int,
    indices: np.ndarray,
    integers: dict[str, Tensor],
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
    problem.training_mode()

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
    losses = torch.zeros((), dtype=z.dtype, device=z.device)
    for k, positions in enumerate(batches):
        chosen = torch.from_numpy(indices[positions]).to(z.device)
        batch = problem.batch(chosen, {name: draw[k].to(z.device) for name, draw in draws.items()})
        gradient = StepGradient(problem, batch, buffers)
        local = algorithm.step(local, gradient, schedule, descent)
        passes, samples, losses = (
            passes + gradient.passes,
            samples + gradient.passes * len(positions),
            losses + gradient.loss,
        )
    kept, message = algorithm.finish(local)

    table.displacement[row].copy_(message.displacement)
    for name, value in flat_state(kept).items():
        table.client[name][row].copy_(value)
    for name, value in flat_state(message.sent).items():
        table.sent[name][row].copy_(value)
    return Report(message.lr_sum, losses, len(batches), passes, samples, integers)


def common_gradient(
    problem: Problem, training: Training, table: Table, round: int, client: int, indices: np.ndarray, row: int
) -> tuple[Tensor, int, int]:
    """A client's part of the cohort's whole gradient, which is taken before anyone trains, whoever takes it."""
    seed_torch(training.seed, "whole gradient dropout", round, client)
    return whole_gradient(problem, training, table, round, client, indices, row)


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
    problem.training_mode()
    for start in range(0, size, chunk):
        chosen = problem.train_examples(indices[start : start + chunk])
        buffers = {name: b.clone() for name, b in problem.buffers.views(table.buffers[row]).items()}
        _, gradient = problem.loss_and_gradient(
            table.z, buffers, Batch(problem.normalised(chosen.inputs), chosen.targets)
        )
        total.add_(gradient, alpha=len(chosen) / size)
    return total, -(-size // training.plan.batch), size
