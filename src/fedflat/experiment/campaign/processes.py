"""Run tasks in sequence, or in parallel with one single-threaded child process each.

A run of a small model cannot keep several cores busy, because its workers wait for one another between rounds. Several
runs can. No random number depends on earlier runs, so parallel runs are bit-identical to sequential ones.
"""

from __future__ import annotations

import pickle
import re
import time
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TextIO

import torch

from fedflat.algorithms import composition
from fedflat.data import DATASETS
from fedflat.data.sources.user_function import FunctionSource
from fedflat.engines.round.contract import ModelState
from fedflat.errors import GpuFailed, SomeFailed, UserError
from fedflat.experiment.callback import Callback, RemoteCallback, RunProgress
from fedflat.experiment.config import Config
from fedflat.experiment.store.run_folder import Record, RunFolder
from fedflat.models import MODELS
from fedflat.operating_system import KEEPS_FREED_MEMORY, keep_freed_memory
from fedflat.processes import (
    ChildDied,
    ChildProcess,
    close_children,
    is_sendable,
    receive_from_parent,
    sendable_error,
    use_cores,
    wait_for_any,
)

PATIENCE = 2.0
"""Seconds that a child process has to exit by itself before it is killed; a killed run can be resumed."""
SECONDS_BETWEEN_UPDATES = 0.2
_SHOWN_WARNINGS: dict[str | tuple[str, type[Warning], int], int] = {}
"""Registry of warnings from child processes, which ensures that each is shown once even if several runs raise it."""

Results = Generator[tuple[int, "Record | UserError"], None, None]
"""Yields, for each task, its index and its record, or the error that stopped it."""

PickledNames = list[bytes]
"""(name, component) pairs, pickled one by one so that one failed import does not affect the others."""


class RunTask(Protocol):
    """A task that executes a run and can be sent to another process."""

    @property
    def config(self) -> Config:
        """The experiment."""

    @property
    def folder(self) -> Path | None:
        """The run's folder, if it is saved."""

    @property
    def user_objects(self) -> dict[str, Any] | None:
        """User-supplied dataset, model and task."""

    def execute(self, callbacks: tuple[Callback, ...]) -> Record:
        """Execute the run in this process and return its record."""


class RunUpdate(NamedTuple):
    """Progress of a run in another process."""

    rounds: int
    """Number of completed rounds."""
    evaluation: dict[str, Any] | None
    """The newest evaluation."""
    started: dict[str, Any] | None = None
    """Only in the first update: the primary model and metric, as arguments of ``DistantRun``."""


class RunWarning(NamedTuple):
    """A warning to show in the parent process: the arguments of ``warnings.warn_explicit``."""

    message: str
    category: type[Warning]
    filename: str
    lineno: int


class DistantRun:
    """The view that callbacks have of a run in another process."""

    def __init__(self, config: Config, primary: str, metric: str) -> None:
        self.config, self.primary, self.metric = config, primary, metric
        self.rounds = 0
        self.history: list[dict[str, Any]] = []

    def update(self, rounds: int, evaluation: dict[str, Any] | None) -> None:
        """Set the number of finished rounds and the newest evaluation."""
        self.rounds = rounds
        self.history = [evaluation] if evaluation else []


def start_process(serve: Callable[..., None], *args: object, device: str | None = None) -> ChildProcess:
    """Start a process that calls ``serve(pipe, *args)`` on one core, with the names registered here.

    Args:
        serve: function to call in the child.
        args: picklable arguments.
        device: the only GPU that the child sees; default: it sees all.
    """
    environment = KEEPS_FREED_MEMORY | ({} if device is None else {"CUDA_VISIBLE_DEVICES": device})
    return ChildProcess(_serve_on_one_core, pickled_names(), serve, *args, environment=environment)


def run_in_sequence(tasks: Sequence[RunTask], callbacks: tuple[Callback, ...]) -> Results:
    """Run tasks one after another in this process; yields the index of each with its record or ``UserError``."""
    for index, task in enumerate(tasks):
        try:
            yield index, task.execute(callbacks)
        except GpuFailed:  # later runs in this process would fail, too
            raise
        except UserError as error:
            yield index, error


