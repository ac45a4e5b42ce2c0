"""Local training of one client, in the loop engine, in Ray workers and on deployed sites.

``train_client`` draws the client's batches, lets the algorithm take its local steps, and writes the result into the
client's row of ``CohortBuffers``. ``gpu/lane.py`` does the same with a captured step.
"""

from __future__ import annotations

from math import ceil

import numpy as np
import torch
from torch import Tensor

from fedflat.algorithms.algorithm import LocalState
from fedflat.engines.problem.batches import Batch
from fedflat.engines.problem.problem import Problem
from fedflat.engines.round.cohort import ClientReport, GradientCost
from fedflat.engines.round.cohort_buffers import CohortBuffers
from fedflat.engines.round.contract import Training
from fedflat.engines.round.plan import generator, seed_torch
from fedflat.errors import UserError

BATCH_TOO_SMALL = "Expected more than 1 value per channel"
"""torch's error for a batch that BatchNorm cannot normalise."""


class StepGradient:
    """The gradient [parameters] of one batch at any point [parameters]; a step may call it several times.

    Only the first call updates BatchNorm statistics.

    Attributes:
        passes: backward passes so far.
        loss: mean loss of the batch at the first point.
    """

    def __init__(self, problem: Problem, batch: Batch, buffers: dict[str, Tensor]) -> None:
        """Set up the gradient of one batch; its first call updates ``buffers`` (by name, e.g. BatchNorm's) in place."""
        self.problem, self.batch, self.buffers = problem, batch, buffers
        self.passes = 0
        self.loss: Tensor

    def __call__(self, point: Tensor) -> Tensor:
        """The gradient at ``point``; only the first call changes ``buffers``."""
        buffers = self.buffers if self.passes == 0 else {name: b.clone() for name, b in self.buffers.items()}
        try:
            loss, gradient = self.problem.loss_and_gradient(point, buffers, self.batch)
        except ValueError as error:
            if BATCH_TOO_SMALL not in str(error):
                raise
            raise UserError(
                f"BatchNorm cannot normalise a batch of {len(self.batch.targets)}, the last batch of some client's "
                "epoch; choose another training.batch_size or another normalisation"
            ) from None
        if self.passes == 0:
            self.loss = loss
        self.passes += 1
        return gradient


def train_client(
    problem: Problem,
    training: Training,
    cohort: CohortBuffers,
    round: int,
    row: int,
    client: int,
    indices: np.ndarray,
    integer_buffers: dict[str, Tensor],
) -> ClientReport:
    """Train one client for one round.

    Reads z (the model that clients start from), the server's and the client's state from ``cohort``; writes the
    client's displacement, messages, state and BatchNorm statistics into its row.

    Args:
        problem: model, task and data.
        training: how clients train.
        cohort: the memory of the cohort, one row per client.
        round: number of the round, from 0.
        row: the client's row in ``cohort``.
        client: the client's number in the federation.
        indices: int64 positions of its examples in the training set [examples].
        integer_buffers: integer buffers of the model by name; copied, not changed.

    Returns:
        What the client reports in addition to its row: loss, costs, sum of learning rates and integer buffers.
    """
    z, algorithm = cohort.z, training.algorithm
    # The batches of the round, as positions in ``indices``, and the random numbers of their augmentation.
    batches = training.plan.batches(training.seed, round, client, len(indices))
    draws = problem.augmentation.draw(
        generator(training.seed, "augment", round, client),
        len(batches),
        training.plan.batch_size,
        problem.data.input_shape,
    )
    # Views of the client's row: a step that updates BatchNorm statistics writes them into the row.
    integer_buffers = {name: value.clone() for name, value in integer_buffers.items()}
    buffers = {**problem.buffer_layout.views(cohort.buffers[row]), **integer_buffers}
    seed_torch(training.seed, "dropout", round, client)  # results must not depend on which worker trains the client
    problem.set_training_mode()

    own_gradient, gradient_cost = None, GradientCost()
    if algorithm.drift.full_gradient == "own":
        own_gradient, gradient_cost = full_gradient(problem, training, cohort, round, client, indices, row)
    local = _begin(problem, training, cohort, round, row, len(batches), own_gradient)
    backward_passes, samples = gradient_cost
    loss = torch.zeros((), dtype=z.dtype, device=z.device)
    for k, positions in enumerate(batches):
        examples = torch.from_numpy(indices[positions]).to(z.device)
        batch = problem.batch(examples, {name: draw[k].to(z.device) for name, draw in draws.items()})
        gradient = StepGradient(problem, batch, buffers)
        local = algorithm.step(local, gradient, training.schedule, training.descent)
        backward_passes += gradient.passes
        samples += gradient.passes * len(positions)
        loss = loss + gradient.loss
    state, message = algorithm.finish(local)
    cohort.write(row, state, message)
    return ClientReport(
        lr_sum=message.lr_sum,
        loss=loss,
        steps=len(batches),
        backward_passes=backward_passes,
        samples=samples,
        integer_buffers=integer_buffers,
    )


