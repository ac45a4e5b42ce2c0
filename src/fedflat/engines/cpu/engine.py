"""The loop engine: clients train one after another, or spread over worker processes with one thread each.

Worker processes are started once and reused. They receive tasks over pipes; weights are exchanged in shared memory.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize
from typing import Any

import torch
from torch import Tensor

from fedflat.algorithms.algorithm import States
from fedflat.algorithms.part_checks import explain_key_errors
from fedflat.data import Examples
from fedflat.engines.problem.problem import Problem
from fedflat.engines.problem.task import evaluation_plan, evaluation_result
from fedflat.engines.round.client import ClientReport, train_client, write_full_gradient
from fedflat.engines.round.cohort import CohortEngine
from fedflat.engines.round.cohort_buffers import Arrays, CohortBuffers, to_arrays, to_tensors
from fedflat.engines.round.contract import Client, ClientRound, Cost, ModelState, Outcome, Training
from fedflat.errors import UserError, WorkerLost
from fedflat.operating_system import KEEPS_FREED_MEMORY, keep_freed_memory
from fedflat.processes import (
    PATIENCE,
    ChildDied,
    ChildProcess,
    available_cores,
    can_start_children,
    close_children,
    is_sendable,
    receive_from_parent,
    sendable_error,
    wait_for_any,
)
from fedflat.registry import loaded_plugins


class LoopEngine(CohortEngine):
    """Trains the clients of a cohort in a loop; with several workers, each takes the next waiting client.

    Args:
        problem: model, task and data.
        workers: number of worker processes; by default one per core. Clients train in this process instead if the
            problem is on a GPU, if the problem or algorithm is defined in the running script, which workers cannot
            import, or if this process cannot start others.
    """

    def __init__(self, problem: Problem, workers: int | None = None) -> None:
        """Prepare to train on ``workers`` processes (default: one per core), which start with the first round."""
        super().__init__(problem)
        self.workers = max(1, available_cores() if workers is None else workers)
        if self.workers > 1 and (problem.device.type != "cpu" or not can_start_children() or not is_sendable(problem)):
            self.workers = 1
        self._training: Training | None = None  # of the last round
        self._shared: dict[str, Any] = {"problem": problem}
        self._pool: ProcessPool | None = None
        self._token = object()  # identifies this engine to the pool; a reference to the engine would keep it alive

    def train_groups(
        self, training: Training, round: int, model: ModelState, server: States, groups: list[list[Client]]
    ) -> list[Outcome]:
        """Train groups of clients for one round, and average what each group sends, in the order of its clients.

        If worker processes cannot import something that ``training`` uses, such as an algorithm defined in the running
        script, this and all later rounds run in this process.
        """
        with one_thread(), explain_full_shared_memory():
            if training is not self._training:
                self._training, self.cohort_buffers = training, None
                if self.workers > 1 and not is_sendable(training):
                    self.workers = 1
            return super().train_groups(training, round, model, server, groups)

    def allocate(self, training: Training, rows: int, like: Tensor) -> CohortBuffers:
        """Memory for a cohort of ``rows`` clients, shared with the workers; ``like`` gives dtype and device.

        The memory is reused until the cohort is larger or another training begins.
        """
        if self.cohort_buffers is None or self.cohort_buffers.rows < rows:
            sizes = self.problem.layout.size, self.problem.buffer_layout.size
            self.cohort_buffers = CohortBuffers.new(training.algorithm, *sizes, rows, like, shared=self.workers > 1)
            self._share("cohort_buffers", self.cohort_buffers)
        return self.cohort_buffers

    def compute_full_gradients(
        self, training: Training, round: int, cohort_buffers: CohortBuffers, cohort: list[Client]
    ) -> Cost:
        """Write each client's full-batch gradient at z into its row of ``cohort_buffers.gradient``."""
        tasks = [(training, row, client.in_round(round)) for row, client in enumerate(cohort)]
        return sum(self._map(_write_full_gradient, tasks), Cost())

    def train_rows(
        self,
        training: Training,
        round: int,
        cohort_buffers: CohortBuffers,
        cohort: list[Client],
        integer_buffers: dict[str, Tensor],
    ) -> list[ClientReport]:
        """Train the clients whose inputs are in ``cohort_buffers``; client i of the cohort writes to row i."""
        arrays = to_arrays(integer_buffers)
        tasks = [(training, row, client.in_round(round), arrays) for row, client in enumerate(cohort)]
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
            vectors = torch.stack([torch.cat([m.weights, m.buffers]) for m in models.values()])  # one row per model
            if self.workers > 1:
                vectors.share_memory_()  # type: ignore[no-untyped-call]
            self._share("models", (vectors, [m.integer_buffers for m in models.values()]))
            self._share("examples", examples)
            plan = evaluation_plan(self.problem, len(models), examples)
            sums = self._map(evaluate_batch, [tuple(batch) for batch in plan])
        return evaluation_result(self.problem.task, plan, sums, list(models), examples)

    def _share(self, name: str, value: object) -> None:
        """Make a value available, under a name, to the functions that ``_map`` calls.

        If the workers hold another engine's values, they receive this engine's values with the next ``_map``.
        """
        self._shared[name] = value
        with _pool_lock:
            if self.workers > 1 and self._pool is not None and self._pool.owner is self._token:
                self._pool.share(name, value)

    def _map(self, function: Any, tasks: list[tuple[Any, ...]]) -> list[Any]:
        """``function(shared, *task)`` for every task, in order, in this process or spread over the workers.

        ``shared`` are the values given to ``_share``, by name.
        """
        if self.workers == 1:
            return [function(self._shared, *task) for task in tasks]
        with _pool_lock:
            pool = process_pool(self.workers)
            if pool is not self._pool or pool.owner is not self._token:  # new workers, or another engine used them
                self._pool, pool.owner = pool, self._token
                for name, value in self._shared.items():
                    pool.share(name, value)
            return pool.map(function, tasks)


