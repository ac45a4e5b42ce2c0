"""The loop engine: clients one after another, or spread over worker processes with one thread each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedflat.algorithms.algorithm import States
from fedflat.data import Examples
from fedflat.engines.cpu.worker_pool import Pool, available_cores, can_travel, pool_of, shortage_of_shared_memory_told
from fedflat.engines.problem.problem import Problem
from fedflat.engines.problem.totals import Totals
from fedflat.engines.round.aggregation import by_samples, weighted_sum
from fedflat.engines.round.client import common_gradient, train_client
from fedflat.engines.round.cohort_buffers import Table
from fedflat.engines.round.contract import Client, ModelState, Outcome, Training
from fedflat.engines.round.reduction import Report, reduce_rows


class LoopEngine:
    """Trains the clients of a cohort in a loop; with several workers each process takes the next client that waits."""

    def __init__(self, problem: Problem, workers: int | None = None) -> None:
        self.problem = problem
        wanted = available_cores() if workers is None else workers
        self.workers = wanted if wanted > 1 and problem.device.type == "cpu" and can_travel(problem) else 1
        self.table: Table | None = None
        self._table_of: Training | None = None
        self._here: dict[str, Any] = {"problem": problem}
        self._pool: Pool | None = None
        self._turn = object()
        self._known: Training | None = None

    # --- training ----------------------------------------------------------------------------------------------------------------

    def train(self, training: Training, round: int, model: ModelState, server: States, cohort: list[Client]) -> Outcome:
        """Train a cohort for one round and reduce what it sends, in cohort order."""
        with one_thread(), shortage_of_shared_memory_told():
            self._stay_if_it_cannot_travel(training)
            table = self.room(training, len(cohort), model.weights)
            z = table.fill(training.algorithm, model, server, cohort)
            pre = (0, 0)
            if training.algorithm.drift.whole_gradient == "common":
                pre = self.take_gradients(training, round, table, cohort)
                table.common_gradient.copy_(
                    weighted_sum(table.gradient[: len(cohort)], by_samples([len(c.indices) for c in cohort]))
                )
            reports = self.train_rows(training, round, table, cohort, model.integers)
            outcome = reduce_rows(training, round, model, z, table, cohort, reports)
            outcome.cost.backward_passes += pre[0]
            outcome.cost.samples += pre[1]
            return outcome

    def take_gradients(self, training: Training, round: int, table: Table, cohort: list[Client]) -> tuple[int, int]:
        """Each client's whole gradient at z into its row; returns the passes and samples that took."""
        found = self._map(
            _whole_gradient, [(training, round, row, c.number, c.indices) for row, c in enumerate(cohort)]
        )
        return sum(passes for passes, _ in found), sum(samples for _, samples in found)

    def train_rows(
        self, training: Training, round: int, table: Table, cohort: list[Client], integers: dict[str, Tensor]
    ) -> list[Report]:
        """Train clients whose rows of the table are filled, and leave there what they keep and send."""
        sent = _arrays(integers)
        found = self._map(_train, [(training, round, row, c.number, c.indices, sent) for row, c in enumerate(cohort)])
        return [report._replace(integers=_tensors(counted, self.problem.device)) for report, counted in found]

    def _stay_if_it_cannot_travel(self, training: Training) -> None:
        """Train in this process where the algorithm is of the running script, which workers do not import."""
        if training is not self._known:
            self._known = training
            self.workers = self.workers if self.workers == 1 or can_travel(training) else 1

    def room(self, training: Training, rows: int, like: Tensor) -> Table:
        """The table for cohorts of up to so many clients."""
        if self.table is None or self.table.rows < rows or self._table_of is not training:
            problem = self.problem
            self.table = Table.new(
                training.algorithm, problem.layout.size, problem.buffers.size, rows, like, self.workers > 1
            )
            self._table_of = training
            self._share("table", self.table)
        return self.table

    def prepare(self, training: Training, round: int, cohort: list[tuple[int, np.ndarray]]) -> None:
        """Nothing: workers draw their batches themselves."""

    # --- evaluation --------------------------------------------------------------------------------------------------------------

    def evaluate(
        self, models: dict[str, ModelState], examples: dict[str, Examples]
    ) -> dict[str, dict[str, dict[str, float]]]:
        """Every metric of every model on every set of examples."""
        with one_thread(), shortage_of_shared_memory_told():
            weights = torch.stack([torch.cat([m.weights, m.buffers]) for m in models.values()])
            if self.workers > 1:
                weights.share_memory_()  # type: ignore[no-untyped-call]
            self._share("models", (weights, [m.integers for m in models.values()]))
            self._share("examples", examples)
            tasks = [
                (index, name, part)
                for index in range(len(models))
                for name, some in examples.items()
                for part in self.problem.evaluation_batches(len(some))
            ]
            sums = self._map(_evaluate, tasks)
        totals = {(index, name): Totals(self.problem.task) for index in range(len(models)) for name in examples}
        for (index, name, positions), part in zip(tasks, sums, strict=True):
            totals[index, name].add(part, len(positions))
        return {model: {name: totals[index, name].figures() for name in examples} for index, model in enumerate(models)}

    # --- workers -----------------------------------------------------------------------------------------------------------------

    def _share(self, name: str, value: object) -> None:
        self._here[name] = value
        if self.workers > 1 and self._pool is not None and self._pool.turn is self._turn:
            self._pool.share(name, value)

    def _map(self, call: Any, tasks: list[tuple[Any, ...]]) -> list[Any]:
        if self.workers == 1:
            return [call(self._here, *task) for task in tasks]
        pool = pool_of(self.workers)
        if pool is not self._pool or pool.turn is not self._turn:
            self._pool, pool.turn = pool, self._turn
            for name, value in self._here.items():
                pool.share(name, value)
        return pool.map(call, tasks)


