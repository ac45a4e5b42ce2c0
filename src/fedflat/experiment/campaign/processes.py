"""Runs side by side, each in a process of its own with one thread.

A small model cannot keep several cores busy by itself: between two rounds workers wait for one another. Several runs of a comparison
can, and since nothing random depends on what ran before, they end as they would have in a row, bit by bit.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TextIO, cast

import torch
import torch.multiprocessing as multiprocessing

from fedflat.engines.cpu.worker_pool import keep_memory, start_without_main, use_cores
from fedflat.engines.round.contract import ModelState
from fedflat.errors import UserError
from fedflat.experiment.callback import Callback, RemoteCallback, RunProgress
from fedflat.experiment.campaign.registered_names import Told, learn, tell
from fedflat.experiment.config import Config
from fedflat.experiment.run import Run
from fedflat.experiment.store.record import Record
from fedflat.experiment.store.run_folder import RunFolder

PATIENCE = 2.0
"""Seconds that a process has to end by itself."""
SECONDS_BETWEEN_NEWS = 0.2
_WARNED: dict[str | tuple[str, type[Warning], int], int] = {}
"""Which warnings of other processes were given: each once, however many runs have it."""


Results = Generator[tuple[int, "Record | UserError"], None, None]


class Work(Protocol):
    """Whatever ends in a record, here or in another process."""

    @property
    def config(self) -> Config:
        """What is run."""

    @property
    def folder(self) -> Path | None:
        """Where."""

    @property
    def own(self) -> dict[str, Any] | None:
        """With what of the user's own."""

    def go(self, callbacks: tuple[Callback, ...]) -> Record:
        """Do it, in this process."""


class Job(NamedTuple):
    """A run to do."""

    config: Config
    folder: Path | None = None
    resume: bool = False
    own: dict[str, Any] | None = None
    """What the user brought in Python: data, model and task."""

    def run(self, callbacks: tuple[Callback, ...]) -> Run:
        """The run itself, in this process."""
        return Run(self.config, self.folder, callbacks=callbacks, resume=self.resume, **self.own or {})

    def go(self, callbacks: tuple[Callback, ...]) -> Record:
        """Do the run, in this process."""
        return self.run(callbacks).go()

    def __str__(self) -> str:
        return f"{self.config.algorithm}, seed {self.config.seed}"


class News(NamedTuple):
    """How far a run has come."""

    rounds: int
    newest: dict[str, Any] | None
    """Its last evaluation."""
    begins: dict[str, Any] | None = None
    """At its beginning: which model stands for it, and by which metric."""


class Warned(NamedTuple):
    """A warning, to be given where the comparison is."""

    message: str
    category: type[Warning]
    filename: str
    lineno: int


class DistantRun:
    """What can be seen of a run in another process."""

    def __init__(self, config: Config, primary: str, metric: str) -> None:
        self.config, self.primary, self.metric = config, primary, metric
        self.rounds = 0
        self.history: list[dict[str, Any]] = []

    def hear(self, news: News) -> None:
        """Take in how far it has come."""
        self.rounds = news.rounds
        self.history = [news.newest] if news.newest else []


@dataclass
class Process:
    """A process that does one job after another."""

    process: Any
    pipe: Connection
    device: str | None = None
    """The GPU that it alone sees."""
    number: int = -1
    """Of the job it has."""
    seen: DistantRun | None = None


def in_a_row(jobs: Sequence[Job], callbacks: tuple[Callback, ...]) -> Results:
    """Every job's number and record, one after another in this process; a mistake ends them all."""
    for number, job in enumerate(jobs):
        yield number, job.go(callbacks)


def side_by_side(
    jobs: Sequence[Work], at_once: int, callbacks: tuple[RemoteCallback, ...], devices: Sequence[str] = ()
) -> Results:
    """Every job's number and record, or why there is none, as they end; a job that fails does not stop the others.

    Where ``devices`` are named, every process sees one of these GPUs alone, the one with the fewest processes.
    """
    waiting = deque(range(len(jobs)))
    busy: dict[Connection, Process] = {}
    try:
        while busy or waiting:
            while waiting and len(busy) < at_once:
                taken = [one.device for one in busy.values()]
                one = start_process(_serve, device=min(devices, key=taken.count) if devices else None)
                busy[one.pipe] = one
                _give(one, jobs, waiting)
            for pipe in cast("list[Connection]", wait(list(busy))):
                one = busy[pipe]
                heard = _hear(one, jobs[one.number], callbacks)
                if heard is None:
                    continue
                yield one.number, heard
                if waiting and one.process.is_alive():
                    _give(one, jobs, waiting)
                else:
                    end_process(busy.pop(pipe))
    finally:
        for one in busy.values():
            end_process(one)


# --- here ------------------------------------------------------------------------------------------------------------------------


