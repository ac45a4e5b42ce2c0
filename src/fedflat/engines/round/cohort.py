"""The memory that a cohort trains in: what all clients read, and one row per client to write.

The only place where client state is converted between its representations (see ``contract.py``): nested by slot at the
engine's interface, rows of ``CohortBuffers`` during a round, and flat numpy arrays between processes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedflat.algorithms.algorithm import Algorithm, Message, States, flat_fields, flat_state, nested_state
from fedflat.algorithms.slot import CohortMeans, Field, State
from fedflat.engines.problem.problem import Problem
from fedflat.engines.round.contract import (
    Aggregation,
    Client,
    CohortRows,
    Cost,
    ModelState,
    Outcome,
    Training,
    by_samples,
    uniform,
    weighted_sum,
)

Arrays = dict[str, np.ndarray]
"""Tensors as numpy arrays, by flat name, as they travel between processes."""


@dataclass
class CohortBuffers:
    """Tensors of one cohort; all have one dtype and device. Dictionaries have flat names, ``slot.field``.

    Attributes:
        z: the model that clients start from [parameters].
        server: server state sent in addition to z; each [parameters] or scalar.
        common_gradient: the cohort's mean gradient at z [parameters]; empty unless the drift needs it.
        client: the clients' state; each [cohort, parameters] or [cohort].
        sent: client messages in addition to the displacement; each [cohort, parameters] or [cohort].
        displacement: the clients' displacements [cohort, parameters].
        gradient: each client's full gradient at z [cohort, parameters]; empty unless the drift needs it.
        buffers: BatchNorm statistics [cohort, buffers].
    """

    z: Tensor
    server: dict[str, Tensor]
    common_gradient: Tensor
    client: dict[str, Tensor]
    sent: dict[str, Tensor]
    displacement: Tensor
    gradient: Tensor
    buffers: Tensor

    @classmethod
    def new(
        cls, algorithm: Algorithm, size: int, buffers: int, rows: int, like: Tensor, shared: bool = False
    ) -> CohortBuffers:
        """Zeros for cohorts of up to ``rows`` clients.

        Args:
            algorithm: declares the fields of clients, server and messages.
            size: parameters of the model.
            buffers: numbers in its floating-point buffers.
            rows: largest cohort.
            like: gives dtype and device.
            shared: whether to allocate shared memory, for worker processes.
        """

        def zeros(*shape: int) -> Tensor:
            tensor = torch.zeros(shape, dtype=like.dtype, device=like.device)
            if shared:
                tensor.share_memory_()  # type: ignore[no-untyped-call]
            return tensor

        def for_fields(fields: dict[str, Field], *leading: int) -> dict[str, Tensor]:
            return {name: zeros(*leading, *((size,) if field.vector else ())) for name, field in fields.items()}

        common = algorithm.drift.full_gradient == "common"
        received = {name: field for name, field in flat_fields(algorithm.server_fields()).items() if field.sent}
        return cls(
            z=zeros(size),
            server=for_fields(received),
            common_gradient=zeros(size if common else 0),
            client=for_fields(flat_fields(algorithm.client_fields()), rows),
            sent=for_fields(flat_fields(algorithm.message_fields()), rows),
            displacement=zeros(rows, size),
            gradient=zeros(rows, size if common else 0),
            buffers=zeros(rows, buffers),
        )

    @property
    def rows(self) -> int:
        """Largest cohort that fits."""
        return len(self.displacement)

    def fill(self, algorithm: Algorithm, model: ModelState, server: States, cohort: Sequence[Client]) -> Tensor:
        """Copy in what a cohort reads; returns z, the model that its clients start from [parameters]."""
        z = algorithm.broadcast(model.weights, server)
        self.receive(z, server, model.buffers, cohort)
        return z

    def receive(self, z: Tensor, server: States, buffers: Tensor, cohort: Sequence[Client]) -> None:
        """Copy in what a cohort reads, for a given z."""
        self.z.copy_(z)
        for name, value in flat_state(server).items():
            if name in self.server:
                self.server[name].copy_(value)
        for row, client in enumerate(cohort):
            for name, value in flat_state(client.state).items():
                self.client[name][row].copy_(value)
            self.buffers[row].copy_(buffers if client.statistics is None else client.statistics)

    def server_state(self) -> States:
        """What the server sends, by slot; views of this memory."""
        return nested_state(self.server)

    def client_state(self, row: int) -> States:
        """The state in a client's row, by slot; views of this memory."""
        return nested_state({name: rows[row] for name, rows in self.client.items()})

    def write(self, row: int, state: States, message: Message) -> None:
        """Copy a trained client's new state and its message into its row."""
        self.displacement[row].copy_(message.displacement)
        for name, value in flat_state(state).items():
            self.client[name][row].copy_(value)
        for name, value in flat_state(message.sent).items():
            self.sent[name][row].copy_(value)


