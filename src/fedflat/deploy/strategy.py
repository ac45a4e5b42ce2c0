"""A Flower strategy for an existing ServerApp: fedflat's server steps, averages and robust aggregation."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Result
from torch import Tensor

from fedflat.algorithms import Algorithm, algorithm, canonical
from fedflat.algorithms.algorithm import flat_state, nested_state
from fedflat.algorithms.descent import Descent
from fedflat.algorithms.lr_schedule import Schedule
from fedflat.averaging.base import AverageState, RunInfo
from fedflat.deploy.flower.wire import tensors_of
from fedflat.engines.round.client import ClientReport, CohortBuffers, GradientCost
from fedflat.engines.round.cohort import reduce_rows
from fedflat.engines.round.contract import Aggregation, Centre, Client, ModelState, Training
from fedflat.engines.round.plan import Plan
from fedflat.errors import UserError

log = logging.getLogger("flwr")
STATISTICS = ("running_mean", "running_var")
"""Ends of the names of BatchNorm statistics, which are averaged but take no part in the server's step."""
CLIENT_SLOTS = ("drift", "perturbation", "local_optimiser", "start", "weights")
"""Slots whose components, unless they are the default, change what clients do."""


class Strategy(FedAvg):
    """A Flower strategy that aggregates like a fedflat algorithm, for ClientApps that train with plain SGD.

    The ClientApp stays unchanged: it receives the model, trains it, and returns the arrays and ``num-examples``. It
    also chooses its learning rate, so the learning-rate schedule of an algorithm such as FedSWA has no effect. If the
    algorithm has averages, the last of them is evaluated and returned; clients train from the server model.

    Args:
        name: the algorithm, e.g. ``fedavgm(beta=0.9)+wima(window=20)``.
        aggregation: ``mean``, or the robust ``median``, ``trimmed`` or ``clipped``.
        trim: share of the clients that ``trimmed`` drops at each end.
        longest: largest norm of an update for ``clipped``, in units of the cohort's median norm.
        options: options of Flower's ``FedAvg``, e.g. ``fraction_train``.

    >>> Strategy("fedavgm+ema").name
    'fedavgm+ema'
    """

    def __init__(
        self,
        name: str = "fedavg",
        *,
        aggregation: Centre = "mean",
        trim: float = 0.1,
        longest: float = 1.0,
        **options: Any,
    ) -> None:
        """Raise a ``UserError`` if the clients of the algorithm do more than SGD."""
        super().__init__(**options)
        self.algorithm = algorithm(name)
        self.name = canonical(self.algorithm)
        _require_plain_clients(self.name, self.algorithm)
        self._aggregation = Aggregation("samples", aggregation, trim, longest)
        self._nodes = 1
        self._averages: list[AverageState] = []

    def summary(self) -> None:
        """Log the algorithm and the sampling of nodes."""
        log.info("\t├──> fedflat: %s, aggregation: %s", self.name, self._aggregation.centre)
        super().summary()

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Run the rounds; ``evaluate_fn`` and the result get the average, if there is one. Arguments as in Flower."""
        self._begin(initial_arrays, num_rounds)
        evaluate = None if evaluate_fn is None else lambda round, _: evaluate_fn(round, self.evaluated())
        result = super().start(grid, initial_arrays, num_rounds, timeout, train_config, evaluate_config, evaluate)
        result.arrays = self.evaluated()
        return result

    def _begin(self, initial: ArrayRecord, rounds: int) -> None:
        """Start from the initial arrays, for a number of rounds, which some averages depend on."""
        self._initial = initial
        self._model = self._split(tensors_of(initial))
        x = self._model.weights
        self._states = self.algorithm.new_server(x)
        self._training = Training(
            self.algorithm, Descent(), Schedule(1.0, rounds=rounds), Plan(1), 0, 1, self._aggregation
        )
        flat = torch.cat([x, self._model.buffers])
        # In memory, a dictionary of vectors by position serves as ring buffer.
        info = RunInfo(
            rounds, self.algorithm.lr_schedule.cycle, torch.zeros_like(flat, dtype=torch.bool), lambda *_: {}
        )
        for average in self.algorithm.averages:
            warning = average.warning(info)
            if warning:
                log.warning("%s", warning)
        self._averages = [average.begin(info, flat) for average in self.algorithm.averages]

    def evaluated(self) -> ArrayRecord:
        """The model to evaluate: the last average that has begun, or the server model."""
        flat = torch.cat([self._model.weights, self._model.buffers])
        for average in reversed(self._averages):
            mean = average.model(flat)
            if mean is not None:
                flat = mean
                break
        weights, buffers = torch.split(flat, [len(self._model.weights), len(self._model.buffers)])
        return self._record(self._model._replace(weights=weights, buffers=buffers))

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Send the server model to the nodes of the round."""
        self._nodes = len(list(grid.get_node_ids()))
        flat = torch.cat([self._model.weights, self._model.buffers])
        for average in self._averages:
            average.before_round(server_round - 1, flat)
        messages: Iterable[Message] = super().configure_train(server_round, arrays, config, grid)
        return messages

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Send the model to evaluate."""
        messages: Iterable[Message] = super().configure_evaluate(server_round, self.evaluated(), config, grid)
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Take the algorithm's server step from the replies; replies with unsuitable arrays are ignored."""
        valid, _ = self._check_and_log_replies(replies, is_train=True)
        received = []  # number of examples, and model
        contents = []
        for reply in sorted(valid, key=lambda reply: reply.metadata.src_node_id):  # not in the order of arrival
            (record,) = reply.content.array_records.values()
            (metrics,) = reply.content.metric_records.values()
            tensors, examples = tensors_of(record), metrics[self.weighted_by_key]
            problem = self._problem(tensors, examples)
            if problem:
                log.warning("ignoring node %d: %s", reply.metadata.src_node_id, problem)
                continue
            received.append((int(examples), self._split(tensors)))
            contents.append(reply.content)
        if not received:
            return None, None
        self._step(server_round - 1, received)
        return self._record(self._model), self.train_metrics_aggr_fn(contents, self.weighted_by_key)

    def _problem(self, tensors: Mapping[str, Tensor], examples: Any) -> str | None:
        """Why a reply cannot be used, or None."""
        if not isinstance(examples, int | float) or not 1 <= examples < math.inf:
            return f"{self.weighted_by_key} is {examples}; expected a positive number"
        if _kinds(tensors) != _kinds(tensors_of(self._initial)):
            return "its arrays differ from the model's in names, shapes or types; return the whole state_dict"
        if not all(tensor.isfinite().all() for tensor in tensors.values()):
            return "its arrays contain values that are not finite"
        return None

    def _step(self, round: int, received: Sequence[tuple[int, ModelState]]) -> None:
        """Update model, server state and averages.

        Args:
            round: number of the round, counted from 0.
            received: number of examples and trained model of each client.
        """
        model, count = self._model, len(received)
        rows = CohortBuffers.new(self.algorithm, len(model.weights), len(model.buffers), count, model.weights)
        state = nested_state({})
        for row, (_, trained) in enumerate(received):
            rows.displacement[row] = trained.weights - model.weights
            rows.statistics[row] = trained.buffers
            sent = flat_state(state | {"server": self.algorithm.server.measure(rows.displacement[row])})
            for name, value in sent.items():
                rows.sent[name][row] = value
        cohort = [Client(row, np.empty(examples, np.uint8), state) for row, (examples, _) in enumerate(received)]
        reports = [ClientReport(1.0, 0.0, 1, 0, 0, trained.integer_buffers) for _, trained in received]
        training = replace(self._training, clients=max(self._nodes, count))
        arguments = training, round, model, model.weights, rows, cohort, reports, GradientCost(), self._states
        outcome = reduce_rows(*arguments)
        weights, self._states = self.algorithm.aggregate(outcome.returned, outcome.means, self._states)
        self._model = ModelState(weights, outcome.buffers, outcome.integer_buffers)
        flat = torch.cat([weights, outcome.buffers])
        for average in self._averages:
            average.update(round, flat)

    def _split(self, tensors: Mapping[str, Tensor]) -> ModelState:
        """Named tensors as vectors of weights and BatchNorm statistics, in the order of the initial arrays."""
        floats = {name: tensors[name] for name in self._initial if tensors[name].is_floating_point()}
        parts: tuple[list[Tensor], list[Tensor]] = [], []
        for name, tensor in floats.items():
            parts[name.endswith(STATISTICS)].append(tensor.reshape(-1))
        empty = torch.zeros(0)
        weights, buffers = (torch.cat([empty, *part]) for part in parts)
        return ModelState(weights, buffers, {name: t for name, t in tensors.items() if name not in floats})

    def _record(self, model: ModelState) -> ArrayRecord:
        """The inverse of ``_split``, with the shapes and data types of the initial arrays."""
        vectors, used = (model.weights, model.buffers), [0, 0]
        record = ArrayRecord()
        for name, array in self._initial.items():
            if name in model.integer_buffers:
                record[name] = Array(model.integer_buffers[name].numpy())
                continue
            part = int(name.endswith(STATISTICS))
            size = int(np.prod(array.shape))
            values = vectors[part][used[part] : used[part] + size]
            used[part] += size
            record[name] = Array(values.numpy().reshape(array.shape).astype(array.dtype))
        return record


def _require_plain_clients(name: str, parts: Algorithm) -> None:
    """Raise a ``UserError`` if clients of the algorithm must do more than SGD, or an average needs the model's code."""
    changed = [slot for slot in CLIENT_SLOTS if getattr(parts, slot) != getattr(Algorithm(), slot)]
    if changed:
        raise UserError(
            f"the clients of {name} do more than SGD ({', '.join(changed)}), so an unchanged ClientApp cannot train "
            "with it; use fedflat deploy init, which creates a suitable app, or an algorithm such as fedavgm or fedadam"
        )
    if any(getattr(average, "part", "all") != "all" for average in parts.averages):
        raise UserError(f"{name} averages only a part of the model, which is unknown here; use part=all")


def _kinds(tensors: Mapping[str, Tensor]) -> dict[str, tuple[tuple[int, ...], bool]]:
    """The shape of every tensor, and whether its values are real numbers rather than integers."""
    return {name: (tuple(tensor.shape), tensor.is_floating_point()) for name, tensor in tensors.items()}