def _begin(
    problem: Problem,
    training: Training,
    cohort: CohortBuffers,
    round: int,
    row: int,
    steps: int,
    own_gradient: Tensor | None,
) -> LocalState:
    """The state of a client before its first local step, from the algorithm's ``begin``.

    ``steps`` is the number of local steps, and ``own_gradient`` the gradient of the client's whole dataset, None if the
    drift correction does not need it. The other arguments are those of ``train_client``.
    """
    z, algorithm = cohort.z, training.algorithm
    return algorithm.begin(
        z,
        cohort.server_state(),
        cohort.client_state(row),
        problem.layout,
        training.schedule,
        torch.tensor(round, dtype=z.dtype, device=z.device),
        torch.tensor(steps, dtype=z.dtype, device=z.device),
        training.descent,
        own_gradient=own_gradient,
        common_gradient=cohort.common_gradient if algorithm.drift.full_gradient == "common" else None,
    )


def seeded_full_gradient(
    problem: Problem,
    training: Training,
    cohort: CohortBuffers,
    round: int,
    client: int,
    indices: np.ndarray,
    row: int,
) -> tuple[Tensor, GradientCost]:
    """Seed dropout by round and client, then compute ``full_gradient``, which has the same arguments and results.

    Used before local training, for drift corrections such as MIME's that need the mean of these gradients over the
    cohort.
    """
    seed_torch(training.seed, "whole gradient dropout", round, client)
    return full_gradient(problem, training, cohort, round, client, indices, row)


def full_gradient(
    problem: Problem,
    training: Training,
    cohort: CohortBuffers,
    round: int,
    client: int,
    indices: np.ndarray,
    row: int,
) -> tuple[Tensor, GradientCost]:
    """The gradient of a client's whole dataset at z, the broadcast model, without augmentation.

    If the drift limits the number of batches, the gradient uses a random part of the dataset.

    Args:
        problem: model, task and data.
        training: how clients train.
        cohort: holds z, and in ``row`` the client's BatchNorm statistics; left unchanged.
        round: number of the round, from 0.
        client: the client's number in the federation.
        indices: int64 positions of its examples in the training set [examples].
        row: the client's row in ``cohort``.

    Returns:
        The gradient [parameters] and its cost. Backward passes are counted as if batches had the size used in training.
    """
    batch_size, max_batches = training.plan.batch_size, training.algorithm.drift.full_gradient_batches
    if max_batches:  # 0 means no limit
        order = generator(training.seed, "whole gradient", round, client).permutation(len(indices))
        indices = indices[order[: max_batches * batch_size]]
    size = len(indices)
    mean_gradient = torch.zeros_like(cohort.z)
    problem.set_training_mode()
    for start in range(0, size, problem.evaluation_batch):
        examples = problem.train_examples(indices[start : start + problem.evaluation_batch])
        buffers = {name: b.clone() for name, b in problem.buffer_layout.views(cohort.buffers[row]).items()}
        batch = Batch(problem.normalised(examples.inputs), examples.targets)
        _, gradient = problem.loss_and_gradient(cohort.z, buffers, batch)
        mean_gradient.add_(gradient, alpha=len(examples) / size)
    return mean_gradient, GradientCost(ceil(size / batch_size), size)
