"""Runs side by side, each in a child process with one thread.

A small model cannot keep several cores busy: between rounds its workers wait for one another. Several runs can. No
random number depends on what ran before, so parallel runs are bit-identical to sequential ones.
"""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TextIO

import torch

from fedflat.engines.round.contract import ModelState
from fedflat.errors import UserError
from fedflat.experiment.callback import Callback, RemoteCallback, RunProgress
from fedflat.experiment.campaign.registered_names import PickledNames, pickled_names, register_names
from fedflat.experiment.config import Config
from fedflat.experiment.run import Run
from fedflat.experiment.store.run_folder import Record, RunFolder
from fedflat.processes import ChildDied, ChildProcess, close_children, keep_memory, use_cores, wait_for_any

PATIENCE = 2.0
"""Seconds that a process has to exit by itself; a run that is killed can be resumed."""
SECONDS_BETWEEN_UPDATES = 0.2
_SHOWN_WARNINGS: dict[str | tuple[str, type[Warning], int], int] = {}
"""Registry of warnings from other processes: each is shown once, however many runs raise it."""

Results = Generator[tuple[int, "Record | UserError"], None, None]
"""Yields the index of a task with its record, or with the error that stopped it."""


class RunTask(Protocol):
    """Anything that ends in a record and can be sent to another process."""

    @property
    def config(self) -> Config:
        """The experiment."""

    @property
    def folder(self) -> Path | None:
        """The run's folder, if it is saved."""

    @property
    def user_objects(self) -> dict[str, Any] | None:
        """User-supplied dataset, model and task."""

    def go(self, callbacks: tuple[Callback, ...]) -> Record:
        """Run it in this process."""


class RunJob(NamedTuple):
    """A run to start, or to resume."""

    config: Config
    folder: Path | None = None
    resume: bool = False
    user_objects: dict[str, Any] | None = None

    def go(self, callbacks: tuple[Callback, ...]) -> Record:
        """Run it in this process."""
        run = Run(self.config, self.folder, callbacks=callbacks, resume=self.resume, **self.user_objects or {})
        return run.go()

    def __str__(self) -> str:
        return f"{self.config.algorithm}, seed {self.config.seed}"


class RunUpdate(NamedTuple):
    """How far a run has come."""

    rounds: int
    evaluation: dict[str, Any] | None
    """The newest evaluation."""
    started: dict[str, Any] | None = None
    """With the first update: the name of the primary model and of its metric."""


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
        device: the only GPU that the child sees; all of them by default.
    """
    environment = {} if device is None else {"CUDA_VISIBLE_DEVICES": device}
    return ChildProcess(_serve_on_one_core, pickled_names(), serve, *args, environment=environment)


def in_sequence(jobs: Sequence[RunJob], callbacks: tuple[Callback, ...]) -> Results:
    """Run jobs one after another in this process; the first error stops them all."""
    for index, job in enumerate(jobs):
        yield index, job.go(callbacks)


def side_by_side(
    tasks: Sequence[RunTask], at_once: int, callbacks: tuple[RemoteCallback, ...], devices: Sequence[str] = ()
) -> Results:
    """Run tasks in ``at_once`` processes and yield results as they arrive; a task that fails does not stop the others.

    With ``devices``, every process sees one of these GPUs: the one with the fewest processes.
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
                workers[child].begin(waiting.popleft(), tasks)
            for child in wait_for_any(workers):
                worker = workers[child]
                outcome = worker.outcome(tasks[worker.index], callbacks)
                if outcome is None:
                    continue
                yield worker.index, outcome
                if waiting and child.is_alive:
                    worker.begin(waiting.popleft(), tasks)
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
    index: int = -1
    """Of its current task."""
    run: DistantRun | None = None

    def begin(self, index: int, tasks: Sequence[RunTask]) -> None:
        """Send it a task."""
        self.index, self.run = index, None
        self.child.send(tasks[index])

    def outcome(self, task: RunTask, callbacks: tuple[RemoteCallback, ...]) -> Record | UserError | None:
        """Handle the next message; returns the task's record or error, or None while it is running."""
        try:
            message = self.child.receive()
        except ChildDied as death:
            return UserError(f"its process {death}")
        if isinstance(message, RunUpdate):
            self._notify(task, message, callbacks)
            return None
        if isinstance(message, RunWarning):
            warnings.warn_explicit(*message, registry=_SHOWN_WARNINGS)
            return None
        if isinstance(message, Record):
            record = _unpacked(message, task)
            if self.run is not None:
                newest = record.history[-1] if record.history else None
                self.run.update(newest["round"] if newest else 0, newest)
                for callback in callbacks:
                    callback.ended(self.run, record)
            return record
        if isinstance(message, UserError):
            return message
        raise message

    def _notify(self, task: RunTask, update: RunUpdate, callbacks: tuple[RemoteCallback, ...]) -> None:
        if update.started is not None:
            self.run = DistantRun(task.config, **update.started)
        if self.run is None:
            return
        self.run.update(update.rounds, update.evaluation)
        for callback in callbacks:
            if update.started is not None:
                callback.began(self.run)
            else:
                callback.evaluated(self.run)
                callback.round_done(self.run)


