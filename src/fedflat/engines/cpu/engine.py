"""The loop engine: clients train one after another, or spread over worker processes with one thread each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedflat.algorithms.algorithm import States
from fedflat.data import Examples
from fedflat.engines.cpu.worker_pool import ProcessPool, explain_full_shared_memory, process_pool
from fedflat.engines.problem.problem import Problem
from fedflat.engines.problem.totals import evaluation_plan, evaluation_result
from fedflat.engines.round.client import seeded_full_gradient, train_client
from fedflat.engines.round.cohort import ClientReport, CohortEngine, GradientCost
from fedflat.engines.round.cohort_buffers import Arrays, CohortBuffers, to_arrays, to_tensors
from fedflat.engines.round.contract import Client, ModelState, Outcome, Training
from fedflat.processes import available_cores, is_sendable


class LoopEngine(CohortEngine):
    """Trains the clients of a cohort in a loop; with several workers, each takes the next waiting client.

    Args:
        problem: model, task and data.
        workers: worker processes; by default one per core. Falls back to this process on a GPU, and for a problem or an
            algorithm defined in the running script, which workers cannot import.
    """

    def __init__(self, problem: Problem, workers: int | None = None) -> None:
        """Prepare to train on ``workers`` processes (default: one per core), which start with the first round."""
        super().__init__(problem)
        self.workers = max(1, available_cores() if workers is None else workers)
        if self.workers > 1 and (problem.device.type != "cpu" or not is_sendable(problem)):
            self.workers = 1
        self._allocated_for: Training | None = None
        self._shared: dict[str, Any] = {"problem": problem}
        self._pool: ProcessPool | None = None
        self._token = object()  # identifies this engine to the pool, which would keep the engine itself alive
        self._checked_training: Training | None = None

    def train(self, training: Training, round: int, model: ModelState, server: States, cohort: list[Client]) -> Outcome:
        """Train a cohort for one round and average what it sends, in cohort order; arguments as in ``Engine.train``.

        Falls back to this process for a training, e.g. a user's algorithm, that worker processes cannot import.
        """
        with one_thread(), explain_full_shared_memory():
            if training is not self._checked_training:
                self._checked_training = training
                if self.workers > 1 and not is_sendable(training):
                    self.workers = 1
            return super().train(training, round, model, server, cohort)

    def allocate(self, training: Training, rows: int, like: Tensor) -> CohortBuffers:
        """Memory for a cohort of ``rows`` clients, shared with the workers; ``like`` gives dtype and device.

        It is reused until a larger cohort or another training needs new memory.
        """
        if self.buffers is None or self.buffers.rows < rows or self._allocated_for is not training:
            sizes = self.problem.layout.size, self.problem.buffer_layout.size
            self.buffers = CohortBuffers.new(training.algorithm, *sizes, rows, like, shared=self.workers > 1)
            self._allocated_for = training
            self._share("cohort", self.buffers)
        return self.buffers

    def compute_full_gradients(
        self, training: Training, round: int, buffers: CohortBuffers, cohort: list[Client]
    ) -> GradientCost:
        """Write each client's full-batch gradient at the broadcast model into its row of ``buffers.gradient``.

        Returns the total cost.
        """
        tasks = [(training, round, row, client.number, client.indices) for row, client in enumerate(cohort)]
        return GradientCost.total(self._map(_write_full_gradient, tasks))

    def train_rows(
        self,
        training: Training,
        round: int,
        buffers: CohortBuffers,
        cohort: list[Client],
        integer_buffers: dict[str, Tensor],
    ) -> list[ClientReport]:
        """Train the clients whose inputs are in ``buffers``; client i of the cohort writes its results into row i.

        ``integer_buffers`` are the server model's integer buffers by name; every report has the client's own.
        """
        arrays = to_arrays(integer_buffers)
        tasks = [(training, round, row, client.number, client.indices, arrays) for row, client in enumerate(cohort)]
        results = self._map(_train, tasks)
        return [
            report._replace(integer_buffers=to_tensors(new_integer_buffers, self.problem.device))
            for report, new_integer_buffers in results
        ]

    def evaluate(
        self, models: dict[str, ModelState], examples: dict[str, Examples]
    ) -> dict[str, dict[str, dict[str, float]]]:
        """Metrics of every model on every set of examples: model -> set -> metric -> value."""
        with one_thread(), explain_full_shared_memory():
            weights = torch.stack([torch.cat([m.weights, m.buffers]) for m in models.values()])
            if self.workers > 1:
                weights.share_memory_()  # type: ignore[no-untyped-call]
            self._share("models", (weights, [m.integer_buffers for m in models.values()]))
            self._share("examples", examples)
            plan = evaluation_plan(self.problem, len(models), examples)
            sums = self._map(_evaluate, [tuple(batch) for batch in plan])
        return evaluation_result(self.problem.task, plan, sums, list(models), examples)

    def _share(self, name: str, value: object) -> None:
        """Make a value available, under a name, to the functions that ``_map`` calls.

        Workers that hold another engine's values receive it with the next ``_map``.
        """
        self._shared[name] = value
        if self.workers > 1 and self._pool is not None and self._pool.owner is self._token:
            self._pool.share(name, value)

    def _map(self, function: Any, tasks: list[tuple[Any, ...]]) -> list[Any]:
        """``function(shared, *task)`` for every task, in order, in this process or spread over the workers.

        ``shared`` are the values given to ``_share``, by name.
        """
        if self.workers == 1:
            return [function(self._shared, *task) for task in tasks]
        pool = process_pool(self.workers)
        if pool is not self._pool or pool.owner is not self._token:  # new workers, or another engine used them
            self._pool, pool.owner = pool, self._token
            for name, value in self._shared.items():
                pool.share(name, value)
        return pool.map(function, tasks)


def _train(
    shared: dict[str, Any],
    training: Training,
    round: int,
    row: int,
    client: int,
    indices: np.ndarray,
    integer_buffers: Arrays,
) -> tuple[ClientReport, Arrays]:
    """Train one client in a worker; returns its report, and its integer buffers separately.

    Both contain arrays and numbers instead of tensors, because torch would allocate shared memory for every tensor that
    is sent to another process. ``shared`` holds the problem and the memory of the cohort; the other arguments are those
    of ``train_client``.
    """
    problem: Problem = shared["problem"]
    tensors = to_tensors(integer_buffers, problem.device)
    report = train_client(problem, training, shared["cohort"], round, row, client, indices, tensors)
    return report.with_numbers()._replace(integer_buffers={}), to_arrays(report.integer_buffers)


def _write_full_gradient(
    shared: dict[str, Any], training: Training, round: int, row: int, client: int, indices: np.ndarray
) -> GradientCost:
    """Compute the gradient of a client's whole dataset at the broadcast model in a worker, and write it into its row.

    Args:
        shared: ``problem`` and ``cohort``, the memory of the cohort.
        training: how clients train.
        round: number of the round, from 0.
        row: the client's row in the memory of the cohort.
        client: the client's number in the federation.
        indices: positions of its examples in the training set [examples].
    """
    cohort: CohortBuffers = shared["cohort"]
    gradient, cost = seeded_full_gradient(shared["problem"], training, cohort, round, client, indices, row)
    cohort.gradient[row].copy_(gradient)
    return cost


def _evaluate(shared: dict[str, Any], model: int, name: str, positions: Tensor) -> Arrays:
    """The task's metrics, summed over the examples of one batch.

    Args:
        shared: the ``problem``, the sets of ``examples`` by name, and ``models``: a tensor with the weights and buffers
            of each model as a row, and a list of their integer buffers.
        model: index of the model.
        name: name of the set of examples.
        positions: positions of the batch's examples in the set [batch].
    """
    problem: Problem = shared["problem"]
    models, integer_buffers = shared["models"]
    weights, buffers = torch.split(models[model], [problem.layout.size, problem.buffer_layout.size])
    examples: Examples = shared["examples"][name]
    named_buffers = {**problem.buffer_layout.views(buffers), **integer_buffers[model]}
    sums = problem.metric_sums(weights, named_buffers, examples.take(positions))
    return to_arrays({name: value.double() for name, value in sums.items()})


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch on one thread, so that sums do not depend on the machine and workers do not compete for cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
