"""The outcome of a round from the results of the workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedflat.algorithms.state import State
from fedflat.engines.ray.messages import Broadcast
from fedflat.engines.ray.scheduling import WorkItem
from fedflat.engines.round.aggregation import sum_of_blocks
from fedflat.engines.round.client import ClientReport
from fedflat.engines.round.cohort import build_outcome, reduce_groups
from fedflat.engines.round.cohort_buffers import CohortBuffers
from fedflat.engines.round.contract import Client, Cost, Outcome, RoundStart, Training


class RoundContext(NamedTuple):
    """What all work items of a round have in common.

    Attributes:
        training: how clients train.
        cohort: the participating clients.
        broadcast: what every client reads.
        broadcast_ref: reference to ``broadcast`` in Ray's object store.
        gradient_ref: reference to the cohort's mean gradient in Ray's object store, if the drift correction needs it.
        initial_state: the state object of first-time participants, if the cohort has several of them.
    """

    training: Training
    cohort: list[Client]
    broadcast: Broadcast
    broadcast_ref: Any
    gradient_ref: Any
    initial_state: object

    def planned_samples(self) -> list[int]:
        """Examples that each client of the cohort sees if it completes all its steps."""
        return [self.training.plan.samples(len(client.indices)) for client in self.cohort]


class CohortResults(NamedTuple):
    """Results of the workers for a round.

    Attributes:
        context: training, cohort and broadcast of the round.
        start: what the round started from.
        common_gradient: the cohort's mean gradient at z [parameters], if the drift correction needs it.
        items: the work items; each has a ``TrainedClients`` as its result.
        states: each client's new state, in cohort order.
        gradient_cost: cost of the common gradient.
    """

    context: RoundContext
    start: RoundStart
    common_gradient: Tensor | None
    items: list[WorkItem]
    states: list[Mapping[str, State]]
    gradient_cost: Cost

    @property
    def reports(self) -> list[ClientReport]:
        """The clients' reports, in cohort order."""
        return in_cohort_order((item.rows, item.result.reports) for item in self.items)


def outcomes_from_rows(
    results: CohortResults, cohort_buffers: CohortBuffers, groups: list[list[Client]]
) -> list[Outcome]:
    """The outcome of each group in a round in which workers returned every client's row, i.e. all that it sends.

    Copies the rows to ``cohort_buffers``, which have space for the whole cohort, and averages those of each group. The
    cohort consists of the clients of all groups, in order.
    """
    for item in results.items:
        # Through numpy, which copies from the object store only once.
        rows = item.result.rows
        cohort_buffers.displacement.numpy()[item.rows] = rows["displacement"]
        cohort_buffers.statistics.numpy()[item.rows] = rows["buffers"]
        for name, sent in cohort_buffers.sent.items():
            sent.numpy()[item.rows] = rows[f"sent/{name}"]
    if results.common_gradient is not None:
        cohort_buffers.common_gradient.copy_(results.common_gradient)
    return reduce_groups(results.start, cohort_buffers, groups, results.reports, results.gradient_cost, results.states)


def outcome_from_sums(results: CohortResults) -> Outcome:
    """The outcome of a round in which workers returned sums over blocks of clients.

    The blocks' sums are added in the order of the cohort, so that rounding does not depend on which worker was first.
    """
    training, cohort = results.context.training, results.context.cohort
    blocks = [item.result.sums for item in sorted(results.items, key=lambda item: item.rows[0])]
    sums = {name: sum_of_blocks([torch.tensor(block[name]) for block in blocks]) for name in blocks[0]}
    statistics: list[Tensor | None] = [None] * len(cohort)  # each client's own BatchNorm statistics
    if training.own_statistics:
        arrays = in_cohort_order((item.rows, item.result.rows["buffers"]) for item in results.items)
        statistics = [torch.tensor(array) for array in arrays]
    clients = [
        client._replace(state=state, statistics=client_statistics)
        for client, state, client_statistics in zip(cohort, results.states, statistics, strict=True)
    ]
    return build_outcome(results.start, sums, clients, results.reports, results.gradient_cost, results.common_gradient)


def most_common_state(cohort: list[Client]) -> Mapping[str, State] | None:
    """The state object that several clients of a cohort share, or None.

    Only clients that participate for the first time share one object; sending it once saves traffic.
    """
    by_id = {id(client.state): client.state for client in cohort}
    most_common_id, count = Counter(id(client.state) for client in cohort).most_common(1)[0]
    return by_id[most_common_id] if count > 1 else None


def in_cohort_order(values_of_rows: Iterable[tuple[Sequence[int], Sequence[Any]]]) -> list[Any]:
    """Sort values by their row in the cohort, given as pairs (rows, values) of equal length.

    >>> in_cohort_order([([2, 0], ["c", "a"]), ([1], ["b"])])
    ['a', 'b', 'c']
    """
    by_row: dict[int, Any] = {}
    for rows, values in values_of_rows:
        by_row.update(zip(rows, values, strict=True))
    return [by_row[row] for row in sorted(by_row)]