class Reporter(RemoteCallback):
    """Sends updates of a run, at most one every ``SECONDS_BETWEEN_UPDATES``."""

    def __init__(self, send: Callable[[object], None]) -> None:
        self._send, self._last = send, 0.0

    def began(self, run: RunProgress) -> None:
        self._send(_update(run)._replace(started={"primary": run.primary, "metric": run.metric}))

    def round_done(self, run: RunProgress) -> None:
        if not run.config.is_evaluated(run.rounds):  # otherwise an evaluation follows at once
            self.evaluated(run)

    def evaluated(self, run: RunProgress) -> None:
        now = time.monotonic()
        if now - self._last > SECONDS_BETWEEN_UPDATES:
            self._last = now
            self._send(_update(run))


def _update(run: RunProgress) -> RunUpdate:
    return RunUpdate(run.rounds, run.history[-1] if run.history else None)


def _serve_on_one_core(pipe: Connection, names: PickledNames, serve: Callable[..., None], *args: object) -> None:
    register_names(names)
    use_cores(1)
    keep_memory()
    serve(pipe, *args)


def _serve_tasks(pipe: Connection) -> None:
    try:
        while True:
            task: RunTask = pipe.recv()
            try:
                with _warnings_sent(pipe.send):
                    answer: object = _packed(task.go((Reporter(pipe.send),)))
            except ConnectionError:
                return
            except Exception as error:  # the parent returns a UserError and raises anything else
                answer = error
            pipe.send(answer)
    except (EOFError, ConnectionError, KeyboardInterrupt):
        return


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
        # The parent may be unable to import another package's warning class.
        sendable = category if category.__module__ == "builtins" else UserWarning
        send(RunWarning(str(message), sendable, filename, lineno))

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


def _packed(record: Record) -> Record:
    """The record with arrays for tensors, whose memory would be shared with a process that is about to exit."""
    models = {name: _mapped(model, lambda tensor: tensor.cpu().numpy()) for name, model in record.models.items()}
    return replace(record, models=models, folder=None, own={})


def _unpacked(record: Record, task: RunTask) -> Record:
    models = {name: _mapped(model, torch.from_numpy) for name, model in record.models.items()}
    own = {name: (task.user_objects or {}).get(name) for name in ("data", "model", "task")}
    return replace(record, models=models, folder=RunFolder(task.folder) if task.folder else None, own=own)


def _mapped(model: ModelState, function: Callable[[Any], Any]) -> ModelState:
    integers = {name: function(value) for name, value in model.integers.items()}
    return ModelState(function(model.weights), function(model.buffers), integers)
