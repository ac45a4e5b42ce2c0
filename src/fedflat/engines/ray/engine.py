"""The Ray engine: a cohort spread over worker processes on one machine or many, each with one core or GPU and the local engine.

The driver keeps the server's model. What all clients of a round read is put into the object store once; a worker takes it from there,
trains the clients it is sent, keeps their state, and returns their rows, or the sums of a block of the aggregation where the cohort has
blocks enough to keep everyone busy. Sums are taken in cohort order over the same blocks as everywhere, so that the result does not depend
on how many workers there were, on who trained whom, or on workers that were lost on the way. A GPU, whose own sums are equal to others only
to rounding, always sums what it trained: the rows would take longer on their way than the training.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from math import ceil
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedflat.algorithms.algorithm import States, flat_fields, flat_state, nested_state
from fedflat.algorithms.slot import State
from fedflat.data import Examples
from fedflat.engines.cpu.engine import LoopEngine, one_thread
from fedflat.engines.gpu.engine import MOST_LANES
from fedflat.engines.problem.problem import Problem
from fedflat.engines.problem.totals import Totals
from fedflat.engines.ray.cluster import Device, connect, device_for, gpus_each, workers_for
from fedflat.engines.ray.scheduling import LEAST, PIECES, Costs, blocks_of, pieces_of, shares_of
from fedflat.engines.ray.state_directory import StateDirectory
from fedflat.engines.ray.worker import FRESH, Arrays, Broadcast, Local, Source, Trained, arrays_of, facts
from fedflat.engines.ray.worker_pool import Job, WorkerHandle, WorkerPool, crew_of
from fedflat.engines.round.aggregation import BLOCK, by_samples, sum_of_blocks, weighted_sum
from fedflat.engines.round.cohort_buffers import Table
from fedflat.engines.round.contract import Client, ModelState, Outcome, Training
from fedflat.engines.round.reduction import Report, Shares, outcome_of, reduce_rows
from fedflat.engines.round.remote_state import RemoteState

BLOCKS_PER_WORKER = 4
"""Where a cohort has so many blocks for each worker, a block is what one worker does, and only its sums come back."""


class Round(NamedTuple):
    """What a round's jobs have in common."""

    training: Training
    cohort: list[Client]
    told: Broadcast
    shared: Any
    """A reference to what is told."""
    gradient: Any
    """A reference to the cohort's whole gradient, where the algorithm has one."""
    fresh: object
    """The state that several of the cohort start with."""


class Gathered(NamedTuple):
    """A round's work as it came back from the workers, each with some of the cohort."""

    training: Training
    round: int
    model: ModelState
    z: Tensor
    common: Tensor | None
    """The cohort's whole gradient, where the algorithm has one."""
    cohort: list[Client]
    units: list[list[int]]
    """Which of the cohort each worker had."""
    found: list[Trained]
    states: list[Mapping[str, State]]
    """What each client keeps, in the order of the cohort."""

    @property
    def reports(self) -> list[Report]:
        """What each client reported, in the order of the cohort."""
        return _placed(self.units, [one.reports for one in self.found])


