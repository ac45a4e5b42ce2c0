"""The Ray engine: a cohort is spread over worker processes, each with one core or GPU and a loop or lanes engine.

The driver holds the server's model. The data that all clients of a round read go into Ray's object store once. A worker
trains the clients it is sent, keeps their state, and returns their rows. If the cohort has enough blocks of the
aggregation to keep all workers busy, it returns sums over blocks instead. Sums are taken in cohort order over fixed
blocks, so results do not depend on the number of workers, on which worker trained which client, or on lost workers.
Workers with a GPU always return the sum over the clients they trained, because sending rows would take longer than
training; such sums agree with the others only up to rounding.
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
from fedflat.engines.problem.totals import evaluation_plan, evaluation_result
from fedflat.engines.ray.cluster import Device, choose_device, choose_workers, connect, gpus_per_worker
from fedflat.engines.ray.messages import INITIAL_STATE_VERSION, Broadcast, ProblemSource, WorkerSetup
from fedflat.engines.ray.results import (
    CohortResults,
    RoundContext,
    in_cohort_order,
    most_common_state,
    outcome_from_sums,
)
from fedflat.engines.ray.scheduling import ClientCosts, aggregation_blocks, assign_shares, split_share
from fedflat.engines.ray.state_directory import StateDirectory
from fedflat.engines.ray.worker import problem_facts
from fedflat.engines.ray.worker_pool import WorkerHandle, WorkerPool, WorkItem, worker_pool
from fedflat.engines.round.cohort import CohortWeights, GradientCost, reduce_rows
from fedflat.engines.round.cohort_buffers import Arrays, CohortBuffers, state_to_arrays, to_arrays
from fedflat.engines.round.contract import (
    BLOCK,
    Client,
    ModelState,
    Outcome,
    RemoteState,
    Training,
    weighted_sum,
    weights_by_samples,
)

BLOCKS_PER_WORKER = 4
"""With this many blocks per worker, a worker trains whole blocks and returns only their sums."""


class RayEngine:
    """Trains the clients of a cohort on the workers of a Ray cluster.

    Args:
        problem: model, task and data, in the driver.
        build: for a device, a function that a worker calls to build its problem and engine.
        address: HOST:PORT of a Ray cluster or ``auto``; None starts one on this machine.
        workers: number of workers; by default one per GPU or core.
        device: ``cpu``, ``cuda`` or ``auto``.
        shows_rows: whether every client's row must reach the driver, for in-run measurements.

    Attributes:
        sums_shares: whether a worker sums over all clients it trained, not over whole blocks; equal up to rounding.
        costs: measured cost of clients.
        slowest: seconds that the slowest worker trained in the last round.
        buffers: rows of the last cohort, if they reached the driver.
        states: where the clients' states are.
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
        self.slowest = 0.0
        self.buffers: CohortBuffers | None = None
        self._source = ProblemSource(uuid.uuid4().hex, [self.ray.put(build(self.device))], problem_facts(problem))
        self._training: tuple[Training, str] | None = None
        self._state_version = INITIAL_STATE_VERSION
        self.states = StateDirectory(lambda: self.pool)
        pool = self.pool
        pool.wait_for_all()
        pool.build_problem(self._source)

    @property
    def pool(self) -> WorkerPool:
        """The workers."""
        return worker_pool(self.ray, self.workers, self.device, self.gpus)

    def train(self, training: Training, round: int, model: ModelState, server: States, cohort: list[Client]) -> Outcome:
        """Train a cohort for one round and average what it sends, in cohort order; arguments as in ``Engine.train``."""
        with one_thread():
            z = training.algorithm.broadcast(model.weights, server)  # the model that clients start from
            initial_state = most_common_state(cohort)
            broadcast = self._build_broadcast(training, round, z, server, model, cohort, initial_state)
            context = RoundContext(training, cohort, broadcast, self.ray.put(broadcast), None, initial_state)
            common, gradient_cost = self._common_gradient(context, z)
            if common is not None:
                context = context._replace(gradient_ref=self.ray.put(common.numpy()))
            results = self._train_clients(context, model, z, common, gradient_cost)
            has_rows = bool(results.items[0].result.rows)
            return self._outcome_from_rows(results) if has_rows else outcome_from_sums(results)

    def _build_broadcast(
        self,
        training: Training,
        round: int,
        z: Tensor,
        server: States,
        model: ModelState,
        cohort: list[Client],
        initial_state: Any,
    ) -> Broadcast:
        """Build the message with everything that all clients of a round read, as arrays; a new training gets a new key.

        ``z`` is the model that clients start from [parameters], and ``initial_state`` the state object of first-time
        participants, or None. The other arguments are those of ``train``.
        """
        if self._training is None or self._training[0] is not training:
            self._training, self.buffers = (training, uuid.uuid4().hex), None
        _, training_key = self._training
        self._state_version += 1
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
            state_version=self._state_version,
            initial_state={} if initial_state is None else state_to_arrays(initial_state),
        )

    def _common_gradient(self, context: RoundContext, z: Tensor) -> tuple[Tensor | None, GradientCost]:
        """The mean gradient of the cohort's data at z [parameters], weighted by samples; None if the drift needs none.

        Also returns its cost.
        """
        if context.training.algorithm.drift.full_gradient != "common":
            return None, GradientCost()
        items = self._work_items("full_gradients", context, None)
        self.pool.run(items, self._source)
        rows = torch.empty(len(context.cohort), len(z), dtype=z.dtype)
        for item in items:
            gradients, _ = item.result
            rows.numpy()[item.rows] = gradients
        cost = GradientCost.total([item_cost for _, item_cost in (item.result for item in items)])
        weights = weights_by_samples([len(client.indices) for client in context.cohort])
        return weighted_sum(rows, weights), cost

    def _train_clients(
        self,
        context: RoundContext,
        model: ModelState,
        z: Tensor,
        common: Tensor | None,
        gradient_cost: GradientCost,
    ) -> CohortResults:
        """Train the cohort on the workers; its new states stay there until they are fetched.

        The arguments become fields of the result; ``common`` is the cohort's gradient at z, if the drift needs it.
        """
        training, cohort = context.training, context.cohort
        weights = None
        if self._workers_return_sums(training, len(cohort)):
            weights = CohortWeights.of(training.aggregation, [len(client.indices) for client in cohort])
        items = self._work_items("train", context, weights)
        self.pool.run(items, self._source, meanwhile=self.states.fetch_all)
        self.states.fetch_all()
        self._record_costs(context, items)
        states: list[Any] = [nested_state({})] * len(cohort)
        if flat_fields(training.algorithm.client_fields()):
            rows_by_worker: dict[WorkerHandle, list[int]] = {}
            for item in items:
                assert item.worker is not None
                rows_by_worker.setdefault(item.worker, []).extend(item.rows)
            states = in_cohort_order(
                (rows, self._remote_states(worker, context, rows)) for worker, rows in rows_by_worker.items()
            )
        return CohortResults(context, model, z, common, items, states, gradient_cost)

    def _record_costs(self, context: RoundContext, items: list[WorkItem]) -> None:
        """Record how long clients took, and the time of the slowest worker."""
        samples = _planned_samples(context)
        seconds: Counter[WorkerHandle | None] = Counter()
        for item in items:
            numbers = [context.cohort[row].number for row in item.rows]
            self.costs.record(numbers, [samples[row] for row in item.rows], item.result.seconds)
            seconds[item.worker] += item.result.seconds
        self.slowest = max(seconds.values())

    def _work_items(self, call: str, context: RoundContext, weights: CohortWeights | None) -> list[WorkItem]:
        """Divide the cohort into work items, each planned for a worker, by expected time and by where states are.

        Args:
            call: the worker's method, ``train`` or ``full_gradients``.
            context: training, cohort and broadcast of the round.
            weights: weights of the cohort if workers return sums; None if they return every client's row.
        """
        cohort = context.cohort
        costs = [
            self.costs.expected_seconds(client.number, samples)
            for client, samples in zip(cohort, _planned_samples(context), strict=True)
        ]
        by_block = weights is not None and not self.sums_shares
        # The cohort in groups of rows that stay together: blocks, or single clients.
        groups = aggregation_blocks(len(cohort)) if by_block else [[row] for row in range(len(cohort))]
        group_costs = [sum(costs[row] for row in group) for group in groups]
        workers: list[WorkerHandle | None] = [*self.pool.started_workers] or [None] * self.workers
        state_bytes = 0 if call == "full_gradients" else self._state_bytes(context.training)
        transfers = [
            [sum(self.states.transfer_seconds(cohort[row], worker, state_bytes) for row in group) for worker in workers]
            for group in groups
        ]
        items = []
        for worker, share in zip(workers, assign_shares(group_costs, transfers), strict=True):
            for item_groups in self._split_share(share, group_costs, by_block):
                rows = sorted(row for group in item_groups for row in groups[group])
                items.append(
                    WorkItem(
                        call,
                        self._arguments(call, context, rows, weights, worker, state_bytes),
                        rows,
                        home=worker,
                        seconds=sum(group_costs[group] for group in item_groups),
                        transfer_seconds=sum(max(transfers[group]) for group in item_groups),
                    )
                )
        return items

    def _split_share(self, share: list[int], group_costs: list[float], by_block: bool) -> list[list[int]]:
        """Split a worker's share of the groups into work items, each a list of groups.

        Args:
            share: indices of the worker's groups of rows.
            group_costs: expected seconds of every group.
            by_block: whether groups are blocks of the aggregation, whose sums must be returned separately.
        """
        if by_block:
            return [[group] for group in share]
        if self.sums_shares:  # a worker with a GPU trains the clients of an item side by side
            count = ceil(len(share) / MOST_LANES)
            return [list(map(int, part)) for part in np.array_split(share, count)] if share else []
        if not self.costs.is_measured:  # without knowing its cost, every client may be worth a message
            return split_share(share, group_costs, min_seconds=0.0)
        return split_share(share, group_costs)

    def _arguments(
        self,
        call: str,
        context: RoundContext,
        rows: list[int],
        weights: CohortWeights | None,
        home: WorkerHandle | None,
        state_bytes: int,
    ) -> Callable[[WorkerHandle, bool], tuple[Any, ...]]:
        """The function that computes the arguments of a work item for the worker that runs it (``WorkItem.arguments``).

        The home worker receives missing states directly from other workers, which are asked for them now.

        ``rows`` are the item's rows of the cohort, ``home`` is the worker that it is planned for, and ``state_bytes``
        the size of one client's state, 0 if it is not needed. The other arguments are those of ``_work_items``.
        """
        clients = [context.cohort[row] for row in rows]
        client_weights = None if weights is None else weights.subset(rows)
        broadcast = context.broadcast
        transferred: set[int] = set()
        transfers: list[Any] = []
        if state_bytes:
            transferred, transfers = self.states.request_transfers(clients, home, broadcast, state_bytes)

        def arguments(worker: WorkerHandle, with_state: bool) -> tuple[Any, ...]:
            """Arguments for ``worker``; another one than planned, or one that lacks states, is sent all states."""
            uses_transfers = worker is home and not with_state
            dispatched = []
            for client in clients:
                is_transferred = uses_transfers and client.number in transferred
                dispatched.append(
                    self.states.dispatch(client, worker, broadcast, context.initial_state, with_state, is_transferred)
                )
            if call == "full_gradients":
                return context.broadcast_ref, dispatched
            received = transfers if uses_transfers else []
            return context.broadcast_ref, context.gradient_ref, dispatched, client_weights, False, *received

        return arguments

    def _state_bytes(self, training: Training) -> int:
        """Size of one client's state in bytes."""
        fields = flat_fields(training.algorithm.client_fields()).values()
        numbers = sum(field.scalars(self.problem.layout.size) for field in fields)
        return numbers * torch.finfo(self.problem.dtype).bits // 8

    def _remote_states(self, worker: WorkerHandle, context: RoundContext, rows: list[int]) -> list[RemoteState]:
        """References to the new states of the clients in ``rows``, which stay with the worker that trained them."""
        clients = [context.cohort[row] for row in rows]

        def retrain() -> tuple[WorkerHandle, Arrays]:
            """Train the clients again from their previous states; returns the worker and the new states as rows."""

            def arguments(worker: WorkerHandle, with_state: bool) -> tuple[Any, ...]:
                """Arguments of ``Worker.train``: always with the states, and returning the new ones."""
                broadcast = context.broadcast
                dispatched = [self.states.dispatch(client, worker, broadcast, None, True) for client in clients]
                return context.broadcast_ref, context.gradient_ref, dispatched, None, True

            item = WorkItem("train", arguments)
            self.pool.run_now(item, self._source)
            assert item.worker is not None
            return item.worker, item.result.state

        return self.states.record_trained(worker, context.broadcast, clients, retrain)

    def _workers_return_sums(self, training: Training, count: int) -> bool:
        """Whether workers return sums over a cohort of ``count`` clients; if not, they return every client's row."""
        has_enough_blocks = self.sums_shares or count >= BLOCK * BLOCKS_PER_WORKER * self.workers
        return has_enough_blocks and not self.shows_rows and not training.aggregation.needs_rows

    def _outcome_from_rows(self, results: CohortResults) -> Outcome:
        """The outcome of a round in which workers returned every client's row: copies the rows and averages them."""
        training, cohort = results.context.training, results.context.cohort
        if self.buffers is None or self.buffers.rows < len(cohort):
            sizes = self.problem.layout.size, self.problem.buffers.size
            self.buffers = CohortBuffers.new(training.algorithm, *sizes, len(cohort), results.z)
        buffers = self.buffers
        for item in results.items:
            # Through numpy, which copies from the object store only once.
            rows = item.result.rows
            buffers.displacement.numpy()[item.rows] = rows["displacement"]
            buffers.buffers.numpy()[item.rows] = rows["buffers"]
            for name, sent in buffers.sent.items():
                sent.numpy()[item.rows] = rows[f"sent/{name}"]
        if results.common_gradient is not None:
            buffers.common_gradient.copy_(results.common_gradient)
        return reduce_rows(
            training,
            results.context.broadcast.round,
            results.model,
            results.z,
            buffers,
            cohort,
            results.reports,
            results.gradient_cost,
            results.states,
        )

    def prepare(self, training: Training, round: int, cohort: list[tuple[int, np.ndarray]]) -> None:
        """Does nothing: workers draw their batches themselves."""

    def evaluate(
        self, models: dict[str, ModelState], examples: dict[str, Examples]
    ) -> dict[str, dict[str, dict[str, float]]]:
        """Metrics of every model on every set of examples; sets other than the problem's own are evaluated here."""
        problem = self.problem
        if examples is not problem.held_out:
            return LoopEngine(problem, 1).evaluate(models, examples)
        plan = evaluation_plan(problem, len(models), examples)
        batches = [(batch.model, batch.examples, batch.positions.numpy()) for batch in plan]
        calls = min(len(batches), 2 * self.workers)  # two per worker, so that fast workers can do more
        arrays = [
            (model.weights.numpy(), model.buffers.numpy(), to_arrays(model.integer_buffers))
            for model in models.values()
        ]
        models_ref = self.ray.put(arrays)
        # Call i evaluates the batches i, i + calls, i + 2 calls, ...
        answers = self.pool.map("evaluate", [(models_ref, batches[i::calls]) for i in range(calls)], self._source)
        sums: list[Any] = [None] * len(batches)
        for i, answer in enumerate(answers):
            sums[i::calls] = [{name: np.array(value) for name, value in batch_sums.items()} for batch_sums in answer]
        return evaluation_result(problem.task, plan, sums, list(models), examples)


def _planned_samples(context: RoundContext) -> list[int]:
    """Examples that each client of the cohort sees if it completes all its steps."""
    return [context.training.plan.samples(len(client.indices)) for client in context.cohort]
