"""The Ray engine: a cohort spread over worker processes on one machine or many, each with one core or GPU and the local engine.

The driver keeps the server's model and the clients' state. What all clients of a round read is put into the object store once; a worker
takes it from there, trains the clients it is sent, and returns their rows, or the sums of a block of the aggregation where the cohort has
blocks enough to keep everyone busy. Sums are taken in cohort order over the same blocks as everywhere, so that the result does not depend
on how many workers there were, on who trained whom, or on workers that were lost on the way.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedflat.algorithms.algorithm import States, flat_fields, flat_state, nested_state
from fedflat.data import Examples
from fedflat.engines.aggregation import BLOCK, by_samples, sum_of_blocks, weighted_sum
from fedflat.engines.contract import Client, ModelState, Outcome, Training
from fedflat.engines.lanes import MOST_LANES
from fedflat.engines.loop import LoopEngine, one_thread
from fedflat.engines.problem import Problem
from fedflat.engines.ray_cluster import Device, connect, device_for, workers_for
from fedflat.engines.ray_crew import Crew, crew_of
from fedflat.engines.ray_work import Costs, blocks_of, units_of
from fedflat.engines.ray_worker import Broadcast, Local, Source, Trained, facts, member_of
from fedflat.engines.reduction import Report, Shares, outcome_of, reduce_rows
from fedflat.engines.table import Table
from fedflat.engines.totals import Totals

BLOCKS_PER_WORKER = 4
"""Where a cohort has so many blocks for each worker, a block is what one worker does, and only its sums come back."""


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

    @property
    def reports(self) -> list[Report]:
        """What each client reported, in the order of the cohort."""
        pairs = (pair for unit, one in zip(self.units, self.found, strict=True) for pair in zip(unit, one.reports, strict=True))
        placed = dict(pairs)
        return [placed[row] for row in range(len(placed))]


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
        self.block = MOST_LANES if self.device == "cuda" else BLOCK
        """Clients that a worker sums where they are: on a GPU as many as it trains at once, and equal to other sums only to rounding."""
        self.costs = Costs()
        self.table: Table | None = None
        self._source = Source(uuid.uuid4().hex, [self.ray.put(build(self.device))], facts(problem))
        self._trainings: tuple[Training, str] | None = None
        crew = self.crew
        crew.wait_for_all()
        crew.each("open", self._source)

    @property
    def crew(self) -> Crew:
        """The workers."""
        return crew_of(self.ray, self.workers, self.device)

    # --- training ----------------------------------------------------------------------------------------------------------------

    def train(self, training: Training, round: int, model: ModelState, server: States, cohort: list[Client]) -> Outcome:
        """Train a cohort for one round and reduce what it sends, in cohort order."""
        with one_thread():
            z = training.algorithm.broadcast(model.weights, server)
            told = self._told(training, round, z, server, model, len(cohort))
            shared = self.ray.put(told)
            passes, samples, common = self._common_gradient(told.training, shared, cohort, z)
            whole_blocks = self._takes_blocks(training, len(cohort))
            costs = [self.costs.expected(client.number, len(client.indices)) for client in cohort]
            units = blocks_of(costs, self.block) if whole_blocks else self._units(costs)
            shares = Shares.of(training.aggregation, [len(client.indices) for client in cohort]) if whole_blocks else None
            found = self._trained(shared, common, cohort, units, shares)
            done = Gathered(training, round, model, z, common, cohort, units, found)
            outcome = self._from_rows(done) if shares is None else _from_blocks(done)
            outcome.cost.backward_passes += passes
            outcome.cost.samples += samples
            return outcome

    def _told(self, training: Training, round: int, z: Tensor, server: States, model: ModelState, count: int) -> Broadcast:
        if self._trainings is None or self._trainings[0] is not training:
            self._trainings, self.table = (training, uuid.uuid4().hex), None
        received = {name for name, field in flat_fields(training.algorithm.server_fields()).items() if field.sent}
        sent = {name: value.numpy() for name, value in flat_state(server).items() if name in received}
        integers = {name: value.numpy() for name, value in model.integers.items()}
        return Broadcast(self._trainings[1], training, round, z.numpy(), sent, model.buffers.numpy(), integers, count)

    def _common_gradient(self, training: Training, shared: Any, cohort: list[Client], z: Tensor) -> tuple[int, int, Tensor | None]:
        if training.algorithm.drift.whole_gradient != "common":
            return 0, 0, None
        sizes = [len(client.indices) for client in cohort]
        units = self._units([self.costs.expected(client.number, size) for client, size in zip(cohort, sizes, strict=True)])
        tasks = [(self._source, shared, [member_of(cohort[row]) for row in unit]) for unit in units]
        rows = torch.empty(len(cohort), len(z), dtype=z.dtype)
        passes = samples = 0
        for unit, (gradients, some, seen) in zip(units, self.crew.map("gradients", tasks), strict=True):
            rows.numpy()[unit] = gradients
            passes, samples = passes + some, samples + seen
        return passes, samples, weighted_sum(rows, by_samples(sizes))

    def _units(self, costs: list[float]) -> list[list[int]]:
        # A GPU trains its share side by side, so it gets it whole; before anything is measured, a client is worth a message.
        if self.device == "cuda":
            return units_of(costs, self.workers, pieces=1)
        return units_of(costs, self.workers) if self.costs.known else units_of(costs, self.workers, least=0.5)

    def _takes_blocks(self, training: Training, count: int) -> bool:
        enough = count >= self.block * BLOCKS_PER_WORKER * self.workers
        return enough and not self.shows_rows and not training.aggregation.needs_rows

    def _trained(
        self, shared: Any, common: Tensor | None, cohort: list[Client], units: list[list[int]], shares: Shares | None
    ) -> list[Trained]:
        gradient = None if common is None else self.ray.put(common.numpy())
        tasks = [
            (
                self._source,
                shared,
                gradient,
                [member_of(cohort[row]) for row in unit],
                None if shares is None else shares.part(unit[0], unit[-1] + 1),
            )
            for unit in units
        ]
        found: list[Trained] = self.crew.map("train", tasks)
        for unit, one in zip(units, found, strict=True):
            self.costs.measured([cohort[row].number for row in unit], [len(cohort[row].indices) for row in unit], one.seconds)
        return found

    def _from_rows(self, done: Gathered) -> Outcome:
        """The outcome from every client's rows."""
        table = self._room(done.training, len(done.cohort), done.z)
        for unit, one in zip(done.units, done.found, strict=True):
            # From the object store into the table, with one copy.
            table.displacement.numpy()[unit] = one.rows["displacement"]
            table.buffers.numpy()[unit] = one.rows["buffers"]
            for name, rows in table.sent.items():
                rows.numpy()[unit] = one.rows[f"sent/{name}"]
            for name, rows in table.client.items():
                rows.numpy()[unit] = one.state[name]
        if done.common is not None:
            table.common_gradient.copy_(done.common)
        return reduce_rows(done.training, done.round, done.model, done.z, table, done.cohort, done.reports)

    def _room(self, training: Training, rows: int, like: Tensor) -> Table:
        if self.table is None or self.table.rows < rows:
            problem = self.problem
            self.table = Table.new(training.algorithm, problem.layout.size, problem.buffers.size, rows, like, False)
        return self.table

    def prepare(self, training: Training, round: int, cohort: list[tuple[int, np.ndarray]]) -> None:
        """Nothing: workers draw their batches themselves."""

    # --- evaluation --------------------------------------------------------------------------------------------------------------

    def evaluate(self, models: dict[str, ModelState], examples: dict[str, Examples]) -> dict[str, dict[str, dict[str, float]]]:
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
            (m.weights.numpy(), m.buffers.numpy(), {name: value.numpy() for name, value in m.integers.items()}) for m in models.values()
        ]
        shared = self.ray.put(sent)
        answers = self.crew.map("evaluate", [(self._source, shared, part) for part in parts])
        sums: list[Any] = [None] * len(tasks)
        for start, answer in enumerate(answers):
            sums[start :: self.workers * 2] = [{name: np.array(value) for name, value in one.items()} for one in answer]
        totals = {(index, name): Totals(problem.task) for index in range(len(models)) for name in examples}
        for (index, name, positions), part in zip(tasks, sums, strict=True):
            totals[index, name].add(part, len(positions))
        return {model: {name: totals[index, name].figures() for name in examples} for index, model in enumerate(models)}


def _from_blocks(done: Gathered) -> Outcome:
    """The outcome from the sums of blocks, in the order of the cohort."""
    blocks = [one for _, one in sorted(zip(done.units, done.found, strict=True), key=lambda pair: pair[0][0])]
    sums = {name: sum_of_blocks([torch.from_numpy(np.array(block.sums[name])) for block in blocks]) for name in blocks[0].sums}
    clients: list[Client] = []
    for block in blocks:
        for row in range(len(block.reports)):
            state = nested_state({name: torch.from_numpy(np.array(rows[row])) for name, rows in block.state.items()})
            statistics = None if block.statistics is None else torch.from_numpy(np.array(block.statistics[row]))
            clients.append(done.cohort[len(clients)]._replace(state=state, statistics=statistics))
    return outcome_of(done.training, done.round, done.model, done.z, sums, clients, done.reports, done.common, None)
