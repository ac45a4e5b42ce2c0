"""The Ray engine: a cohort is spread over worker processes, each with one core or GPU and a loop or lanes engine.

The driver holds the server's model. What all clients of a round read goes into Ray's object store once. A worker trains
the clients it is sent, keeps their state, and returns their rows. If the cohort has enough blocks of the aggregation to
keep all workers busy, it returns sums over blocks instead. Sums are taken in cohort order over fixed blocks, so results
do not depend on the number of workers, on who trained whom, or on lost workers. Workers with a GPU always return sums
of what they trained, because sending rows would take longer than training; these sums are equal to others only up to
rounding.
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
from fedflat.engines.ray.cluster import Device, connect, device_for, gpus_each, workers_for
from fedflat.engines.ray.messages import FRESH, Broadcast, ProblemSource, WorkerSetup
from fedflat.engines.ray.results import (
    CohortResults,
    RoundContext,
    in_cohort_order,
    most_common_state,
    outcome_from_sums,
)
from fedflat.engines.ray.scheduling import LEAST, PIECES, ClientCosts, blocks_of, pieces_of, shares_of
from fedflat.engines.ray.state_directory import StateDirectory
from fedflat.engines.ray.worker import facts
from fedflat.engines.ray.worker_pool import WorkerHandle, WorkerPool, WorkItem, worker_pool
from fedflat.engines.round.cohort import Arrays, CohortBuffers, CohortWeights, reduce_rows, state_to_arrays
from fedflat.engines.round.contract import (
    BLOCK,
    Client,
    ModelState,
    Outcome,
    RemoteState,
    Training,
    by_samples,
    weighted_sum,
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
        sums_shares: whether a worker sums whatever it was given, not only whole blocks; equal only up to rounding.
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
        self.problem = problem
        self.shows_rows = shows_rows
        self.ray = connect(address, workers)
        self.device = device_for(self.ray, device)
        self.workers = workers_for(self.ray, workers, self.device)
        self.gpus = gpus_each(self.ray, self.workers) if self.device == "cuda" else 0.0
        self.sums_shares = self.device == "cuda"
        self.costs = ClientCosts()
        self.slowest = 0.0
        self.buffers: CohortBuffers | None = None
        self._source = ProblemSource(uuid.uuid4().hex, [self.ray.put(build(self.device))], facts(problem))
        self._training: tuple[Training, str] | None = None
        self._stamp = FRESH
        self.states = StateDirectory(lambda: self.pool)
        pool = self.pool
        pool.wait_for_all()
        pool.open(self._source)

    @property
    def pool(self) -> WorkerPool:
        """The workers."""
        return worker_pool(self.ray, self.workers, self.device, self.gpus)

    def train(self, training: Training, round: int, model: ModelState, server: States, cohort: list[Client]) -> Outcome:
        """Train a cohort for one round and average what it sends, in cohort order."""
        with one_thread():
            z = training.algorithm.broadcast(model.weights, server)
            fresh = most_common_state(cohort)
            broadcast = self._broadcast(training, round, z, server, model, cohort, fresh)
            context = RoundContext(training, cohort, broadcast, self.ray.put(broadcast), None, fresh)
            common, extra_cost = self._common_gradient(context, z)
            if common is not None:
                context = context._replace(gradient_ref=self.ray.put(common.numpy()))
            results = self._train_clients(context, model, z, common, extra_cost)
            return self._from_rows(results) if results.parts[0].rows else outcome_from_sums(results)

    def _broadcast(
        self,
        training: Training,
        round: int,
        z: Tensor,
        server: States,
        model: ModelState,
        cohort: list[Client],
        fresh: Any,
    ) -> Broadcast:
        if self._training is None or self._training[0] is not training:
            self._training, self.buffers = (training, uuid.uuid4().hex), None
        self._stamp += 1
        received = {name for name, field in flat_fields(training.algorithm.server_fields()).items() if field.sent}
        return Broadcast(
            key=self._training[1],
            training=training,
            round=round,
            z=z.numpy(),
            server={name: value.numpy() for name, value in flat_state(server).items() if name in received},
            buffers=model.buffers.numpy(),
            integers={name: value.numpy() for name, value in model.integers.items()},
            count=len(cohort),
            stamp=self._stamp,
            fresh={} if fresh is None else state_to_arrays(fresh),
        )

    def _common_gradient(self, context: RoundContext, z: Tensor) -> tuple[Tensor | None, tuple[int, int]]:
        """The cohort's gradient at z [parameters], if the algorithm has one, with its backward passes and samples."""
        if context.training.algorithm.drift.full_gradient != "common":
            return None, (0, 0)
        units, items = self._work_items("gradients", context, None)
        self.pool.run(items, self._source)
        rows = torch.empty(len(context.cohort), len(z), dtype=z.dtype)
        passes = samples = 0
        for unit, item in zip(units, items, strict=True):
            gradients, unit_passes, unit_samples = item.result
            rows.numpy()[unit] = gradients
            passes, samples = passes + unit_passes, samples + unit_samples
        weights = by_samples([len(client.indices) for client in context.cohort])
        return weighted_sum(rows, weights), (passes, samples)

    def _train_clients(
        self,
        context: RoundContext,
        model: ModelState,
        z: Tensor,
        common: Tensor | None,
        extra_cost: tuple[int, int],
    ) -> CohortResults:
        training, cohort = context.training, context.cohort
        weights = None
        if self._takes_sums(training, len(cohort)):
            weights = CohortWeights.of(training.aggregation, [len(client.indices) for client in cohort])
        units, items = self._work_items("train", context, weights)
        self.pool.run(items, self._source, self.states.fetch_all)
        self.states.fetch_all()
        self._measure(context, units, items)
        states: list[Any] = [nested_state({})] * len(cohort)
        if flat_fields(training.algorithm.client_fields()):
            by_worker: dict[WorkerHandle, list[int]] = {}
            for unit, item in zip(units, items, strict=True):
                assert item.worker is not None
                by_worker.setdefault(item.worker, []).extend(unit)
            remote = [self._remote_states(worker, context, rows) for worker, rows in by_worker.items()]
            states = in_cohort_order(list(by_worker.values()), remote)
        parts = [item.result for item in items]
        return CohortResults(context, model, z, common, units, parts, states, extra_cost)

    def _measure(self, context: RoundContext, units: list[list[int]], items: list[WorkItem]) -> None:
        samples = _samples(context)
        seconds: Counter[WorkerHandle | None] = Counter()
        for unit, item in zip(units, items, strict=True):
            numbers = [context.cohort[row].number for row in unit]
            self.costs.measured(numbers, [samples[row] for row in unit], item.result.seconds)
            seconds[item.worker] += item.result.seconds
        self.slowest = max(seconds.values())

    def _work_items(
        self, call: str, context: RoundContext, weights: CohortWeights | None
    ) -> tuple[list[list[int]], list[WorkItem]]:
        """Split the cohort into units, each with a work item for the worker that has its states or has time."""
        costs = [
            self.costs.expected(client.number, samples)
            for client, samples in zip(context.cohort, _samples(context), strict=True)
        ]
        by_block = weights is not None and not self.sums_shares
        groups = blocks_of(len(costs)) if by_block else [[row] for row in range(len(costs))]
        loads = [sum(costs[row] for row in group) for group in groups]
        workers: list[WorkerHandle | None] = [*self.pool.present] or [None] * self.workers
        size = 0 if call == "gradients" else self._state_bytes(context.training)
        moving = [
            [sum(self.states.moving(context.cohort[row], worker, size) for row in group) for worker in workers]
            for group in groups
        ]
        units: list[list[int]] = []
        items = []
        for worker, share in zip(workers, shares_of(loads, moving), strict=True):
            for piece in self._pieces(share, loads, by_block):
                units.append(sorted(row for index in piece for row in groups[index]))
                arguments = self._arguments(call, context, units[-1], weights, worker, size)
                seconds, away = sum(loads[index] for index in piece), sum(max(moving[index]) for index in piece)
                items.append(WorkItem(call, arguments, worker, seconds, away))
        return units, items

    def _pieces(self, share: list[int], loads: list[float], by_block: bool) -> list[list[int]]:
        if by_block:
            return [[index] for index in share]
        if self.sums_shares:  # a worker with a GPU trains a piece side by side
            count = ceil(len(share) / MOST_LANES)
            return [list(map(int, piece)) for piece in np.array_split(share, count)] if share else []
        # Before costs are measured, every client is worth a message.
        return pieces_of(share, loads, PIECES, LEAST if self.costs.known else 0.0)

    def _arguments(
        self,
        call: str,
        context: RoundContext,
        unit: list[int],
        weights: CohortWeights | None,
        home: WorkerHandle | None,
        size: int,
    ) -> Callable[[WorkerHandle, bool], tuple[Any, ...]]:
        """Arguments of a call for the clients of a unit; asks other workers for their states before these start."""
        clients = [context.cohort[row] for row in unit]
        unit_weights = None if weights is None else weights.subset(unit)
        broadcast = context.broadcast
        coming, transfers = self.states.hand_over(clients, home, broadcast, size) if size else (set(), [])

        def arguments(worker: WorkerHandle, with_state: bool) -> tuple[Any, ...]:
            as_planned = worker is home and not with_state
            dispatched = [
                self.states.dispatch(
                    client, worker, broadcast, context.fresh, with_state, as_planned and client.number in coming
                )
                for client in clients
            ]
            if call == "gradients":
                return context.broadcast_ref, dispatched
            sent = transfers if as_planned else ()
            return context.broadcast_ref, context.gradient_ref, dispatched, unit_weights, False, *sent

        return arguments

    def _state_bytes(self, training: Training) -> int:
        fields = flat_fields(training.algorithm.client_fields()).values()
        numbers = sum(field.scalars(self.problem.layout.size) for field in fields)
        return numbers * torch.finfo(self.problem.dtype).bits // 8

    def _remote_states(self, worker: WorkerHandle, context: RoundContext, rows: list[int]) -> list[RemoteState]:
        """The new states of the clients in some rows, which stay with the worker that trained them."""
        clients = [context.cohort[row] for row in rows]

        def retrain() -> tuple[WorkerHandle, Arrays]:
            def arguments(worker: WorkerHandle, with_state: bool) -> tuple[Any, ...]:
                broadcast = context.broadcast
                dispatched = [self.states.dispatch(client, worker, broadcast, None, True) for client in clients]
                return context.broadcast_ref, context.gradient_ref, dispatched, None, True

            item = WorkItem("train", arguments)
            self.pool.run_now(item, self._source)
            assert item.worker is not None
            return item.worker, item.result.state

        return self.states.trained(worker, context.broadcast, clients, retrain)

    def _takes_sums(self, training: Training, count: int) -> bool:
        enough = self.sums_shares or count >= BLOCK * BLOCKS_PER_WORKER * self.workers
        return enough and not self.shows_rows and not training.aggregation.needs_rows

    def _from_rows(self, results: CohortResults) -> Outcome:
        """The outcome from every client's rows."""
        training, cohort = results.context.training, results.context.cohort
        if self.buffers is None or self.buffers.rows < len(cohort):
            sizes = self.problem.layout.size, self.problem.buffers.size
            self.buffers = CohortBuffers.new(training.algorithm, *sizes, len(cohort), results.z)
        buffers = self.buffers
        for unit, part in zip(results.units, results.parts, strict=True):
            # Through numpy, which copies from the object store only once.
            buffers.displacement.numpy()[unit] = part.rows["displacement"]
            buffers.buffers.numpy()[unit] = part.rows["buffers"]
            for name, rows in buffers.sent.items():
                rows.numpy()[unit] = part.rows[f"sent/{name}"]
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
            results.states,
            results.extra_cost,
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
        tasks = [(batch.model, batch.examples, batch.positions.numpy()) for batch in plan]
        stride = self.workers * 2
        parts = [tasks[start::stride] for start in range(min(len(tasks), stride))]
        arrays = [
            (m.weights.numpy(), m.buffers.numpy(), {name: value.numpy() for name, value in m.integers.items()})
            for m in models.values()
        ]
        models_ref = self.ray.put(arrays)
        answers = self.pool.map("evaluate", [(models_ref, part) for part in parts], self._source)
        sums: list[Any] = [None] * len(tasks)
        for start, answer in enumerate(answers):
            sums[start::stride] = [{name: np.array(value) for name, value in batch.items()} for batch in answer]
        return evaluation_result(problem.task, plan, sums, list(models), examples)


def _samples(context: RoundContext) -> list[int]:
    return [context.training.plan.samples(len(client.indices)) for client in context.cohort]
