"""From a cohort's rows to what the server needs: means, in cohort order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fedflat.algorithms.algorithm import flat_fields, nested_state
from fedflat.algorithms.slot import CohortMeans, State
from fedflat.engines.round.aggregation import Aggregation, by_samples, uniform, weighted_sum
from fedflat.engines.round.cohort_buffers import Table
from fedflat.engines.round.contract import Client, CohortRows, Cost, ModelState, Outcome, Training


class Report(NamedTuple):
    """What a client reports beside its vectors."""

    rates: Tensor | float
    """H, the sum of its learning rates."""
    loss: Tensor | float
    """The sum of its batches' losses."""
    steps: int
    backward_passes: int
    samples: int
    integers: dict[str, Tensor]


class Shares(NamedTuple):
    """By what the clients of a cohort, or of a part of it, are weighted: a number for each."""

    even: list[float]
    sized: list[float]
    chosen: list[float]
    """As the aggregation weights displacements."""

    @classmethod
    def of(cls, aggregation: Aggregation, samples: list[int]) -> Shares:
        """The shares of a whole cohort."""
        return cls(uniform(len(samples)), by_samples(samples), aggregation.weights(samples))

    def of_some(self, places: Sequence[int]) -> Shares:
        """Those of some of its clients."""
        return Shares(*([numbers[place] for place in places] for numbers in self))


Weighted = dict[str, tuple[Tensor, Sequence[float] | Tensor]]


def weighted_rows(training: Training, table: Table, shares: Shares, reports: list[Report], count: int) -> Weighted:
    """All that is summed over a cohort of ``count``, by name: the rows of these of its clients, and their weights."""
    here = len(reports)
    rows = table.displacement[:here]
    found: Weighted = {
        "displacement": (rows, shares.chosen),
        "uniform": (rows, shares.even),
        "direction": (rows, -1 / (count * _stacked([report.rates for report in reports], rows))),
    }
    if not training.own_statistics:
        found["buffers"] = table.buffers[:here], shares.chosen
    fields = flat_fields(training.algorithm.message_fields())
    return found | {
        f"sent/{name}": (sent[:here], shares.sized if fields[name].by_samples else shares.even)
        for name, sent in table.sent.items()
    }


def reduce_rows(
    training: Training,
    round: int,
    model: ModelState,
    z: Tensor,
    table: Table,
    cohort: list[Client],
    reports: list[Report],
    states: Sequence[Mapping[str, State]] | None = None,
) -> Outcome:
    """The means of all that a cohort sent, its new states, which are the table's unless they lie elsewhere, and what it cost."""
    count = len(cohort)
    samples = [len(client.indices) for client in cohort]
    shares = Shares.of(training.aggregation, samples)
    parts = weighted_rows(training, table, shares, reports, count)
    centre = _robust_centres if training.aggregation.needs_rows else _means
    sums = centre(training.aggregation, parts, model)
    clients = [
        client._replace(
            state=nested_state({name: kept[row].clone() for name, kept in table.client.items()})
            if states is None
            else states[row],
            statistics=table.buffers[row].clone() if training.own_statistics else None,
        )
        for row, client in enumerate(cohort)
    ]
    common = table.common_gradient.clone() if training.algorithm.drift.whole_gradient == "common" else None
    seen = CohortRows(table.displacement[:count], table.buffers[:count])
    return outcome_of(training, round, model, z, sums, clients, reports, common, seen)


def _means(aggregation: Aggregation, parts: Weighted, model: ModelState) -> dict[str, Tensor]:
    return {name: weighted_sum(*what) for name, what in parts.items()}


def _robust_centres(aggregation: Aggregation, parts: Weighted, model: ModelState) -> dict[str, Tensor]:
    """A robust centre of all that is sent, not of the displacements alone: a lie could come in any of it."""
    rows, weights = parts["direction"]
    count, scale = len(rows), torch.as_tensor(weights)
    parts["direction"] = rows * (count * scale)[:, None], uniform(count)
    sums = {name: aggregation.combine(*what) for name, what in parts.items()}
    if "buffers" in parts:  # how far they have moved, since it is not their size that tells of a lie
        buffers, weights = parts["buffers"]
        sums["buffers"] = model.buffers + aggregation.combine(buffers - model.buffers, weights)
    return sums


def outcome_of(
    training: Training,
    round: int,
    model: ModelState,
    z: Tensor,
    sums: dict[str, Tensor],
    clients: list[Client],
    reports: list[Report],
    common_gradient: Tensor | None,
    rows: CohortRows | None,
) -> Outcome:
    """What came back from a cohort, from its sums (those of ``weighted_rows``) and its clients' new states."""
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
    statistics = 0 if own else len(model.buffers)  # shared ones go both ways
    cost = Cost(
        sum(report.backward_passes for report in reports),
        sum(report.samples for report in reports),
        count * (training.algorithm.floats_down(size) + statistics),
        count * (training.algorithm.floats_up(size) + statistics),
    )
    return Outcome(
        returned,
        nested_state({name.removeprefix("sent/"): value for name, value in sums.items() if name.startswith("sent/")}),
        clients,
        model.buffers if own else sums["buffers"],
        model.integers if own else reports[0].integers,
        _stacked([report.loss for report in reports], z).sum() / sum(report.steps for report in reports),
        cost,
        rows,
    )


def _stacked(values: list[Tensor | float], like: Tensor) -> Tensor:
    """Numbers from workers, or tensors that are still being computed, as one tensor."""
    return torch.stack([torch.as_tensor(value, dtype=like.dtype, device=like.device) for value in values])
