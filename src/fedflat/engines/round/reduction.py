"""Reduction of a cohort: from the rows that its clients wrote to the means that the server needs.

Engines call ``reduce_rows`` once all clients have trained. It averages [cohort, ...] rows into [...] vectors, in cohort
order, and returns the ``Outcome``. A Ray worker that trained a whole block of the aggregation sends ``weighted_rows``
summed instead, and the driver builds the outcome from these sums with ``build_outcome``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fedflat.algorithms.algorithm import flat_fields, nested_state
from fedflat.algorithms.slot import CohortMeans, State
from fedflat.engines.round.aggregation import Aggregation, by_samples, uniform, weighted_sum
from fedflat.engines.round.cohort_buffers import CohortBuffers, copied
from fedflat.engines.round.contract import Client, CohortRows, Cost, ModelState, Outcome, Training


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
