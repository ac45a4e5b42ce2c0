"""A cohort's round: averaging what its clients wrote into ``CohortBuffers``, and the base class of engines."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from fedflat.algorithms.algorithm import States, flat_fields, nested_state
from fedflat.algorithms.slot import TINY_LR, CohortMeans
from fedflat.algorithms.state import State
from fedflat.algorithms.weights import ClientRows
from fedflat.engines.problem.problem import Problem
from fedflat.engines.round.aggregation import (
    Aggregation,
    CohortWeights,
    uniform_weights,
    weighted_sum,
    weights_by_samples,
)
from fedflat.engines.round.client import ClientReport
from fedflat.engines.round.cohort_buffers import CohortBuffers
from fedflat.engines.round.contract import Client, CohortRows, Cost, ModelState, Outcome, RoundStart, Training
from fedflat.engines.round.privacy import protect_means, protect_rows
from fedflat.gradients import gradients_enabled

WeightedRows = dict[str, tuple[Tensor, Sequence[float] | Tensor]]
"""By name: rows [clients, ...] and their weights [clients]."""


def weighted_rows(
    training: Training, cohort_buffers: CohortBuffers, weights: CohortWeights, reports: list[ClientReport], count: int
) -> WeightedRows:
    """Collect everything that is averaged over a cohort: the rows of its clients, and their weights.

    A Ray worker trains only some clients of a cohort and collects only their rows.

    Args:
        training: how clients train.
        cohort_buffers: the rows that the clients wrote.
        weights: weights that these clients have in the whole cohort.
        reports: reports of these clients; the client of report i wrote row i.
        count: number of clients in the whole cohort.

    Returns:
        Rows and weights by name: ``displacement``, ``uniform`` and ``direction`` of ``CohortMeans``, ``normalised`` if
        the drift divides displacements, ``buffers`` unless clients keep their own statistics, and each message of a
        slot as ``sent/slot.field``.
    """
    trained = len(reports)
    displacements = cohort_buffers.displacement[:trained]
    lr_sums = _stack_scalars([report.lr_sum for report in reports], displacements).clamp(min=TINY_LR)  # H_i
    weighted: WeightedRows = {
        "displacement": (displacements, weights.aggregation),
        "uniform": (displacements, weights.uniform),
        "direction": (displacements, -1 / (count * lr_sums)),  # the mean of -D_i / H_i, which is in gradient units
    }
    if not training.own_statistics:
        weighted["buffers"] = cohort_buffers.statistics[:trained], weights.aggregation
    divisor = training.algorithm.drift.displacement_divisor
    if divisor is not None:
        # A site must not inflate its displacement.
        divisors = cohort_buffers.sent[f"drift.{divisor}"][:trained].clamp(min=1)
        weighted["normalised"] = displacements / divisors[:, None], weights.aggregation
    fields = flat_fields(training.algorithm.message_fields())
    for name, rows in cohort_buffers.sent.items():
        weighted[f"sent/{name}"] = rows[:trained], getattr(weights, fields[name].weighting)
    return weighted


def reduce_rows(
    start: RoundStart,
    cohort_buffers: CohortBuffers,
    cohort: list[Client],
    reports: list[ClientReport],
    gradient_cost: Cost,
    states: Sequence[Mapping[str, State]] | None = None,
) -> Outcome:
    """Build the outcome of a round from the rows of a trained cohort: their average, and the clients' new states.

    Args:
        start: what the round started from.
        cohort_buffers: the rows that the clients wrote.
        cohort: the clients, in the order of their rows.
        reports: their reports, in the same order.
        gradient_cost: cost of the common gradient, which the reports do not include.
        states: their new states; None if these are in ``cohort_buffers``.
    """
    training, count = start.training, len(cohort)
    weights = CohortWeights.of(training.aggregation, [len(client.indices) for client in cohort])
    chosen_state: State = {}
    if training.algorithm.weights.are_chosen:
        chosen, chosen_state = _chosen_weights(start, cohort_buffers, weights, cohort)
        weights = weights._replace(aggregation=chosen)
    weighted = weighted_rows(training, cohort_buffers, weights, reports, count)
    if training.aggregation.needs_rows:
        averages = _robust_centres(training.aggregation, weighted, start.model)
    else:
        averages = {name: weighted_sum(rows, row_weights) for name, (rows, row_weights) in weighted.items()}
    if states is None:
        fields = cohort_buffers.client_states.items()
        states = [nested_state({name: rows[row].clone() for name, rows in fields}) for row in range(count)]
    clients = []
    for row, client in enumerate(cohort):
        statistics = cohort_buffers.statistics[row].clone() if training.own_statistics else None
        clients.append(client._replace(state=states[row], statistics=statistics))
    common = cohort_buffers.common_gradient.clone() if training.algorithm.drift.full_gradient == "common" else None
    cohort_rows = CohortRows(cohort_buffers.displacement[:count], cohort_buffers.statistics[:count])
    outcome = build_outcome(start, averages, clients, reports, gradient_cost, common, cohort_rows)
    outcome.message_means["weights"] |= chosen_state
    return outcome


def reduce_groups(
    start: RoundStart,
    cohort_buffers: CohortBuffers,
    groups: list[list[Client]],
    reports: list[ClientReport],
    gradient_cost: Cost,
    states: Sequence[Mapping[str, State]] | None = None,
) -> list[Outcome]:
    """Build the outcome of each of several groups of clients that trained together.

    The arguments are those of ``reduce_rows``; rows, reports and states are in the order of the groups.
    """
    outcomes, first = [], 0
    for group in groups:
        rows = slice(first, first + len(group))
        rows_of_group = cohort_buffers.part(rows) if len(groups) > 1 else cohort_buffers
        new_states = None if states is None else states[rows]
        outcomes.append(reduce_rows(start, rows_of_group, group, reports[rows], gradient_cost, new_states))
        first, gradient_cost = rows.stop, Cost()  # a common gradient is counted once
    return outcomes


def _chosen_weights(
    start: RoundStart, cohort_buffers: CohortBuffers, weights: CohortWeights, cohort: list[Client]
) -> tuple[Tensor, State]:
    """The weights [cohort] that the algorithm chooses, and what changes in the server state of its client weights.

    Args:
        start: what the round started from.
        cohort_buffers: the rows that the clients wrote.
        weights: the weights of the run.
        cohort: the clients, in the order of their rows.
    """
    training, z, count = start.training, start.z, len(cohort)
    rows = ClientRows(
        clients=torch.tensor([client.number for client in cohort], device=z.device),
        weights=torch.as_tensor(weights.aggregation, dtype=z.dtype, device=z.device),
        share=count / training.clients,
        z=z,
        displacements=cohort_buffers.displacement[:count],
        sent={name: values[:count] for name, values in cohort_buffers.sent.items()},
    )
    return training.algorithm.weights.choose(rows, start.server["weights"])


def _robust_centres(aggregation: Aggregation, weighted: WeightedRows, model: ModelState) -> dict[str, Tensor]:
    """Robust centres, by name, of everything that clients send, since attackers may tamper with any of it.

    Args:
        aggregation: the robust centre, e.g. the median.
        weighted: rows and weights by name, from ``weighted_rows``.
        model: the server's model before the round.
    """
    # A direction is a displacement divided by -H_i, the client's sum of learning rates. Its weight, -1 / (count H_i),
    # contains this division, which must be applied first, because a median ignores weights.
    displacements, scales = weighted["direction"]
    count = len(displacements)
    directions = displacements * (count * torch.as_tensor(scales))[:, None]
    weighted = weighted | {"direction": (directions, uniform_weights(count))}
    centres = {name: aggregation.combine(rows, weights) for name, (rows, weights) in weighted.items()}
    if "buffers" in weighted:  # centre the changes of statistics: norms of the statistics themselves hide an attack
        buffers, weights = weighted["buffers"]
        centres["buffers"] = model.buffers + aggregation.combine(buffers - model.buffers, weights)
    return centres


def build_outcome(
    start: RoundStart,
    averages: dict[str, Tensor],
    clients: list[Client],
    reports: list[ClientReport],
    gradient_cost: Cost,
    common_gradient: Tensor | None,
    rows: CohortRows | None = None,
) -> Outcome:
    """Build the outcome of a round.

    Args:
        start: what the round started from.
        averages: weighted means or robust centres of what clients sent, by name as in ``weighted_rows``.
        clients: the cohort with its new states.
        reports: the clients' reports, in the same order.
        gradient_cost: cost of the common gradient, which the reports do not include.
        common_gradient: the cohort's mean gradient at z [parameters], if the drift needs it.
        rows: every client's row, where available.
    """
    training, round, model, _, z = start
    count, size = len(clients), len(z)
    lr_sums = _stack_scalars([report.lr_sum for report in reports], z)
    averages = protect_means(training, round, averages, lr_sums, count)
    cohort_means = CohortMeans(
        x=model.weights,
        z=z,
        displacement=averages["displacement"],
        uniform=averages["uniform"],
        direction=averages["direction"],
        mean={},
        share=count / training.clients,
        cohort_size=count,
        round=round,
        normalised=averages.get("normalised"),
        common_gradient=common_gradient,
    )
    statistics_sent = 0 if training.own_statistics else len(model.buffers)  # in both directions
    cost = gradient_cost + Cost(
        backward_passes=sum(report.backward_passes for report in reports),
        samples=sum(report.samples for report in reports),
        floats_down=count * (training.algorithm.floats_down(size) + statistics_sent),
        floats_up=count * (training.algorithm.floats_up(size) + statistics_sent),
    )
    losses = _stack_scalars([report.loss for report in reports], z)
    loss = losses.sum() / sum(report.steps for report in reports)
    if training.aggregation.needs_rows:  # a client whose loss is not finite must not end a robust run
        is_finite, steps = losses.isfinite(), _stack_scalars([report.steps for report in reports], z)
        loss = torch.where(is_finite, losses, 0).sum() / torch.where(is_finite, steps, 0).sum()
    sent = {name.removeprefix("sent/"): value for name, value in averages.items() if name.startswith("sent/")}
    return Outcome(
        cohort_means=cohort_means,
        message_means=nested_state(sent),
        clients=clients,
        buffers=model.buffers if training.own_statistics else averages["buffers"],
        # Counters cannot be averaged; the server takes those of the first client.
        integer_buffers=model.integer_buffers if training.own_statistics else reports[0].integer_buffers,
        loss=loss,
        cost=cost,
        rows=rows,
        lr_sums=lr_sums,
    )


def _stack_scalars(values: list[Tensor | float], like: Tensor) -> Tensor:
    """Stack scalars into a tensor [n] with the dtype and device of ``like``, without waiting for a GPU."""
    return torch.stack([torch.as_tensor(value, dtype=like.dtype, device=like.device) for value in values])


class CohortEngine(ABC):
    """An engine that trains a cohort in ``CohortBuffers``; subclasses say how its rows are trained.

    Attributes:
        problem: model, task and data.
        cohort_buffers: memory of a cohort, reused from round to round; None before the first round.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        problem.prepare_batches()
        self.cohort_buffers: CohortBuffers | None = None

    def train(self, training: Training, round: int, model: ModelState, server: States, cohort: list[Client]) -> Outcome:
        """Train a cohort for one round and average what its clients send, in cohort order; see ``Engine.train``."""
        return self.train_groups(training, round, model, server, [cohort])[0]

    @gradients_enabled()
    def train_groups(
        self, training: Training, round: int, model: ModelState, server: States, groups: list[list[Client]]
    ) -> list[Outcome]:
        """Train the clients of several groups together, and average what each group sends.

        ``server`` is the server's state by slot, and ``groups`` lists the clients of each group.
        """
        cohort = [client for group in groups for client in group]
        cohort_buffers = self.allocate(training, len(cohort), model.weights)
        start = RoundStart.of(training, round, model, server)
        cohort_buffers.copy_inputs(start.z, server, model.buffers, cohort)
        gradient_cost = Cost()
        if training.algorithm.drift.full_gradient == "common":  # clients need the cohort's mean gradient at z to train
            gradient_cost = self.compute_full_gradients(training, round, cohort_buffers, cohort)
            weights = weights_by_samples([len(client.indices) for client in cohort])
            cohort_buffers.common_gradient.copy_(weighted_sum(cohort_buffers.gradient[: len(cohort)], weights))
        reports = self.train_rows(training, round, cohort_buffers, cohort, model.integer_buffers)
        protect_rows(training, round, cohort_buffers, [client.number for client in cohort])
        return reduce_groups(start, cohort_buffers, groups, reports, gradient_cost)

    @abstractmethod
    def allocate(self, training: Training, rows: int, like: Tensor) -> CohortBuffers:
        """Memory for a cohort of ``rows`` clients, with the dtype and device of ``like``."""

    @abstractmethod
    def compute_full_gradients(
        self, training: Training, round: int, cohort_buffers: CohortBuffers, cohort: list[Client]
    ) -> Cost:
        """Write each client's full-batch gradient at ``cohort_buffers.z`` into its row of ``cohort_buffers.gradient``.

        Returns the total cost.
        """

    @abstractmethod
    def train_rows(
        self,
        training: Training,
        round: int,
        cohort_buffers: CohortBuffers,
        cohort: list[Client],
        integer_buffers: dict[str, Tensor],
    ) -> list[ClientReport]:
        """Train the clients whose inputs are in ``cohort_buffers``; client i of the cohort writes to row i.

        ``integer_buffers`` are those of the server's model, by name; each report contains those of its client after
        training.
        """

    def prepare(self, training: Training, round: int, clients: list[tuple[int, np.ndarray]]) -> None:  # noqa: B027
        """Prepare a later round; ``clients`` lists (number, indices). By default there is nothing to prepare."""
