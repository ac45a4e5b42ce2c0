"""The Ray engine: a cohort is spread over worker processes, each with one core or GPU and a loop or lanes engine.

The driver, which runs the experiment, holds the server's model. What all clients of a round read is put into Ray's
object store once per round. A worker trains the clients it is sent, leaves their states in the object store of its
node, and returns what they send to the server, either as one row per client or as sums of these rows.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable
from math import ceil
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedflat.algorithms.algorithm import States, flat_fields, flat_state, nested_state
from fedflat.data import Examples
from fedflat.engines.cpu.engine import LoopEngine, one_thread
from fedflat.engines.gpu.engine import MOST_LANES
from fedflat.engines.problem.problem import Problem
from fedflat.engines.problem.task import evaluation_plan, evaluation_result
from fedflat.engines.ray.cluster import Device, choose_device, choose_workers, connect, gpus_per_worker
from fedflat.engines.ray.messages import Broadcast, DispatchedClient, ProblemSource, WorkerSetup
from fedflat.engines.ray.results import (
    CohortResults,
    RoundContext,
    most_common_state,
    outcome_from_sums,
    outcomes_from_rows,
)
from fedflat.engines.ray.scheduling import (
    MIN_ITEM_SECONDS,
    ClientCosts,
    WorkerHandle,
    WorkItem,
    WorkQueue,
    aggregation_blocks,
)
from fedflat.engines.ray.states import (
    SHARE_OF_OBJECT_STORE,
    Place,
    StoredState,
    StoredStates,
    client_state_bytes,
    stored_states,
)
from fedflat.engines.ray.worker import problem_facts
from fedflat.engines.ray.worker_pool import WorkerPool, worker_pool
from fedflat.engines.round.aggregation import BLOCK, CohortWeights, weighted_sum, weights_by_samples
from fedflat.engines.round.cohort_buffers import CohortBuffers, state_to_arrays, to_arrays
from fedflat.engines.round.contract import Client, Cost, ModelState, Outcome, RoundStart, Training

BLOCKS_PER_WORKER = 4
"""From this many blocks of ``BLOCK`` clients per worker on, workers train whole blocks and return only their sums."""
SECONDS_PER_BYTE = 1e-9
"""Assumed seconds to move a byte between two nodes."""


class RayEngine:
    """Trains the clients of a cohort on the workers of a Ray cluster; the driver runs the experiment.

    A client's row is what it sends in a round: its displacement (trained minus received weights), its BatchNorm
    statistics and the algorithm's messages. The driver adds rows in fixed blocks of clients, so that rounding never
    depends on the workers. In large cohorts, workers train whole blocks and return one sum per block instead of rows.

    Args:
        problem: model, task and data, in the driver.
        build: returns, for a device, the function with which a worker builds its problem and engine.
        address: HOST:PORT of a Ray cluster or ``auto``; None starts one on this machine.
        workers: number of workers; by default one per GPU or core.
        device: ``cpu``, ``cuda`` or ``auto``.
        shows_rows: whether every client's row must reach the driver, for in-run measurements.

    Attributes:
        sums_shares: whether a worker returns one sum over all clients it trained instead of sums over blocks; true on
            GPUs, where sending rows would take longer than training. These sums differ from sums over blocks in
            rounding. Rows of several groups of clients are always sent.
        costs: measured cost of clients.
        cohort_buffers: rows of the last cohort, if they reached the driver.
        states: records which node has the state of each client, i.e. what the client keeps between rounds.
    """

    def __init__(
        self,
        problem: Problem,
        build: Callable[[Device], Callable[[], WorkerSetup]],
        *,
        address: str | None = None,
        workers: int | None = None,
        device: str = "auto",
        shows_rows: bool = False,
    ) -> None:
        """Connect to the cluster and start the workers; each builds its problem and engine with ``build(device)``."""
        self.problem = problem
        self.shows_rows = shows_rows
        self.ray = connect(address, workers)
        self.device = choose_device(self.ray, device)
        self.workers = choose_workers(self.ray, workers, self.device)
        self.gpus = gpus_per_worker(self.ray, self.workers) if self.device == "cuda" else 0.0
        self.sums_shares = self.device == "cuda"
        self.costs = ClientCosts()
        self.cohort_buffers: CohortBuffers | None = None
        self._source = ProblemSource(uuid.uuid4().hex, [self.ray.put(build(self.device))], problem_facts(problem))
        self._training: tuple[Training, str] | None = None  # the training of the last round, and its unique key
        max_state_bytes = SHARE_OF_OBJECT_STORE * self.ray.cluster_resources()["object_store_memory"]
        self.states = StoredStates(lambda: self.pool, self._retrain, max_state_bytes)
        pool = self.pool  # starts the workers
        pool.wait_for_all()
        pool.build_problem(self._source)

    @property
    def pool(self) -> WorkerPool:
        """The workers; started, or started again, if this process has no pool of this kind."""
        return worker_pool(self.ray, self.workers, self.device, self.gpus)

    def train(self, training: Training, round: int, model: ModelState, server: States, cohort: list[Client]) -> Outcome:
        """Train a cohort for one round on the workers, and average what it sends, in cohort order."""
        return self.train_groups(training, round, model, server, [cohort])[0]

    def train_groups(
        self, training: Training, round: int, model: ModelState, server: States, groups: list[list[Client]]
    ) -> list[Outcome]:
        """Train several groups of clients together on the workers, and average what each group sends."""
        cohort = [client for group in groups for client in group]
        with one_thread():
            start = RoundStart.of(training, round, model, server)
            initial_state = most_common_state(cohort)
            broadcast = self._build_broadcast(start, cohort, initial_state)
            context = RoundContext(training, cohort, broadcast, self.ray.put(broadcast), None, initial_state)
            common_gradient, gradient_cost = self._common_gradient(context, start.z)
            if common_gradient is not None:
                context = context._replace(gradient_ref=self.ray.put(common_gradient.numpy()))
            weights = None
            if len(groups) == 1 and self._workers_return_sums(training, len(cohort)):
                weights = CohortWeights.of(training.aggregation, [len(client.indices) for client in cohort])
            items, states = self._train_clients(context, weights)
            results = CohortResults(context, start, common_gradient, items, states, gradient_cost)
            if weights is None:
                return outcomes_from_rows(results, self._buffers_for(results), groups)
            return [outcome_from_sums(results)]

    def _build_broadcast(self, start: RoundStart, cohort: list[Client], initial_state: Any) -> Broadcast:
        """Build the message with everything that all clients of a round read, as arrays.

        ``initial_state`` is the state object of first-time participants, or None.
        """
        training, round, model, server, z = start
        if self._training is None or self._training[0] is not training:
            # A new run with this engine: its states get a new key, and its rows may have other fields.
            self._training, self.cohort_buffers = (training, uuid.uuid4().hex), None
        _, training_key = self._training
        received = {name for name, field in flat_fields(training.algorithm.server_fields()).items() if field.sent}
        return Broadcast(
            training_key=training_key,
            training=training,
            round=round,
            z=z.numpy(),
            server=to_arrays({name: value for name, value in flat_state(server).items() if name in received}),
            buffers=model.buffers.numpy(),
            integer_buffers=to_arrays(model.integer_buffers),
            count=len(cohort),
            initial_state={} if initial_state is None else state_to_arrays(initial_state),
        )

    def _common_gradient(self, context: RoundContext, z: Tensor) -> tuple[Tensor | None, Cost]:
        """The gradient of the mean loss over the cohort's data at z, the model that clients start from.

        Returns:
            The gradient [parameters], weighted by the clients' samples, or None if the drift correction does not need
            it; and its cost.
        """
        # "common": the drift needs this gradient; "own": one per client, which train_client computes; "none"
        if context.training.algorithm.drift.full_gradient != "common":
            return None, Cost()
        items = self._run("full_gradients", context, weights=None)
        gradients = torch.empty(len(context.cohort), len(z), dtype=z.dtype)  # one row per client
        costs = []
        for item in items:
            rows, cost = item.result
            gradients.numpy()[item.rows] = rows  # torch would warn that they are read-only
            costs.append(cost)
        weights = weights_by_samples([len(client.indices) for client in context.cohort])
        return weighted_sum(gradients, weights), sum(costs, Cost())

    def _train_clients(self, context: RoundContext, weights: CohortWeights | None) -> tuple[list[WorkItem], list[Any]]:
        """Train the cohort on the workers, which return sums if ``weights`` are given, and otherwise every row.

        Returns the work items and the clients' new states, which stay on the workers' nodes until they are fetched.
        """
        # The driver fetches the last round's states while the workers train, or at the latest after that.
        items = self._run("train", context, weights, meanwhile=self.states.fetch_all)
        self.states.fetch_all()
        self._record_costs(context, items)
        count, state_bytes = len(context.cohort), client_state_bytes(context.training, self.problem)
        if not state_bytes:
            return items, [nested_state({})] * count
        return items, list(self.states.record(context, stored_states(items, count), state_bytes))

    def _record_costs(self, context: RoundContext, items: list[WorkItem]) -> None:
        """Record how long clients took."""
        samples = context.planned_samples()
        for item in items:
            numbers = [context.cohort[row].number for row in item.rows]
            self.costs.record(numbers, [samples[row] for row in item.rows], item.result.seconds)

    def _run(
        self,
        call: str,
        context: RoundContext,
        weights: CohortWeights | None,
        meanwhile: Callable[[], None] | None = None,
    ) -> list[WorkItem]:
        """Let the workers train the cohort, and return the work items with their results, in any order.

        Clients that must be trained by the same worker form a group, and a worker takes some groups at a time.

        Args:
            call: the worker's method, ``train`` or ``full_gradients``.
            context: training, cohort and broadcast of the round.
            weights: weights of the cohort if workers return sums; None if they return every client's row.
            meanwhile: called once while the workers are busy.
        """
        cohort = context.cohort
        # A worker that sums blocks needs whole blocks; otherwise every client is a group of its own.
        by_block = weights is not None and not self.sums_shares
        groups = aggregation_blocks(len(cohort)) if by_block else [[row] for row in range(len(cohort))]
        item_groups = 1 if by_block else None
        if self.sums_shares:  # a worker with a GPU trains the clients of an item side by side, up to MOST_LANES
            items_per_worker = ceil(len(groups) / (self.workers * MOST_LANES))
            item_groups = ceil(len(groups) / (self.workers * items_per_worker))
        samples = context.planned_samples()
        costs = [self.costs.expected_seconds(client.number, n) for client, n in zip(cohort, samples, strict=True)]
        state_bytes = client_state_bytes(context.training, self.problem)
        queue = WorkQueue(
            [sum(costs[row] for row in group) for group in groups],
            lambda taken: self._work_item(call, context, weights, [row for group in taken for row in groups[group]]),
            self.workers,
            [common_node([cohort[row] for row in group]) for group in groups],
            transfer_seconds=state_bytes * len(groups[0]) * SECONDS_PER_BYTE,
            item_groups=item_groups,
            # Without knowing its cost, every client may be worth a message.
            min_seconds=MIN_ITEM_SECONDS if self.costs.is_measured else 0.0,
        )
        return self.pool.run(queue, self._source, meanwhile)

    def _work_item(self, call: str, context: RoundContext, weights: CohortWeights | None, rows: list[int]) -> WorkItem:
        """The call that trains the clients in some rows of the cohort; the other arguments are those of ``_run``."""
        clients = [context.cohort[row] for row in rows]
        client_weights = None if weights is None else weights.subset(rows)

        def arguments(worker: WorkerHandle) -> tuple[Any, ...]:
            places, states = self.states.arguments(clients, worker, context.initial_state)
            messages = [
                DispatchedClient(c.number, c.indices, None if c.statistics is None else c.statistics.numpy(), place)
                for c, place in zip(clients, places, strict=True)
            ]
            if call == "full_gradients":
                return context.broadcast_ref, messages, *states
            return context.broadcast_ref, context.gradient_ref, messages, client_weights, *states

        returns_states = call == "train" and bool(flat_fields(context.training.algorithm.client_fields()))
        return WorkItem(call, arguments, rows, returns_states, lambda: self.states.restore(clients))

    def _retrain(self, context: RoundContext, clients: list[Client]) -> list[Place]:
        """Train some clients of a past round again, because their new states were lost.

        Returns the place of each client's new state.
        """
        items = self._run("train", context._replace(cohort=clients), weights=None)
        return stored_states(items, len(clients))

    def _workers_return_sums(self, training: Training, count: int) -> bool:
        """Whether workers return sums over clients instead of every client's row, for a cohort of ``count`` clients."""
        has_enough_blocks = self.sums_shares or count >= BLOCK * BLOCKS_PER_WORKER * self.workers
        needs_rows = training.aggregation.needs_rows or training.algorithm.weights.are_chosen
        return has_enough_blocks and not self.shows_rows and not needs_rows

    def _buffers_for(self, results: CohortResults) -> CohortBuffers:
        """Buffers for the rows of a cohort: those of earlier rounds if they are large enough."""
        cohort_size = len(results.context.cohort)
        if self.cohort_buffers is None or self.cohort_buffers.rows < cohort_size:
            sizes = self.problem.layout.size, self.problem.buffer_layout.size
            self.cohort_buffers = CohortBuffers.new(
                results.context.training.algorithm, *sizes, cohort_size, results.start.z
            )
        return self.cohort_buffers

    def prepare(self, training: Training, round: int, clients: list[tuple[int, np.ndarray]]) -> None:
        """Do nothing: workers draw their batches themselves."""

    def evaluate(
        self, models: dict[str, ModelState], examples: dict[str, Examples]
    ) -> dict[str, dict[str, dict[str, float]]]:
        """Return the metrics of every model on every set of examples: model -> set -> metric -> value."""
        problem = self.problem
        if examples is not problem.evaluation_sets:  # workers only have the problem's own sets, so evaluate here
            return LoopEngine(problem, 1).evaluate(models, examples)
        plan = evaluation_plan(problem, len(models), examples)
        batches = [(batch.model, batch.examples, batch.positions.numpy()) for batch in plan]
        calls = min(len(batches), 2 * self.workers)  # two per worker, so that fast workers can do more
        arrays = [(torch.cat([m.weights, m.buffers]).numpy(), to_arrays(m.integer_buffers)) for m in models.values()]
        models_ref = self.ray.put(arrays)
        # Call i evaluates the batches i, i + calls, i + 2 calls, ...
        answers = self.pool.map("evaluate", [(models_ref, batches[i::calls]) for i in range(calls)], self._source)
        sums: list[Any] = [None] * len(batches)
        for i, answer in enumerate(answers):
            sums[i::calls] = [{name: np.array(value) for name, value in batch_sums.items()} for batch_sums in answer]
        return evaluation_result(problem.task, plan, sums, list(models), examples)


def common_node(clients: list[Client]) -> str:
    """The node whose object store has the states of most of some clients; empty if none has any."""
    nodes = Counter(c.state.place.node for c in clients if isinstance(c.state, StoredState) and c.state.place)
    return nodes.most_common(1)[0][0] if nodes else ""
