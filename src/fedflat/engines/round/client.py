"""Local training of one client, and the buffers of a cohort that it reads and writes.

``train_client`` draws the client's batches, lets the algorithm take its local steps, and writes the result into the
client's row of ``CohortBuffers``. The loop engine, Ray workers and deployed sites use it; ``gpu/lane.py`` does the same
with a captured step.

State is nested by slot at the engine's interface (see ``contract.py``), rows of ``CohortBuffers`` during a round, and
flat numpy arrays between processes. It is converted only here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedflat.algorithms.algorithm import Algorithm, LocalState, Message, States, flat_fields, flat_state, nested_state
from fedflat.algorithms.slot import Pilot
from fedflat.algorithms.state import Field, State
from fedflat.algorithms.teacher import Teacher
from fedflat.data.batches import Batch
from fedflat.engines.problem.problem import Problem
from fedflat.engines.problem.residuals import add_products
from fedflat.engines.round.client_facts import label_scalars, pilot_gradients
from fedflat.engines.round.contract import Client, Cost, Training
from fedflat.errors import UserError
from fedflat.flatness.precision import at_own_precision
from fedflat.randomness import exclusive_generator, generator, seed_torch

BATCH_TOO_SMALL = "Expected more than 1 value per channel"
"""torch's error for a batch that BatchNorm cannot normalise."""
Arrays = dict[str, np.ndarray]
"""Tensors as numpy arrays, by flat name, as they travel between processes."""


@dataclass
class CohortBuffers:
    """Memory of one cohort; all tensors have one dtype and device. Dictionaries have flat names, ``slot.field``.

    Attributes:
        z: the model that clients start from [parameters].
        server: server state sent in addition to z; each [parameters] or scalar.
        common_gradient: mean of the cohort's full-batch gradients at z [parameters]; empty unless the drift needs it.
        client_states: the clients' states; each [cohort, parameters] or [cohort].
        sent: client messages in addition to the displacement; each [cohort, parameters] or [cohort].
        displacement: the clients' displacements [cohort, parameters].
        gradient: each client's full-batch gradient at z [cohort, parameters]; empty unless the drift needs their mean.
        statistics: the clients' BatchNorm statistics [cohort, buffers].
    """

    z: Tensor
    server: dict[str, Tensor]
    common_gradient: Tensor
    client_states: dict[str, Tensor]
    sent: dict[str, Tensor]
    displacement: Tensor
    gradient: Tensor
    statistics: Tensor

    @classmethod
    def new(
        cls, algorithm: Algorithm, size: int, buffers: int, rows: int, like: Tensor, shared: bool = False
    ) -> CohortBuffers:
        """Allocate the memory for cohorts of up to ``rows`` clients, filled with zeros.

        Args:
            algorithm: declares the fields of clients, server and messages.
            size: number of parameters of the model.
            buffers: number of values in its floating-point buffers, i.e. BatchNorm statistics.
            rows: size of the largest cohort.
            like: gives dtype and device.
            shared: whether to allocate shared memory, for worker processes.
        """

        def zeros(*shape: int) -> Tensor:
            """A zero tensor with the dtype and device of ``like``, in shared memory if ``shared``."""
            tensor = torch.zeros(shape, dtype=like.dtype, device=like.device)
            if shared:
                tensor.share_memory_()  # type: ignore[no-untyped-call]
            return tensor

        def zeros_for(fields: dict[str, Field], *leading: int) -> dict[str, Tensor]:
            return {name: zeros(*leading, size) if field.vector else zeros(*leading) for name, field in fields.items()}

        # A client's own full-batch gradient needs no memory here: it is used where it is computed.
        gradient_size = size if algorithm.drift.full_gradient == "common" else 0
        received = {name: field for name, field in flat_fields(algorithm.server_fields()).items() if field.sent}
        return cls(
            z=zeros(size),
            server=zeros_for(received),
            common_gradient=zeros(gradient_size),
            client_states=zeros_for(flat_fields(algorithm.client_fields()), rows),
            sent=zeros_for(flat_fields(algorithm.message_fields()), rows),
            displacement=zeros(rows, size),
            gradient=zeros(rows, gradient_size),
            statistics=zeros(rows, buffers),
        )

    @property
    def rows(self) -> int:
        """Size of the largest cohort that fits."""
        return len(self.displacement)

    def part(self, rows: slice) -> CohortBuffers:
        """What the clients in some rows have written; views of this memory."""
        states = {name: values[rows] for name, values in self.client_states.items()}
        sent = {name: values[rows] for name, values in self.sent.items()}
        displacement, statistics = self.displacement[rows], self.statistics[rows]
        return replace(self, client_states=states, sent=sent, displacement=displacement, statistics=statistics)

    def copy_inputs(self, z: Tensor, server: States, buffers: Tensor, cohort: Sequence[Client]) -> None:
        """Copy everything that the clients of a cohort read into this memory; client i of the cohort gets row i.

        Args:
            z: the model that clients start from [parameters].
            server: server state by slot; fields that clients do not receive are skipped.
            buffers: BatchNorm statistics of the server's model [buffers], for clients that do not keep their own.
            cohort: the clients with their states and, if they keep their own, their BatchNorm statistics.
        """
        self.z.copy_(z)
        for name, value in flat_state(server).items():
            if name in self.server:
                self.server[name].copy_(value)
        for row, client in enumerate(cohort):
            for name, value in flat_state(client.state).items():
                self.client_states[name][row].copy_(value)
            self.statistics[row].copy_(buffers if client.statistics is None else client.statistics)

    def server_state(self) -> States:
        """What the server sends, by slot; views of this memory."""
        return nested_state(self.server)

    def client_state(self, row: int) -> States:
        """The state in a client's row, by slot; views of this memory."""
        return nested_state({name: rows[row] for name, rows in self.client_states.items()})

    def write(self, row: int, state: States, message: Message) -> None:
        """Copy a trained client's new state and its message into its row."""
        self.displacement[row].copy_(message.displacement)
        for name, value in flat_state(state).items():
            self.client_states[name][row].copy_(value)
        for name, value in flat_state(message.sent).items():
            self.sent[name][row].copy_(value)