@explain_key_errors
def _train(
    shared: dict[str, Any], training: Training, row: int, client_round: ClientRound, integer_buffers: Arrays
) -> tuple[ClientReport, Arrays]:
    """Train one client in a worker; returns its report, and its integer buffers separately.

    Both contain arrays and numbers instead of tensors, because torch would allocate shared memory for every tensor that
    is sent to another process. ``shared`` holds the problem and the cohort's buffers, of which the client has row
    ``row``.
    """
    problem: Problem = shared["problem"]
    tensors = to_tensors(integer_buffers, problem.device)
    report = train_client(problem, training, shared["cohort_buffers"], row, client_round, tensors)
    return report.with_numbers()._replace(integer_buffers={}), to_arrays(report.integer_buffers)


def _write_full_gradient(shared: dict[str, Any], training: Training, row: int, client_round: ClientRound) -> Cost:
    """Call ``write_full_gradient`` in a worker; ``shared`` holds the problem and the cohort's buffers."""
    return write_full_gradient(shared["problem"], training, shared["cohort_buffers"], row, client_round)


def evaluate_batch(shared: dict[str, Any], model: int, name: str, positions: Tensor) -> Arrays:
    """The task's metrics, summed over the examples of one batch.

    Args:
        shared: the ``problem``, the sets of ``examples`` by name, and ``models``: the weights and buffers of each model
            as one vector, and a list of their integer buffers.
        model: index of the model.
        name: name of the set of examples.
        positions: positions of the batch's examples in the set [batch].
    """
    problem: Problem = shared["problem"]
    vectors, integer_buffers = shared["models"]
    weights, buffers = torch.split(vectors[model], [problem.layout.size, problem.buffer_layout.size])
    examples: Examples = shared["examples"][name]
    named_buffers = {**problem.buffer_layout.views(buffers), **integer_buffers[model]}
    sums = problem.metric_sums(weights, named_buffers, examples.take(positions))
    return to_arrays({metric: value.double() for metric, value in sums.items()})


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch on one thread, so that sums do not depend on the machine and workers do not compete for cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class ProcessPool:
    """Worker processes that hold shared values by name and call functions with them.

    Attributes:
        owner: token of the engine whose values the workers hold; several engines may use the pool in turn.
        plugins: the plugins that the workers have loaded.
    """

    def __init__(self, workers: int) -> None:
        """Start ``workers`` processes, which load the plugins that this process has loaded so far."""
        self.children = [ChildProcess(_serve, environment=KEEPS_FREED_MEMORY) for _ in range(workers)]
        self.owner: object = None
        self.plugins = loaded_plugins()

    @property
    def is_alive(self) -> bool:
        """Whether every worker is running."""
        return bool(self.children) and all(child.is_alive for child in self.children)

    def share(self, name: str, value: object) -> None:
        """Send a value to every worker, under a name."""
        for child in self.children:
            child.send(("share", name, value))

    def map(self, function: Callable[..., Any], tasks: Iterable[tuple[Any, ...]]) -> list[Any]:
        """``function(shared, *task)`` for every task, spread over the workers; results are in the order of the tasks.

        ``shared`` are the values that the worker has received through ``share``, by name. Any exception, Ctrl-C
        included, stops the workers, because the next caller would receive their stale results.
        """
        waiting = deque(enumerate(tasks))
        results: list[Any] = [None] * len(waiting)
        busy: dict[ChildProcess, int] = {}  # the index of each child's task

        def start_next(child: ChildProcess) -> None:
            """Send the next waiting task, if any, to an idle worker."""
            if waiting:
                busy[child], task = waiting.popleft()
                child.send(("call", function, task))

        try:
            for child in self.children:
                start_next(child)
            while busy:
                for child in wait_for_any(busy):
                    failed, result = child.receive()
                    if failed:
                        raise result
                    results[busy.pop(child)] = result
                    start_next(child)
        except ChildDied as death:
            raise WorkerLost(
                f"a worker process {death}; use fewer workers (--workers 1) or a smaller batch size, "
                "then continue with fedflat resume"
            ) from None
        finally:
            if busy:  # only after an exception
                self.close(patience=0.2)
        return results

    def close(self, patience: float = PATIENCE) -> None:
        """Stop the workers; kill those that are still busy after ``patience`` seconds each."""
        close_children(self.children, patience)
        self.children = []