class RayEngine:
    """Trains the clients of a cohort on the workers of a Ray cluster."""

    def __init__(
        self,
        problem: Problem,
        build: Callable[[Device], Callable[[], Local]],
        *,
        address: str | None = None,
        workers: int | None = None,
        device: str = "auto",
        shows_rows: bool = False,
    ) -> None:
        self.problem = problem
        self.shows_rows = shows_rows
        """Whether somebody looks at single clients: then every row comes to the driver."""
        self.ray = connect(address, workers)
        self.device = device_for(self.ray, device)
        self.workers = workers_for(self.ray, workers, self.device)
        self.gpus = gpus_each(self.ray, self.workers) if self.device == "cuda" else 0.0
        self.sums_shares = self.device == "cuda"
        """Whether a worker sums whatever it was given, and not blocks of the cohort alone: equal to other sums only to rounding."""
        self.costs = Costs()
        self.slowest = 0.0
        """Seconds that the slowest worker trained in the last round; what a round takes longer are messages and the server's step."""
        self.table: Table | None = None
        self._source = Source(uuid.uuid4().hex, [self.ray.put(build(self.device))], facts(problem))
        self._trainings: tuple[Training, str] | None = None
        self._stamp = FRESH
        self.states = StateDirectory(lambda: self.crew)
        crew = self.crew
        crew.wait_for_all()
        crew.open(self._source)

    @property
    def crew(self) -> WorkerPool:
        """The workers."""
        return crew_of(self.ray, self.workers, self.device, self.gpus)

    # --- training ----------------------------------------------------------------------------------------------------------------

    def train(self, training: Training, round: int, model: ModelState, server: States, cohort: list[Client]) -> Outcome:
        """Train a cohort for one round and reduce what it sends, in cohort order."""
        with one_thread():
            z = training.algorithm.broadcast(model.weights, server)
            fresh = most_common_state(cohort)
            told = self._told(training, round, z, server, model, cohort, fresh)
            this = Round(training, cohort, told, self.ray.put(told), None, fresh)
            passes, samples, common = self._common_gradient(this, z)
            if common is not None:
                this = this._replace(gradient=self.ray.put(common.numpy()))
            done = self._trained(this, model, z, common)
            outcome = self._from_rows(done) if done.found[0].rows else _from_sums(done)
            outcome.cost.backward_passes += passes
            outcome.cost.samples += samples
            return outcome

    def _told(
        self,
        training: Training,
        round: int,
        z: Tensor,
        server: States,
        model: ModelState,
        cohort: list[Client],
        fresh: Any,
    ) -> Broadcast:
        if self._trainings is None or self._trainings[0] is not training:
            self._trainings, self.table = (training, uuid.uuid4().hex), None
        self._stamp += 1
        received = {name for name, field in flat_fields(training.algorithm.server_fields()).items() if field.sent}
        sent = {name: value.numpy() for name, value in flat_state(server).items() if name in received}
        integers = {name: value.numpy() for name, value in model.integers.items()}
        start = {} if fresh is None else arrays_of(fresh)
        return Broadcast(
            self._trainings[1],
            training,
            round,
            z.numpy(),
            sent,
            model.buffers.numpy(),
            integers,
            len(cohort),
            self._stamp,
            start,
        )

    def _common_gradient(self, this: Round, z: Tensor) -> tuple[int, int, Tensor | None]:
        if this.training.algorithm.drift.whole_gradient != "common":
            return 0, 0, None
        units, jobs = self._jobs("gradients", this, None)
        self.crew.do(jobs, self._source)
        rows = torch.empty(len(this.cohort), len(z), dtype=z.dtype)
        passes = samples = 0
        for unit, job in zip(units, jobs, strict=True):
            gradients, some, seen = job.result
            rows.numpy()[unit] = gradients
            passes, samples = passes + some, samples + seen
        return passes, samples, weighted_sum(rows, by_samples([len(client.indices) for client in this.cohort]))

    def _trained(self, this: Round, model: ModelState, z: Tensor, common: Tensor | None) -> Gathered:
        cohort = this.cohort
        takes_sums = self._takes_sums(this.training, len(cohort))
        shares = (
            Shares.of(this.training.aggregation, [len(client.indices) for client in cohort]) if takes_sums else None
        )
        units, jobs = self._jobs("train", this, shares)
        self.crew.do(jobs, self._source, self.states.bring_all)
        self.states.bring_all()
        work = self._work(this)
        seconds: Counter[WorkerHandle | None] = Counter()
        for unit, job in zip(units, jobs, strict=True):
            self.costs.measured([cohort[row].number for row in unit], [work[row] for row in unit], job.result.seconds)
            seconds[job.hand] += job.result.seconds
        self.slowest = max(seconds.values())
        states: list[Any] = [nested_state({})] * len(cohort)
        if flat_fields(this.training.algorithm.client_fields()):
            rows: dict[WorkerHandle, list[int]] = {}
            for unit, job in zip(units, jobs, strict=True):
                assert job.hand is not None
                rows.setdefault(job.hand, []).extend(unit)
            states = _placed(list(rows.values()), [self._left_with(hand, this, some) for hand, some in rows.items()])
        return Gathered(
            this.training, this.told.round, model, z, common, cohort, units, [job.result for job in jobs], states
        )

    # --- who does what -----------------------------------------------------------------------------------------------------------

    def _work(self, this: Round) -> list[int]:
        return [this.training.plan.samples(len(client.indices)) for client in this.cohort]

    def _jobs(self, call: str, this: Round, shares: Shares | None) -> tuple[list[list[int]], list[Job]]:
        """The cohort in units, and each as a job for the worker that has its clients' state, or has time."""
        costs = [
            self.costs.expected(client.number, work) for client, work in zip(this.cohort, self._work(this), strict=True)
        ]
        blocks = shares is not None and not self.sums_shares
        units = blocks_of(len(costs)) if blocks else [[row] for row in range(len(costs))]
        loads = [sum(costs[row] for row in unit) for unit in units]
        hands: list[WorkerHandle | None] = [*self.crew.present] or [None] * self.workers
        size = 0 if call == "gradients" else self._state_bytes(this.training)
        moving = [
            [sum(self.states.moving(this.cohort[row], hand, size) for row in unit) for hand in hands] for unit in units
        ]
        found: list[list[int]] = []
        jobs = []
        for hand, share in zip(hands, shares_of(loads, moving), strict=True):
            for piece in self._pieces(share, loads, blocks):
                found.append(sorted(row for index in piece for row in units[index]))
                away = sum(max(moving[index]) for index in piece)
                job = Job(call, _nothing, hand, sum(loads[index] for index in piece), away)
                jobs.append(self._told_whom(job, this, found[-1], shares, size))
        return found, jobs

    def _pieces(self, share: list[int], loads: list[float], blocks: bool) -> list[list[int]]:
        if blocks:
            return [[index] for index in share]
        if self.sums_shares:  # and trains side by side what it is given
            return (
                [list(map(int, piece)) for piece in np.array_split(share, ceil(len(share) / MOST_LANES))]
                if share
                else []
            )
        return pieces_of(
            share, loads, PIECES, LEAST if self.costs.known else 0.0
        )  # unmeasured, a client is worth a message

    def _told_whom(self, job: Job, this: Round, unit: list[int], shares: Shares | None, size: int) -> Job:
        """A job with the clients of a unit, whose states other workers are asked for now, before they begin to train."""
        clients = [this.cohort[row] for row in unit]
        part = None if shares is None else shares.of_some(unit)
        call, home = job.call, job.home  # and not the job, which would hold itself, and the round with it
        coming, handed_over = self.states.hand_over(clients, home, this.told, size) if size else (set(), [])

        def arguments(hand: WorkerHandle, whole: bool) -> tuple[Any, ...]:
            as_planned = hand is home and not whole
            members = [
                self.states.member(client, hand, this.told, this.fresh, whole, as_planned and client.number in coming)
                for client in clients
            ]
            if call == "gradients":
                return this.shared, members
            return this.shared, this.gradient, members, part, False, *(handed_over if as_planned else ())

        job.arguments = arguments
        return job

    def _state_bytes(self, training: Training) -> int:
        fields = flat_fields(training.algorithm.client_fields()).values()
        return (
            sum(field.scalars(self.problem.layout.size) for field in fields) * torch.finfo(self.problem.dtype).bits // 8
        )

    def _left_with(self, hand: WorkerHandle, this: Round, rows: list[int]) -> list[RemoteState]:
        """The states of some of the cohort, which stay with the worker that trained them."""
        clients = [this.cohort[row] for row in rows]

        def again() -> tuple[WorkerHandle, Arrays]:
            def arguments(hand: WorkerHandle, whole: bool) -> tuple[Any, ...]:
                members = [self.states.member(client, hand, this.told, None, True) for client in clients]
                return this.shared, this.gradient, members, None, True

            once_more = Job("train", arguments)
            self.crew.do_now(once_more, self._source)
            assert once_more.hand is not None
            return once_more.hand, once_more.result.state

        return self.states.trained(hand, this.told, clients, again)

    def _takes_sums(self, training: Training, count: int) -> bool:
        enough = self.sums_shares or count >= BLOCK * BLOCKS_PER_WORKER * self.workers
        return enough and not self.shows_rows and not training.aggregation.needs_rows

    # --- what comes of it --------------------------------------------------------------------------------------------------------

    def _from_rows(self, done: Gathered) -> Outcome:
        """The outcome from every client's rows."""
        table = self._room(done.training, len(done.cohort), done.z)
        for unit, one in zip(done.units, done.found, strict=True):
            # From the object store into the table, with one copy.
            table.displacement.numpy()[unit] = one.rows["displacement"]
            table.buffers.numpy()[unit] = one.rows["buffers"]
            for name, rows in table.sent.items():
                rows.numpy()[unit] = one.rows[f"sent/{name}"]
        if done.common is not None:
            table.common_gradient.copy_(done.common)
        return reduce_rows(done.training, done.round, done.model, done.z, table, done.cohort, done.reports, done.states)

    def _room(self, training: Training, rows: int, like: Tensor) -> Table:
        if self.table is None or self.table.rows < rows:
            problem = self.problem
            self.table = Table.new(training.algorithm, problem.layout.size, problem.buffers.size, rows, like, False)
        return self.table

    def prepare(self, training: Training, round: int, cohort: list[tuple[int, np.ndarray]]) -> None:
        """Nothing: workers draw their batches themselves."""

    # --- evaluation --------------------------------------------------------------------------------------------------------------

    def evaluate(
        self, models: dict[str, ModelState], examples: dict[str, Examples]
    ) -> dict[str, dict[str, dict[str, float]]]:
        """Every metric of every model on every set of examples; sets other than the problem's own are evaluated here."""
        problem = self.problem
        if examples is not problem.held_out:
            return LoopEngine(problem, 1).evaluate(models, examples)
        tasks = [
            (index, name, positions.numpy())
            for index in range(len(models))
            for name, some in examples.items()
            for positions in problem.evaluation_batches(len(some))
        ]
        parts = [tasks[start :: self.workers * 2] for start in range(min(len(tasks), self.workers * 2))]
        sent = [
            (m.weights.numpy(), m.buffers.numpy(), {name: value.numpy() for name, value in m.integers.items()})
            for m in models.values()
        ]
        shared = self.ray.put(sent)
        answers = self.crew.map("evaluate", [(shared, part) for part in parts], self._source)
        sums: list[Any] = [None] * len(tasks)
        for start, answer in enumerate(answers):
            sums[start :: self.workers * 2] = [{name: np.array(value) for name, value in one.items()} for one in answer]
        totals = {(index, name): Totals(problem.task) for index in range(len(models)) for name in examples}
        for (index, name, positions), part in zip(tasks, sums, strict=True):
            totals[index, name].add(part, len(positions))
        return {model: {name: totals[index, name].figures() for name in examples} for index, model in enumerate(models)}