def start_process(serve: Callable[..., None], *arguments: object, device: str | None = None) -> Process:
    """A process of its own that calls ``serve`` with its end of a pipe, takes no notice of Ctrl-C and perhaps sees one GPU alone."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_knowing, args=(tell(), serve, theirs, *arguments), daemon=True)
    with _interruptions_ignored(), _seeing(device):
        start_without_main(process)
    theirs.close()
    return Process(process, ours, device)


@contextmanager
def _seeing(device: str | None) -> Iterator[None]:
    """Let a process that is started in here see one GPU alone."""
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    if device is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = device
    try:
        yield
    finally:
        if device is not None:
            os.environ.pop("CUDA_VISIBLE_DEVICES")
            os.environ |= {} if before is None else {"CUDA_VISIBLE_DEVICES": before}


def _give(one: Process, jobs: Sequence[Work], waiting: deque[int]) -> None:
    one.number, one.seen = waiting.popleft(), None
    try:
        one.pipe.send(jobs[one.number])
    except ConnectionError:  # it has ended meanwhile, which is noticed when it is listened to
        return


def _hear(one: Process, job: Work, callbacks: tuple[RemoteCallback, ...]) -> Record | UserError | None:
    """What came of a job, None while it goes on."""
    try:
        message = one.pipe.recv()
    except (EOFError, ConnectionError):
        one.process.join(PATIENCE)
        killed = (one.process.exitcode or 0) < 0
        return UserError(
            f"its process {'was killed, most likely because memory ran out' if killed else 'ended unexpectedly'}"
        )
    if isinstance(message, News):
        _tell(one, job, message, callbacks)
        return None
    if isinstance(message, Warned):
        warnings.warn_explicit(*message, registry=_WARNED)
        return None
    if isinstance(message, Record):
        record = _unpacked(message, job)
        if one.seen is not None:
            one.seen.hear(
                News(
                    record.history[-1]["round"] if record.history else 0, record.history[-1] if record.history else None
                )
            )
            for callback in callbacks:
                callback.ended(one.seen, record)
        return record
    if isinstance(message, UserError):
        return message
    raise message


def _tell(one: Process, job: Work, news: News, callbacks: tuple[RemoteCallback, ...]) -> None:
    if news.begins is not None:
        one.seen = DistantRun(job.config, **news.begins)
        one.seen.hear(news)
        for callback in callbacks:
            callback.began(one.seen)
    elif one.seen is not None:
        one.seen.hear(news)
        for callback in callbacks:
            callback.evaluated(one.seen)
            callback.round_done(one.seen)


def end_process(one: Process) -> None:
    """End a process, by force where it does not end by itself."""
    one.pipe.close()
    one.process.join(PATIENCE)
    if one.process.is_alive():  # in the middle of a round; what it has written is whole
        one.process.kill()
        one.process.join()


@contextmanager
def _interruptions_ignored() -> Iterator[None]:
    """Let a process that is started in here take no notice of Ctrl-C: this one does, and then ends it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


# --- there -----------------------------------------------------------------------------------------------------------------------


class Reporter(RemoteCallback):
    """Sends news of a run, not too often."""

    def __init__(self, send: Callable[[object], None]) -> None:
        self._send, self._last = send, 0.0

    def began(self, run: RunProgress) -> None:
        self._send(_news(run)._replace(begins={"primary": run.primary, "metric": run.metric}))

    def round_done(self, run: RunProgress) -> None:
        if not run.config.is_evaluated(run.rounds):  # else there will be more to tell in a moment
            self.evaluated(run)

    def evaluated(self, run: RunProgress) -> None:
        now = time.monotonic()
        if now - self._last > SECONDS_BETWEEN_NEWS:
            self._last = now
            self._send(_news(run))


def _news(run: RunProgress) -> News:
    return News(run.rounds, run.history[-1] if run.history else None)


def _knowing(told: Told, serve: Callable[..., None], *arguments: object) -> None:
    learn(told)
    serve(*arguments)


def alone_on_a_core() -> None:
    """Let this process use one core, since others are as busy beside it."""
    torch.set_num_threads(1)
    use_cores(1)
    keep_memory()


def _serve(pipe: Connection) -> None:
    alone_on_a_core()
    try:
        while True:
            job: Work = pipe.recv()
            try:
                with _warnings_sent(pipe.send):
                    answer: object = _packed(job.go((Reporter(pipe.send),)))
            except ConnectionError:
                return
            except (
                Exception
            ) as error:  # a mistake of the user's, or one of ours that is raised again where the comparison is
                answer = error
            pipe.send(answer)
    except (EOFError, ConnectionError, KeyboardInterrupt):
        return


@contextmanager
def _warnings_sent(send: Callable[[object], None]) -> Iterator[None]:
    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        known = category if category.__module__ == "builtins" else UserWarning  # another may not travel
        send(Warned(str(message), known, filename, lineno))

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


def _packed(record: Record) -> Record:
    """A record to be sent: tensors as arrays, since a tensor would only be borrowed from a process that may end."""
    models = {name: _each(model, lambda tensor: tensor.cpu().numpy()) for name, model in record.models.items()}
    return replace(record, models=models, folder=None, own={})


def _unpacked(record: Record, job: Work) -> Record:
    models = {name: _each(model, torch.from_numpy) for name, model in record.models.items()}
    own = {what: (job.own or {}).get(what) for what in ("data", "model", "task")}
    return replace(record, models=models, folder=RunFolder(job.folder) if job.folder else None, own=own)


def _each(model: ModelState, change: Callable[[Any], Any]) -> ModelState:
    return ModelState(
        change(model.weights), change(model.buffers), {name: change(value) for name, value in model.integers.items()}
    )
