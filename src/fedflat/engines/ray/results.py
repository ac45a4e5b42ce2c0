"""From what the workers returned to the outcome of a round."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedflat.algorithms.slot import State
from fedflat.engines.ray.messages import Broadcast, TrainedClients
from fedflat.engines.round.cohort import ClientReport, build_outcome
from fedflat.engines.round.contract import Client, ModelState, Outcome, Training, sum_of_blocks


class RoundContext(NamedTuple):
    """What all work items of a round have in common.

    Attributes:
        training: how clients train.
        cohort: the participating clients.
        broadcast: what every client reads.
        broadcast_ref: reference to it in the object store.
        gradient_ref: reference to the cohort's common gradient, if the algorithm has one.
        fresh: the state object that clients start with, if several of the cohort have it.
    """

    training: Training
    cohort: list[Client]
    broadcast: Broadcast
    broadcast_ref: Any
    gradient_ref: Any
    fresh: object


class CohortResults(NamedTuple):
    """What the workers returned for a round.

    Attributes:
        model: the server's model before the round.
        z: the model that clients started from [parameters].
        common_gradient: the cohort's gradient at z [parameters], if the algorithm has one.
        units: positions in the cohort that each work item trained.
        parts: what each work item returned.
        states: each client's new state, in cohort order.
        extra_cost: backward passes and samples of the common gradient.
    """

    context: RoundContext
    model: ModelState
    z: Tensor
    common_gradient: Tensor | None
    units: list[list[int]]
    parts: list[TrainedClients]
    states: list[Mapping[str, State]]
    extra_cost: tuple[int, int]

    @property
    def reports(self) -> list[ClientReport]:
        """The clients' reports, in cohort order."""
        return in_cohort_order(self.units, [part.reports for part in self.parts])


def outcome_from_sums(results: CohortResults) -> Outcome:
    """The outcome from sums over blocks, added in cohort order."""
    training, cohort = results.context.training, results.context.cohort
    blocks = [part for _, part in sorted(zip(results.units, results.parts, strict=True), key=lambda pair: pair[0][0])]
    sums = {
        name: sum_of_blocks([torch.from_numpy(np.array(block.sums[name])) for block in blocks])
        for name in blocks[0].sums
    }
    statistics: list[Tensor | None] = [None] * len(cohort)
    if training.own_statistics:
        rows = [[] if part.statistics is None else list(part.statistics) for part in results.parts]
        statistics = [torch.from_numpy(np.array(row)) for row in in_cohort_order(results.units, rows)]
    clients = [
        client._replace(state=state, statistics=own)
        for client, state, own in zip(cohort, results.states, statistics, strict=True)
    ]
    return build_outcome(
        training,
        results.context.broadcast.round,
        results.model,
        results.z,
        sums,
        clients,
        results.reports,
        results.common_gradient,
        None,
        results.extra_cost,
    )


def most_common_state(cohort: list[Client]) -> Mapping[str, State] | None:
    """The state object that several clients share: the state of clients that take part for the first time."""
    counts = Counter(id(client.state) for client in cohort)
    same, count = counts.most_common(1)[0]
    return next(client.state for client in cohort if id(client.state) == same) if count > 1 else None


def in_cohort_order(units: list[list[int]], values: Sequence[Sequence[Any]]) -> list[Any]:
    """The values of all units, by their positions in the cohort."""
    by_row = {
        row: value
        for unit, unit_values in zip(units, values, strict=True)
        for row, value in zip(unit, unit_values, strict=True)
    }
    return [by_row[row] for row in range(len(by_row))]