def to_arrays(tensors: Mapping[str, Tensor]) -> Arrays:
    """Tensors as numpy arrays; the array of a CPU tensor shares the tensor's memory."""
    return {name: tensor.detach().cpu().numpy() for name, tensor in tensors.items()}


def to_tensors(arrays: Arrays, device: torch.device) -> dict[str, Tensor]:
    """Copies of arrays as tensors; the arrays may be read-only."""
    return {name: torch.tensor(array, device=device) for name, array in arrays.items()}


def state_to_arrays(state: Mapping[str, State]) -> Arrays:
    """A client's state as flat arrays on the CPU."""
    return to_arrays(flat_state(state))


def state_from_arrays(arrays: Mapping[str, np.ndarray], copy: bool = True) -> States:
    """A client's state by slot, from its arrays; without ``copy``, it shares their memory and must only be read."""
    return nested_state({name: torch.from_numpy(np.array(a) if copy else np.asarray(a)) for name, a in arrays.items()})


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
        try:
            loss, gradient = self.problem.loss_and_gradient(point, buffers, self.batch, teacher)
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


@exclusive_generator()
@at_own_precision
def train_client(
    problem: Problem,
    training: Training,
    cohort_buffers: CohortBuffers,
    round: int,
    row: int,
    client: int,
    indices: np.ndarray,
    integer_buffers: dict[str, Tensor],
) -> ClientReport:
    """Train one client for one round.

    Reads z (the model that clients start from), the server's and the client's state from ``cohort_buffers``; writes the
    client's displacement, messages, state and BatchNorm statistics into its row.

    Args:
        problem: model, task and data.
        training: how clients train.
        cohort_buffers: tensors of the cohort, one row per client.
        round: number of the round, from 0.
        row: the client's row in ``cohort_buffers``.
        client: the client's number in the federation.
        indices: int64 positions of its examples in the training set [examples].
        integer_buffers: integer buffers of the model by name; copied, not changed.

    Returns:
        What the client reports in addition to its row: loss, costs, sum of learning rates and integer buffers.
    """
    z, algorithm = cohort_buffers.z, training.algorithm
    # The batches of the round, as positions in ``indices``, and the random numbers of their augmentation.
    batches = training.plan.batches(training.seed, round, client, len(indices))
    draws = problem.augmentation.draw(
        generator(training.seed, "augment", round, client),
        len(batches),
        training.plan.batch_size,
        problem.data.input_shape,
    )
    integer_buffers = {name: value.clone() for name, value in integer_buffers.items()}
    # BatchNorm statistics are views of the client's row, so a step that updates them writes them into the row.
    statistics = cohort_buffers.statistics[row]
    buffers = {**problem.buffer_layout.views(statistics), **integer_buffers}
    state = cohort_buffers.client_state(row)
    start = algorithm.local_start(z, state)
    pilot, pilot_cost = pilot_gradients(problem, training, start, statistics, round, client, indices)
    seed_torch(training.seed, "dropout", round, client)  # results must not depend on which worker trains the client
    problem.set_training_mode()
    own_gradient, gradient_cost = None, Cost()
    if algorithm.drift.full_gradient == "own":
        own_gradient, gradient_cost = full_gradient(problem, training, cohort_buffers, round, row, client, indices)
    round_scalar, steps = (torch.tensor(number, dtype=z.dtype, device=z.device) for number in (round, len(batches)))
    local = begin_client(problem, training, cohort_buffers, state, round_scalar, steps, own_gradient, pilot)
    cost = pilot_cost + gradient_cost
    loss = torch.zeros((), dtype=z.dtype, device=z.device)
    for k, positions in enumerate(batches):
        examples = torch.from_numpy(indices[positions]).to(z.device)
        batch = problem.batch(examples, {name: draw[k].to(z.device) for name, draw in draws.items()})
        gradient = StepGradient(problem, batch, buffers)
        local = algorithm.step(local, gradient, training.schedule, training.descent)
        cost.backward_passes += gradient.passes
        cost.samples += gradient.passes * len(positions)
        loss = loss + gradient.loss
    new_state, message = algorithm.finish(local)
    add_products(problem, statistics, local.drift.y)
    message.sent["weights"] = label_scalars(problem, training, indices)
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
    problem: Problem,
    training: Training,
    cohort_buffers: CohortBuffers,
    round: int,
    row: int,
    client: int,
    indices: np.ndarray,
) -> Cost:
    """Write a client's ``full_gradient`` into its row of ``cohort_buffers.gradient``; this also seeds dropout."""
    seed_torch(training.seed, "whole gradient dropout", round, client)
    gradient, cost = full_gradient(problem, training, cohort_buffers, round, row, client, indices)
    cohort_buffers.gradient[row].copy_(gradient)
    return cost


