"""Local training of one client.

``train_client`` draws the client's batches, lets the algorithm take its local steps, and writes the result into the
client's row of ``CohortBuffers``. The loop engine, Ray workers and deployed sites use it; ``gpu/lane.py`` does the same
with a captured step.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedflat.algorithms.algorithm import LocalState, States
from fedflat.algorithms.slot import Pilot
from fedflat.algorithms.teacher import Teacher
from fedflat.data.batches import Batch
from fedflat.engines.problem.problem import Problem
from fedflat.engines.problem.residuals import add_products
from fedflat.engines.round.client_facts import explain_small_batches, full_gradient, label_scalars, pilot_gradients
from fedflat.engines.round.cohort_buffers import CohortBuffers
from fedflat.engines.round.contract import ClientRound, Cost, Training
from fedflat.flatness.precision import at_own_precision
from fedflat.randomness import exclusive_generator, generator, seed_torch


class ClientReport(NamedTuple):
    """Scalars that a client reports in addition to its row.

    Attributes:
        lr_sum: H_i, the sum of its learning rates over all local steps.
        loss: sum of its batches' mean losses.
        steps: number of local steps.
        backward_passes: number of backward passes, including those for perturbations and full-batch gradients.
        samples: examples seen, once per backward pass.
        integer_buffers: its integer buffers by name.
    """

    lr_sum: Tensor | float
    loss: Tensor | float
    steps: int
    backward_passes: int
    samples: int
    integer_buffers: dict[str, Tensor]

    def with_numbers(self) -> ClientReport:
        """This report with numbers instead of scalar tensors, to send to another process."""
        return self._replace(lr_sum=float(self.lr_sum), loss=float(self.loss))


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

    def __call__(self, point: Tensor, teacher: Teacher | None = None) -> Tensor:
        """The gradient at ``point``, of the loss with the term of ``teacher``; only the first changes ``buffers``."""
        buffers = self.buffers if self.passes == 0 else {name: b.clone() for name, b in self.buffers.items()}
        loss, gradient = self.problem.loss_and_gradient(point, buffers, self.batch, teacher)
        if self.passes == 0:
            self.loss = loss
        self.passes += 1
        return gradient


def draw_batches(
    problem: Problem, training: Training, client_round: ClientRound
) -> tuple[list[np.ndarray], dict[str, Tensor]]:
    """A client's batches of one round, and the random numbers of their augmentation.

    Returns:
        For each batch, the int64 positions of its examples in the training set [batch]; and by name, random numbers
        for all batches [batches, ...].
    """
    seed, round, client, indices = training.seed, *client_round
    batches = training.plan.batches(seed, round, client, len(indices))
    draws = problem.augmentation.draw(
        generator(seed, "augment", round, client), len(batches), training.plan.batch_size, problem.data.input_shape
    )
    return [indices[batch] for batch in batches], draws


@exclusive_generator()
@at_own_precision
def train_client(
    problem: Problem,
    training: Training,
    cohort_buffers: CohortBuffers,
    row: int,
    client_round: ClientRound,
    integer_buffers: dict[str, Tensor],
) -> ClientReport:
    """Train one client for one round.

    Reads z (the model that clients start from), the server's and the client's state from ``cohort_buffers``; writes the
    client's displacement, messages, state and BatchNorm statistics into its row.

    Args:
        problem: model, task and data.
        training: how clients train.
        cohort_buffers: tensors of the cohort, one row per client.
        row: the client's row in ``cohort_buffers``.
        client_round: the client and the round.
        integer_buffers: integer buffers of the model by name; copied, not changed.

    Returns:
        What the client reports in addition to its row: loss, costs, sum of learning rates and integer buffers.
    """
    z, algorithm = cohort_buffers.z, training.algorithm
    batches, draws = draw_batches(problem, training, client_round)
    integer_buffers = {name: value.clone() for name, value in integer_buffers.items()}
    # BatchNorm statistics are views of the client's row, so a step that updates them writes them into the row.
    statistics = cohort_buffers.statistics[row]
    buffers = {**problem.buffer_layout.views(statistics), **integer_buffers}
    pilot, cost = pilot_gradients(problem, training, cohort_buffers, row, client_round)
    # Results must not depend on which worker trains the client.
    seed_torch(training.seed, "dropout", client_round.round, client_round.client)
    problem.set_training_mode()
    own_gradient = None
    if algorithm.drift.full_gradient == "own":
        own_gradient, gradient_cost = full_gradient(problem, training, cohort_buffers, row, client_round)
        cost += gradient_cost
    state = cohort_buffers.client_state(row)
    round, steps = (
        torch.tensor(number, dtype=z.dtype, device=z.device) for number in (client_round.round, len(batches))
    )
    local = begin_client(problem, training, cohort_buffers, state, round, steps, own_gradient, pilot)
    loss = torch.zeros((), dtype=z.dtype, device=z.device)
    for k, positions in enumerate(batches):
        examples = torch.from_numpy(positions).to(z.device)
        batch = problem.batch(examples, {name: draw[k].to(z.device) for name, draw in draws.items()})
        gradient = StepGradient(problem, batch, buffers)
        with explain_small_batches(client_round):
            local = algorithm.step(local, gradient, training.schedule, training.descent)
        cost.backward_passes += gradient.passes
        cost.samples += gradient.passes * len(positions)
        loss = loss + gradient.loss
    new_state, message = algorithm.finish(local)
    add_products(problem, statistics, local.drift.y)
    message.sent["weights"] = label_scalars(problem, training, client_round.indices)
    cohort_buffers.write(row, new_state, message)
    return ClientReport(
        lr_sum=message.lr_sum,
        loss=loss,
        steps=len(batches),
        backward_passes=cost.backward_passes,
        samples=cost.samples,
        integer_buffers=integer_buffers,
    )


def begin_client(
    problem: Problem,
    training: Training,
    cohort_buffers: CohortBuffers,
    state: States,
    round: Tensor,
    steps: Tensor,
    own_gradient: Tensor | None,
    pilot: Pilot | None,
) -> LocalState:
    """Call ``Algorithm.begin`` for a client with a state by slot; the arguments from ``state`` on are passed on."""
    algorithm = training.algorithm
    return algorithm.begin(
        cohort_buffers.z,
        cohort_buffers.server_state(),
        state,
        problem.layout,
        training.schedule,
        round,
        steps,
        training.descent,
        own_gradient=own_gradient,
        common_gradient=cohort_buffers.common_gradient if algorithm.drift.full_gradient == "common" else None,
        pilot=pilot,
    )


@exclusive_generator()
def write_full_gradient(
    problem: Problem, training: Training, cohort_buffers: CohortBuffers, row: int, client_round: ClientRound
) -> Cost:
    """Write a client's ``full_gradient`` into its row of ``cohort_buffers.gradient``; this also seeds dropout."""
    seed_torch(training.seed, "whole gradient dropout", client_round.round, client_round.client)
    gradient, cost = full_gradient(problem, training, cohort_buffers, row, client_round)
    cohort_buffers.gradient[row].copy_(gradient)
    return cost
