"""A Flower strategy for an existing ServerApp: fedflat's server steps, averages and robust aggregation.

The clients of some algorithms train with plain SGD, so that any ClientApp suits them. Those of the others need the
decorator of ``local_steps``, which reads what this strategy adds to its messages.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Result
from torch import Tensor

from fedflat.algorithms import Algorithm, algorithm, canonical
from fedflat.algorithms.algorithm import flat_state, nested_state
from fedflat.algorithms.descent import Descent
from fedflat.algorithms.lr_schedule import Schedule
from fedflat.averaging.base import AverageState, RunInfo
from fedflat.deploy.flower.wire import array_record, broadcast_state, tensors_of
from fedflat.deploy.local_steps import (
    INITIAL,
    LR_SUM,
    NAME,
    ROUND,
    ROUNDS,
    SENT,
    SERVER_STATE,
    SETTINGS,
    STATE_VERSION,
    STATISTICS,
    sent_fields,
    starts_at_initial_model,
    weight_layout,
)
from fedflat.engines.round.aggregation import Aggregation, Centre
from fedflat.engines.round.client import ClientReport
from fedflat.engines.round.cohort import reduce_rows
from fedflat.engines.round.cohort_buffers import CohortBuffers
from fedflat.engines.round.contract import Client, Cost, ModelState, RoundStart, Training
from fedflat.engines.round.plan import Plan
from fedflat.errors import UserError
from fedflat.models.layout import Layout

log = logging.getLogger("flwr")
CLIENT_SLOTS = ("drift", "perturbation", "local_optimiser", "start")
"""Slots whose components, unless they are the default, change what clients do."""
UNDECORATED = "its ClientApp trains with SGD; decorate the ClientApp's training function with fedflat.deploy.client"


class ClientUpdate(NamedTuple):
    """What a client returned: its number of examples, model, sum of learning rates, and messages by full name."""

    examples: int
    model: ModelState
    lr_sum: float
    sent: dict[str, Tensor]


class Strategy(FedAvg):
    """A Flower strategy that aggregates like a fedflat algorithm.

    If the algorithm's clients train with plain SGD, the ClientApp stays unchanged: it receives the model, trains it,
    and returns the arrays and ``num-examples``. For other algorithms, such as SCAFFOLD or FedSAM, its training function
    needs the decorator ``fedflat.deploy.client``. The ClientApp chooses the learning rate; the algorithm's schedule
    applies only with the decorator. If the algorithm has averages, the last of them is evaluated and returned; clients
    train from the server model.

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
        """Raise a ``UserError`` if the algorithm needs more than the messages and steps of a Flower app."""
        super().__init__(**options)
        self.algorithm = algorithm(name)
        self.name = canonical(self.algorithm)
        _require_suitable(self.name, self.algorithm, aggregation)
        self._needs_decorator = any(
            getattr(self.algorithm, slot) != getattr(Algorithm(), slot) for slot in CLIENT_SLOTS
        )
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
        tensors = tensors_of(initial)
        self._kinds, self._dtypes = _kinds(tensors), {name: tensor.dtype for name, tensor in tensors.items()}
        self._layout = weight_layout(tensors)
        statistics = {name: t for name, t in tensors.items() if t.is_floating_point() and name.endswith(STATISTICS)}
        self._buffer_layout = Layout.of(statistics)
        self._model = self._split(tensors)
        x = self._model.weights
        self._initial_weights = x
        self._accepted: dict[int, int] = {}  # by node: the number of the last round whose update was accepted, from 1
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
        """Send the nodes of the round the model to start from, and what the decorator ``client`` needs."""
        self._nodes = len(list(grid.get_node_ids()))
        flat = torch.cat([self._model.weights, self._model.buffers])
        for average in self._averages:
            average.before_round(server_round - 1, flat)
        self._z = self.algorithm.broadcast(self._model.weights, self._states)
        arrays = self._record(self._model._replace(weights=self._z))
        state = broadcast_state(self.algorithm, self._states)
        if starts_at_initial_model(self.algorithm):
            state[INITIAL] = self._initial_weights
        extra = {SERVER_STATE: array_record(state)} if state else {}  # messages to unchanged ClientApps have one record
        settings = {NAME: self.name, ROUND: server_round - 1, ROUNDS: self._training.schedule.rounds}
        messages: list[Message] = list(super().configure_train(server_round, arrays, config, grid))
        for message in messages:
            version = self._accepted.get(message.metadata.dst_node_id, 0)
            settings_record = ConfigRecord({**settings, STATE_VERSION: version})
            message.content = RecordDict({**message.content, **extra, SETTINGS: settings_record})
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
        valid, _ = self._check_and_log_replies(replies, is_train=True, validate=False)  # one node must not end the run
        updates, contents, problems = [], [], []
        for reply in sorted(valid, key=lambda reply: reply.metadata.src_node_id):  # not in the order of arrival
            tensors = {name: t for r in reply.content.array_records.values() for name, t in tensors_of(r).items()}
            metrics = {name: v for r in reply.content.metric_records.values() for name, v in r.items()}
            sent = {name.removeprefix(SENT): tensors.pop(name) for name in list(tensors) if name.startswith(SENT)}
            examples: Any = metrics.get(self.weighted_by_key)
            problem = self._problem(tensors, sent, examples)
            if problem:
                log.warning("ignoring node %d: %s", reply.metadata.src_node_id, problem)
                problems.append(problem)
                continue
            lr_sum = float(sent.pop(LR_SUM, 1.0))  # plain SGD: no part of the algorithm uses it
            updates.append(ClientUpdate(int(examples), self._split(tensors), lr_sum, sent))
            contents.append(reply.content)
            self._accepted[reply.metadata.src_node_id] = server_round
        if not updates:
            if UNDECORATED in problems:
                raise UserError(f"no client can train with {self.name}: {UNDECORATED}, or use fedavgm or fedadam")
            return None, None
        self._step(server_round - 1, updates)
        return self._record(self._model), self.train_metrics_aggr_fn(contents, self.weighted_by_key)

    def _problem(self, tensors: Mapping[str, Tensor], sent: Mapping[str, Tensor], examples: Any) -> str | None:
        """Why a reply cannot be used, or None; ``sent`` are the messages that the decorator added, by full name."""
        if self._needs_decorator and not sent:
            return UNDECORATED
        if not isinstance(examples, int | float) or not 1 <= examples <= 1e15:
            return f"{self.weighted_by_key} is {examples}; expected 1 to 1e15"
        if _kinds(tensors) != self._kinds:
            return "its arrays differ from the model's in names, shapes or types; return the whole state_dict"
        fields = sent_fields(self.algorithm)
        vector, number = (self._layout.size,), ()
        if sent and _kinds(sent) != {name: (vector if f.vector else number, True) for name, f in fields.items()}:
            return f"its messages are not those of {self.name}; install the server's version of fedflat on the node"
        if not all(tensor.isfinite().all() for tensor in (*tensors.values(), *sent.values())):
            return "its arrays contain values that are not finite"
        if sent and sent[LR_SUM] <= 0:
            return "the sum of its learning rates is not positive"
        return None

    def _step(self, round: int, updates: Sequence[ClientUpdate]) -> None:
        """Update model, server state and averages from the clients' updates; ``round`` counts from 0."""
        model, count = self._model, len(updates)
        cohort_buffers = CohortBuffers.new(self.algorithm, len(model.weights), len(model.buffers), count, model.weights)
        state = nested_state({})
        for row, update in enumerate(updates):
            cohort_buffers.displacement[row] = update.model.weights - self._z
            cohort_buffers.statistics[row] = update.model.buffers
            measured = flat_state({"server": self.algorithm.server.measure(cohort_buffers.displacement[row])})
            for name, value in {**update.sent, **measured}.items():
                cohort_buffers.sent[name][row] = value
        positions = [np.broadcast_to(0, update.examples) for update in updates]  # only their number counts
        cohort = [Client(row, indices, state) for row, indices in enumerate(positions)]
        reports = [ClientReport(update.lr_sum, 0.0, 1, 0, 0, update.model.integer_buffers) for update in updates]
        training = replace(self._training, clients=max(self._nodes, count))
        start = RoundStart(training, round, model, self._states, self._z)
        outcome = reduce_rows(start, cohort_buffers, cohort, reports, Cost())
        weights, self._states = self.algorithm.aggregate(outcome.cohort_means, outcome.message_means, self._states)
        self._model = ModelState(weights, outcome.buffers, outcome.integer_buffers)
        flat = torch.cat([weights, outcome.buffers])
        for average in self._averages:
            average.update(round, flat)

    def _split(self, tensors: Mapping[str, Tensor]) -> ModelState:
        """Named tensors as vectors of weights and BatchNorm statistics, at least in float32."""
        floats = {name: t.to(torch.promote_types(t.dtype, torch.float32)) for name, t in tensors.items()}
        others = {name: t for name, t in tensors.items() if not t.is_floating_point()}
        return ModelState(self._layout.flatten(floats), self._buffer_layout.flatten(floats), others)

    def _record(self, model: ModelState) -> ArrayRecord:
        """The inverse of ``_split``, with the data types of the initial arrays."""
        views = self._layout.views(model.weights) | self._buffer_layout.views(model.buffers) | model.integer_buffers
        return array_record({name: views[name].to(dtype) for name, dtype in self._dtypes.items()})