def _from_sums(done: Gathered) -> Outcome:
    """The outcome from the sums of blocks, in the order of the cohort."""
    blocks = [one for _, one in sorted(zip(done.units, done.found, strict=True), key=lambda pair: pair[0][0])]
    sums = {
        name: sum_of_blocks([torch.from_numpy(np.array(block.sums[name])) for block in blocks])
        for name in blocks[0].sums
    }
    statistics: list[Tensor | None] = [None] * len(done.cohort)
    if done.training.own_statistics:
        statistics = [
            torch.from_numpy(np.array(row))
            for row in _placed(done.units, [_rows_of(one.statistics) for one in done.found])
        ]
    clients = [
        client._replace(state=state, statistics=own)
        for client, state, own in zip(done.cohort, done.states, statistics, strict=True)
    ]
    return outcome_of(done.training, done.round, done.model, done.z, sums, clients, done.reports, done.common, None)


def most_common_state(cohort: list[Client]) -> Mapping[str, State] | None:
    """The very state that several clients have, which is what those start with who take part for the first time."""
    counts = Counter(id(client.state) for client in cohort)
    same, count = counts.most_common(1)[0]
    return next(client.state for client in cohort if id(client.state) == same) if count > 1 else None


def _placed(units: list[list[int]], values: Sequence[Sequence[Any]]) -> list[Any]:
    """The values of all units, in the order of the cohort."""
    placed = {
        row: value for unit, some in zip(units, values, strict=True) for row, value in zip(unit, some, strict=True)
    }
    return [placed[row] for row in range(len(placed))]


def _rows_of(matrix: np.ndarray | None) -> Sequence[np.ndarray]:
    return [] if matrix is None else list(matrix)


def _nothing(hand: WorkerHandle, whole: bool) -> tuple[Any, ...]:
    """The arguments of a job that is not made up yet."""
    return ()