def copied(state: Mapping[str, State]) -> States:
    """A deep copy of a client's state."""
    return nested_state({name: value.clone() for name, value in flat_state(state).items()})


def state_to_arrays(state: Mapping[str, State]) -> Arrays:
    """A client's state as flat arrays on the CPU."""
    return {name: value.detach().cpu().numpy() for name, value in flat_state(state).items()}


def state_from_arrays(arrays: Mapping[str, np.ndarray], copy: bool = True) -> States:
    """The inverse of ``state_to_arrays``; without ``copy``, tensors share the arrays' memory and must only be read."""
    return nested_state({name: torch.from_numpy(np.array(a) if copy else np.asarray(a)) for name, a in arrays.items()})


class ClientReport(NamedTuple):
    """Scalars that a client reports in addition to its row.

    Attributes:
        rates: sum of its learning rates over all local steps.
        loss: sum of its batches' mean losses.
        steps: local steps.
        backward_passes: backward passes, perturbations and full gradients included.
        samples: examples seen, once per backward pass.
        integers: its integer buffers by name.
    """

    rates: Tensor | float
    loss: Tensor | float
    steps: int
    backward_passes: int
    samples: int
    integers: dict[str, Tensor]


class CohortWeights(NamedTuple):
    """Weights of the clients of a cohort, or of a part of it: one number per client in each list.

    Attributes:
        uniform: equal weights.
        by_samples: proportional to sample counts.
        aggregation: the weights that the aggregation gives displacements.
    """

    uniform: list[float]
    by_samples: list[float]
    aggregation: list[float]

    @classmethod
    def of(cls, aggregation: Aggregation, samples: list[int]) -> CohortWeights:
        """Weights of a whole cohort, from its clients' sample counts."""
        return cls(uniform(len(samples)), by_samples(samples), aggregation.weights(samples))

    def subset(self, positions: Sequence[int]) -> CohortWeights:
        """Weights of the clients at some positions of the cohort."""
        return CohortWeights(*([numbers[position] for position in positions] for numbers in self))


WeightedRows = dict[str, tuple[Tensor, Sequence[float] | Tensor]]
"""By name: rows [clients, ...] and their weights [clients]."""


def weighted_rows(
    training: Training, buffers: CohortBuffers, weights: CohortWeights, reports: list[ClientReport], count: int
) -> WeightedRows:
    """Everything that is averaged over a cohort of ``count`` clients, for the clients that have a report."""
    here = len(reports)
    rows = buffers.displacement[:here]
    parts: WeightedRows = {
        "displacement": (rows, weights.aggregation),
        "uniform": (rows, weights.uniform),
        "direction": (rows, -1 / (count * _stacked([report.rates for report in reports], rows))),
    }
    if not training.own_statistics:
        parts["buffers"] = buffers.buffers[:here], weights.aggregation
    fields = flat_fields(training.algorithm.message_fields())
    return parts | {
        f"sent/{name}": (sent[:here], weights.by_samples if fields[name].by_samples else weights.uniform)
        for name, sent in buffers.sent.items()
    }


def reduce_rows(
    training: Training,
    round: int,
    model: ModelState,
    z: Tensor,
    buffers: CohortBuffers,
    cohort: list[Client],
    reports: list[ClientReport],
    states: Sequence[Mapping[str, State]] | None = None,
    extra_cost: tuple[int, int] = (0, 0),
) -> Outcome:
    """Average the rows of a trained cohort.

    Args:
        training: how clients trained.
        round: number of the round.
        model: the server's model before the round.
        z: the model that clients started from [parameters].
        buffers: the rows that the clients wrote.
        cohort: the clients, in the order of their rows.
        reports: their reports, in the same order.
        states: their new states, if these are not in ``buffers``.
        extra_cost: backward passes and samples not counted in the reports.
    """
    count = len(cohort)
    weights = CohortWeights.of(training.aggregation, [len(client.indices) for client in cohort])
    parts = weighted_rows(training, buffers, weights, reports, count)
    if training.aggregation.needs_rows:
        sums = _robust_centres(training.aggregation, parts, model)
    else:
        sums = {name: weighted_sum(*part) for name, part in parts.items()}
    clients = [
        client._replace(
            state=copied(buffers.client_state(row)) if states is None else states[row],
            statistics=buffers.buffers[row].clone() if training.own_statistics else None,
        )
        for row, client in enumerate(cohort)
    ]
    common = buffers.common_gradient.clone() if training.algorithm.drift.full_gradient == "common" else None
    rows = CohortRows(buffers.displacement[:count], buffers.buffers[:count])
    return build_outcome(training, round, model, z, sums, clients, reports, common, rows, extra_cost)