def run_in_parallel(
    tasks: Sequence[RunTask], at_once: int, callbacks: tuple[RemoteCallback, ...], devices: Sequence[str] = ()
) -> Results:
    """Run tasks in child processes; yields the index of each with its record or error, in the order in which they end.

    Args:
        tasks: tasks to run; one that fails does not stop the others.
        at_once: number of processes.
        callbacks: callbacks that can observe runs in other processes.
        devices: GPUs to use; a new process sees only the one with the fewest processes. Default: it sees all.
    """
    waiting = deque(range(len(tasks)))
    workers: dict[ChildProcess, _Worker] = {}
    try:
        while workers or waiting:
            while waiting and len(workers) < at_once:
                used = [worker.device for worker in workers.values()]
                device = min(devices, key=used.count) if devices else None
                child = start_process(_serve_tasks, device=device)
                workers[child] = _Worker(child, device)
                workers[child].start_task(waiting.popleft(), tasks)
            for child in wait_for_any(workers):
                worker = workers[child]
                outcome = worker.handle_message(tasks[worker.index], callbacks)
                if outcome is None:
                    continue
                yield worker.index, outcome
                if waiting and child.is_alive and not isinstance(outcome, GpuFailed):
                    worker.start_task(waiting.popleft(), tasks)
                else:
                    del workers[child]
                    close_children([child], PATIENCE)
    finally:
        close_children(workers, PATIENCE)


@dataclass
class _Worker:
    """A process that runs one task after another."""

    child: ChildProcess
    device: str | None
    """The only GPU that the process sees; None: it sees all."""
    index: int = -1
    """Index of its current task."""
    run: DistantRun | None = None
    """The current run as callbacks see it; None until its first update arrives."""

    def start_task(self, index: int, tasks: Sequence[RunTask]) -> None:
        """Send the process its next task."""
        self.index, self.run = index, None
        self.child.send(tasks[index])

    def handle_message(self, task: RunTask, callbacks: tuple[RemoteCallback, ...]) -> Record | UserError | None:
        """Handle the process's next message; returns the task's record or error, or None while it is running."""
        try:
            message = self.child.receive()
        except ChildDied as death:
            return SomeFailed(f"its process {death}")
        if isinstance(message, RunUpdate):
            self._apply_update(task, message, callbacks)
            return None
        if isinstance(message, RunWarning):
            warnings.warn_explicit(*message, registry=_SHOWN_WARNINGS)
            return None
        if isinstance(message, Record):
            record = _from_message(message, task)
            if self.run is not None:
                last_evaluation = record.history[-1] if record.history else None
                self.run.update(last_evaluation["round"] if last_evaluation else 0, last_evaluation)
                for callback in callbacks:
                    callback.ended(self.run, record)
            return record
        if isinstance(message, UserError):
            return message
        # Any other message is an unexpected exception of the child.
        raise message

    def _apply_update(self, task: RunTask, update: RunUpdate, callbacks: tuple[RemoteCallback, ...]) -> None:
        """Notify callbacks of a run's progress; the first update of a run says that it has ``started``."""
        if update.started is not None:
            self.run = DistantRun(task.config, **update.started)
        if self.run is None:
            return
        has_new_evaluation = update.evaluation not in (None, *self.run.history)
        self.run.update(update.rounds, update.evaluation)
        for callback in callbacks:
            if update.started is not None:
                callback.began(self.run)
                continue
            if has_new_evaluation:
                callback.evaluated(self.run)
            callback.round_done(self.run)


class Reporter(RemoteCallback):
    """Sends updates of a run to the parent process, at most one every ``SECONDS_BETWEEN_UPDATES``."""

    def __init__(self, send: Callable[[object], None]) -> None:
        self._send, self._last_sent = send, 0.0

    def began(self, run: RunProgress) -> None:
        self._send(_update(run)._replace(started={"primary": run.primary, "metric": run.metric}))

    def round_done(self, run: RunProgress) -> None:
        if not run.config.is_evaluated(run.rounds):  # otherwise an evaluation follows at once
            self.evaluated(run)

    def evaluated(self, run: RunProgress) -> None:
        now = time.monotonic()
        if now - self._last_sent > SECONDS_BETWEEN_UPDATES:
            self._last_sent = now
            self._send(_update(run))