@at_own_precision
def full_gradient(
    problem: Problem,
    training: Training,
    cohort_buffers: CohortBuffers,
    round: int,
    row: int,
    client: int,
    indices: np.ndarray,
) -> tuple[Tensor, Cost]:
    """The gradient of a client's whole dataset at the model from which it starts, without augmentation.

    If the drift limits the number of batches, the gradient uses a random part of the dataset.

    Args:
        problem: model, task and data.
        training: how clients train.
        cohort_buffers: holds z, and in ``row`` the client's BatchNorm statistics; left unchanged.
        round: number of the round, from 0.
        row: the client's row in ``cohort_buffers``.
        client: the client's number in the federation.
        indices: int64 positions of its examples in the training set [examples].

    Returns:
        The gradient [parameters] and its cost. Backward passes are counted as if batches had the size used in training.
    """
    batch_size, max_batches = training.plan.batch_size, training.algorithm.drift.full_gradient_batches
    if max_batches:  # 0 means no limit
        order = generator(training.seed, "whole gradient", round, client).permutation(len(indices))
        indices = indices[order[: max_batches * batch_size]]
    size = len(indices)
    point = training.algorithm.local_start(cohort_buffers.z, cohort_buffers.client_state(row))
    mean_gradient = torch.zeros_like(point)
    problem.set_training_mode()
    for start in range(0, size, problem.evaluation_batch):
        examples = problem.train_examples(indices[start : start + problem.evaluation_batch])
        buffers = {name: b.clone() for name, b in problem.buffer_layout.views(cohort_buffers.statistics[row]).items()}
        batch = Batch(problem.normalised(examples.inputs), examples.targets)
        _, gradient = problem.loss_and_gradient(point, buffers, batch)
        mean_gradient.add_(gradient, alpha=len(examples) / size)
    return mean_gradient, Cost(backward_passes=ceil(size / batch_size), samples=size)