_pool: ProcessPool | None = None
_pool_lock = threading.RLock()
"""Held while the workers have values or tasks of one engine, because several threads may train at the same time."""


def process_pool(workers: int) -> ProcessPool:
    """The pool of ``workers`` processes that all engines of this process share.

    Starting a pool takes seconds, so it is replaced only if the number of workers or the loaded plugins have changed,
    or if a worker has died.
    """
    global _pool  # noqa: PLW0603
    is_usable = _pool is not None and _pool.is_alive and _pool.plugins == loaded_plugins()
    if _pool is None or len(_pool.children) != workers or not is_usable:
        if _pool is not None:
            _pool.close()
        else:
            # Not atexit, which does not run in multiprocessing's children: their workers would be killed during a task.
            # Not when this module is imported: a fork of the fork server forgets what was registered before it began.
            Finalize(None, _close_pool, exitpriority=0)
        _pool = ProcessPool(workers)
    return _pool


def _close_pool() -> None:
    """Stop the workers of this process; a second Ctrl-C kills them at once."""
    if _pool is not None:
        try:
            _pool.close()
        except KeyboardInterrupt:
            _pool.close(patience=0)


@contextmanager
def explain_full_shared_memory() -> Iterator[None]:
    """Replace torch's error for full shared memory, which is small in containers, by one that says what to change."""
    try:
        yield
    except RuntimeError as error:
        if "</torch_" not in str(error):  # the name of the file that torch could not create
            raise
        reason = str(error).rpartition(": ")[2].lower()
        raise WorkerLost(
            f"data and weights do not fit into the shared memory of the worker processes ({reason}); enlarge /dev/shm "
            "(in Docker with --shm-size=8g) or use --workers 1, then continue with fedflat resume"
        ) from None


def _serve(pipe: Connection) -> None:
    """Run a worker until the parent closes the pipe.

    A ``share`` message stores a value under a name; every other message calls a function with the stored values and a
    task. Answers each call with (failed, result), where the result of a failed call is its exception.
    """
    keep_freed_memory()
    shared: dict[str, Any] = {}
    while True:
        try:
            try:
                message = receive_from_parent(pipe)
            except UserError as error:  # e.g. the worker cannot import a class; the parent raises it as the next result
                pipe.send((True, error))
                continue
            if message[0] == "share":
                _, name, value = message
                shared[name] = value
                continue
            _, function, task = message
            try:
                pipe.send((False, function(shared, *task)))
            except Exception as error:  # raised again by the parent
                pipe.send((True, sendable_error(error)))
        except (EOFError, KeyboardInterrupt, ConnectionError, FileNotFoundError):  # the parent is gone, or its memory
            return