def _update(run: RunProgress) -> RunUpdate:
    return RunUpdate(run.rounds, run.history[-1] if run.history else None)


def _serve_on_one_core(pipe: Connection, names: PickledNames, serve: Callable[..., None], *args: object) -> None:
    """Main function of every child: set it up as a single-core process, then call ``serve``."""
    register_names(names)
    use_cores(1)
    keep_freed_memory()  # freed memory is reused by the next training step
    serve(pipe, *args)


def _serve_tasks(pipe: Connection) -> None:
    """Run tasks until the parent closes the pipe; answer each with a record or an exception."""
    with suppress(EOFError, ConnectionError, KeyboardInterrupt):
        while True:
            pipe.send(_run_next_task(pipe))


def _run_next_task(pipe: Connection) -> Record | Exception:
    """Wait for a task and run it, sending updates and warnings; returns the record or error to send."""
    try:
        task: RunTask = receive_from_parent(pipe)
    except UserError as error:
        return error  # e.g. an object of the task cannot be loaded in this process
    try:
        with _warnings_sent(pipe.send):
            return _as_message(task.execute((Reporter(pipe.send),)))
    except ConnectionError:  # the parent is gone
        raise
    except Exception as error:  # the parent lists a UserError among the results and raises anything else
        return sendable_error(error)


@contextmanager
def _warnings_sent(send: Callable[[object], None]) -> Iterator[None]:
    """Send warnings to the parent instead of printing them."""

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        """Replace ``warnings.showwarning``: send the warning to the parent process."""
        # The parent may be unable to import another package's warning class.
        known_category = category if category.__module__ == "builtins" else UserWarning
        send(RunWarning(str(message), known_category, filename, lineno))

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


def _as_message(record: Record) -> Record:
    """The record to send, with arrays for tensors: torch would share their memory with a child that may soon exit."""
    models = {name: _map_tensors(model, lambda tensor: tensor.cpu().numpy()) for name, model in record.models.items()}
    return replace(record, models=models, folder=None, user_objects={})


def _from_message(record: Record, task: RunTask) -> Record:
    """The record that a child process sent, with tensors again, and the task's folder and user-supplied objects."""
    models = {name: _map_tensors(model, torch.from_numpy) for name, model in record.models.items()}
    user_objects = {name: (task.user_objects or {}).get(name) for name in ("data", "model", "task")}
    folder = RunFolder(task.folder) if task.folder else None
    return replace(record, models=models, folder=folder, user_objects=user_objects)


def _map_tensors(model: ModelState, function: Callable[[Any], Any]) -> ModelState:
    integer_buffers = {name: function(value) for name, value in model.integer_buffers.items()}
    return ModelState(function(model.weights), function(model.buffers), integer_buffers)


def pickled_names() -> PickledNames:
    """The registered names whose components can be sent to another process."""
    return [pickle.dumps(pair) for pair in _registered().items() if is_sendable(pair)]


def register_names(names: PickledNames) -> None:
    """Register names from another process; a component that cannot be imported here is reported when it is used."""
    for pickled in names:
        with suppress(Exception):
            name, component = pickle.loads(pickled)
            composition.register(name, component)


def unsendable_names(configs: Iterable[Config]) -> list[str]:
    """Names used in ``configs`` whose components the running script defines, which no other process can import."""
    local = {name for name, component in _registered().items() if not is_sendable(component)}
    texts = " ".join(f"{config.algorithm} {config.model} {config.data.dataset}" for config in configs)
    return sorted(local.intersection(re.findall(r"[\w-]+", texts)))


def _registered() -> dict[str, Any]:
    """User-registered algorithms, parts, models and datasets, by name."""
    models = {name: spec for name, spec in MODELS.items() if not spec.__module__.startswith("fedflat.")}
    datasets = {name: source.function for name, source in DATASETS.items() if isinstance(source, FunctionSource)}
    return composition.registered() | models | datasets