def _robust_centres(aggregation: Aggregation, parts: WeightedRows, model: ModelState) -> dict[str, Tensor]:
    """Robust centres of everything that clients send, since an attacker may tamper with any of it."""
    rows, weights = parts["direction"]
    count, scale = len(rows), torch.as_tensor(weights)
    parts["direction"] = rows * (count * scale)[:, None], uniform(count)
    centres = {name: aggregation.combine(*part) for name, part in parts.items()}
    if "buffers" in parts:  # centre how far statistics have moved, because their size reveals no attack
        buffers, weights = parts["buffers"]
        centres["buffers"] = model.buffers + aggregation.combine(buffers - model.buffers, weights)
    return centres


def build_outcome(
    training: Training,
    round: int,
    model: ModelState,
    z: Tensor,
    sums: dict[str, Tensor],
    clients: list[Client],
    reports: list[ClientReport],
    common_gradient: Tensor | None,
    rows: CohortRows | None,
    extra_cost: tuple[int, int] = (0, 0),
) -> Outcome:
    """The outcome of a round, from the sums of ``weighted_rows`` and the clients with their new states."""
    count, size = len(clients), len(z)
    returned = CohortMeans(
        x=model.weights,
        z=z,
        displacement=sums["displacement"],
        uniform=sums["uniform"],
        direction=sums["direction"],
        mean={},
        share=count / training.clients,
        round=round,
        common_gradient=common_gradient,
    )
    own = training.own_statistics
    statistics = 0 if own else len(model.buffers)  # shared statistics travel both ways
    cost = Cost(
        extra_cost[0] + sum(report.backward_passes for report in reports),
        extra_cost[1] + sum(report.samples for report in reports),
        count * (training.algorithm.floats_down(size) + statistics),
        count * (training.algorithm.floats_up(size) + statistics),
    )
    sent = {name.removeprefix("sent/"): value for name, value in sums.items() if name.startswith("sent/")}
    return Outcome(
        returned,
        nested_state(sent),
        clients,
        model.buffers if own else sums["buffers"],
        model.integers if own else reports[0].integers,
        _stacked([report.loss for report in reports], z).sum() / sum(report.steps for report in reports),
        cost,
        rows,
    )


def _stacked(values: list[Tensor | float], like: Tensor) -> Tensor:
    """Scalars, or scalar tensors that are still being computed, as one tensor with the dtype and device of ``like``."""
    return torch.stack([torch.as_tensor(value, dtype=like.dtype, device=like.device) for value in values])


class CohortEngine(ABC):
    """An engine that trains a cohort in ``CohortBuffers``; subclasses say how its rows are trained.

    Attributes:
        problem: model, task and data.
        buffers: the memory of the cohort, reused from round to round; None before the first round.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.buffers: CohortBuffers | None = None

    def train(self, training: Training, round: int, model: ModelState, server: States, cohort: list[Client]) -> Outcome:
        """Train a cohort for one round and average what it sends, in cohort order."""
        buffers = self.allocate(training, len(cohort), model.weights)
        z = buffers.fill(training.algorithm, model, server, cohort)
        extra_cost = (0, 0)
        if training.algorithm.drift.full_gradient == "common":
            extra_cost = self.full_gradients(training, round, buffers, cohort)
            weights = by_samples([len(client.indices) for client in cohort])
            buffers.common_gradient.copy_(weighted_sum(buffers.gradient[: len(cohort)], weights))
        reports = self.train_rows(training, round, buffers, cohort, model.integers)
        return reduce_rows(training, round, model, z, buffers, cohort, reports, extra_cost=extra_cost)

    @abstractmethod
    def allocate(self, training: Training, rows: int, like: Tensor) -> CohortBuffers:
        """Memory for a cohort of ``rows`` clients, with the dtype and device of ``like``."""

    @abstractmethod
    def full_gradients(
        self, training: Training, round: int, buffers: CohortBuffers, cohort: list[Client]
    ) -> tuple[int, int]:
        """Write each client's full gradient at z into ``buffers.gradient``; returns backward passes and samples."""

    @abstractmethod
    def train_rows(
        self, training: Training, round: int, buffers: CohortBuffers, cohort: list[Client], integers: dict[str, Tensor]
    ) -> list[ClientReport]:
        """Train clients whose rows are filled, and write their results there."""
