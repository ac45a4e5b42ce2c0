"""From a cohort's rows to what the server needs: means, in cohort order."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fedflat.algorithms.algorithm import flat_fields, nested_state
from fedflat.algorithms.slot import Returned
from fedflat.engines.aggregation import by_samples, uniform, weighted_sum
from fedflat.engines.contract import Client, CohortRows, Cost, ModelState, Outcome, Training
from fedflat.engines.table import Table


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


def reduce_rows(
    training: Training, round: int, model: ModelState, z: Tensor, table: Table, cohort: list[Client], reports: list[Report]
) -> Outcome:
    """The means of all that a cohort sent, its new states, and what it cost."""
    count = len(cohort)
    samples = [len(client.indices) for client in cohort]
    even, sized = uniform(count), by_samples(samples)
    rows = table.displacement[:count]
    fields = flat_fields(training.algorithm.message_fields())
    means = {name: weighted_sum(sent[:count], sized if fields[name].by_samples else even) for name, sent in table.sent.items()}
    returned = Returned(
        x=model.weights,
        z=z,
        displacement=training.aggregation.combine(rows, samples),
        uniform=weighted_sum(rows, even),
        direction=weighted_sum(rows, -1 / (count * _stacked([report.rates for report in reports], z))),
        mean={},
        share=count / training.clients,
        round=round,
        common_gradient=table.common_gradient.clone() if training.algorithm.drift.whole_gradient == "common" else None,
    )
    clients = [
        client._replace(
            state=nested_state({name: kept[row].clone() for name, kept in table.client.items()}),
            statistics=table.buffers[row].clone() if training.own_statistics else None,
        )
        for row, client in enumerate(cohort)
    ]
    own = training.own_statistics
    buffers = model.buffers if own else weighted_sum(table.buffers[:count], training.aggregation.weights(samples))
    size = len(z)
    cost = Cost(
        sum(report.backward_passes for report in reports),
        sum(report.samples for report in reports),
        count * training.algorithm.floats_down(size),
        count * training.algorithm.floats_up(size),
    )
    loss = _stacked([report.loss for report in reports], z).sum() / sum(report.steps for report in reports)
    integers = model.integers if own else reports[0].integers
    seen = CohortRows(rows, table.buffers[:count])
    return Outcome(returned, nested_state(means), clients, buffers, integers, loss, cost, seen)


def _stacked(values: list[Tensor | float], like: Tensor) -> Tensor:
    """Numbers from workers, or tensors that are still being computed, as one tensor."""
    return torch.stack([torch.as_tensor(value, dtype=like.dtype, device=like.device) for value in values])