def _require_suitable(name: str, parts: Algorithm, aggregation: Centre) -> None:
    """Raise a ``UserError`` if an algorithm needs more than the messages and local steps of a Flower app."""
    needs = {
        "the gradient of all of a client's data before its first step": parts.drift.full_gradient != "none",
        "gradients of further batches before the first step": parts.perturbation.pilot_batches,
        "the logits of a teacher": parts.needs_teacher,
        "client weights that the server chooses": parts.weights != Algorithm().weights,
    }
    reason = next((reason for reason, is_needed in needs.items() if is_needed), None)
    if reason:
        raise UserError(
            f"{name} needs {reason}, which an existing ClientApp cannot provide; use fedflat deploy init, which "
            "creates a suitable app, or another algorithm, such as scaffold or fedsam"
        )
    conflict = next(filter(None, (slot.robust_aggregation_conflict() for _, slot in parts.slots())), None)
    if aggregation != "mean" and conflict:
        raise UserError(f"aggregation={aggregation} does not work with {name}: {conflict}; use aggregation='mean'")
    if any(getattr(average, "part", "all") != "all" for average in parts.averages):
        raise UserError(f"{name} averages only a part of the model, which is unknown here; use part=all")


def _kinds(tensors: Mapping[str, Tensor]) -> dict[str, tuple[tuple[int, ...], bool]]:
    """The shape of every tensor, and whether its values are real numbers rather than integers."""
    return {name: (tuple(tensor.shape), tensor.is_floating_point()) for name, tensor in tensors.items()}