def _train(
    here: dict[str, Any],
    training: Training,
    round: int,
    row: int,
    client: int,
    indices: np.ndarray,
    integers: dict[str, np.ndarray],
) -> tuple[Report, dict[str, np.ndarray]]:
    problem: Problem = here["problem"]
    report = train_client(
        problem, training, here["table"], round, row, client, indices, _tensors(integers, problem.device)
    )
    # As numbers and arrays: a tensor on its way through a pipe would take a piece of shared memory of its own.
    return report._replace(rates=float(report.rates), loss=float(report.loss), integers={}), _arrays(report.integers)


def _arrays(tensors: dict[str, Tensor]) -> dict[str, np.ndarray]:
    return {name: tensor.cpu().numpy() for name, tensor in tensors.items()}


def _tensors(arrays: dict[str, np.ndarray], device: torch.device) -> dict[str, Tensor]:
    return {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}


def _whole_gradient(
    here: dict[str, Any], training: Training, round: int, row: int, client: int, indices: np.ndarray
) -> tuple[int, int]:
    table: Table = here["table"]
    gradient, passes, samples = common_gradient(here["problem"], training, table, round, client, indices, row)
    table.gradient[row].copy_(gradient)
    return passes, samples


def _evaluate(here: dict[str, Any], index: int, name: str, part: Tensor) -> dict[str, np.ndarray]:
    problem: Problem = here["problem"]
    models, integers = here["models"]
    weights, buffers = torch.split(models[index], [problem.layout.size, problem.buffers.size])
    examples: Examples = here["examples"][name]
    sums = problem.sum_tensors(weights, {**problem.buffers.views(buffers), **integers[index]}, examples.take(part))
    # As arrays: a tensor on its way through a pipe would take a piece of shared memory of its own.
    return {name: value.double().cpu().numpy() for name, value in sums.items()}


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch on one thread: sums then do not depend on the machine, and busy cores are not fought over."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
