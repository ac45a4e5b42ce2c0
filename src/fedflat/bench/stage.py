"""A contender in a process of its own, which does a round when it is asked to: memory, settings and threads are its own, and rounds of
several contenders can take turns, so that a busy machine is as busy for one as for another."""

from __future__ import annotations

import itertools
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import ClassVar, NamedTuple

import torch
import torch.multiprocessing as multiprocessing

from fedflat.bench.machine import host_memory, rest
from fedflat.bench.setting import Setting
from fedflat.engines.cpu.worker_pool import start_without_main
from fedflat.errors import UserError

PATIENCE = 20.0
"""Seconds that a process has to end by itself."""


@dataclass(frozen=True)
class Contender(ABC):
    """A way to do the rounds of a setting."""

    setting: Setting
    algorithm: str = "fedavg"
    precision: str = "float32"
    engine: str = ""
    clients: int = 100
    name: ClassVar[str]

    @abstractmethod
    def perform(self, stage: Stage) -> None:
        """Set up, then do rounds without end and say after each that it is done."""

    def __str__(self) -> str:
        clients = f"{self.clients:,} clients" if self.algorithm else ""
        return ", ".join(word for word in (self.name, self.algorithm, self.precision, self.engine, clients) if word)


class Enough(Exception):
    """No more rounds are wanted."""


class Done(NamedTuple):
    """What came of some rounds."""

    seconds: list[float]
    device_bytes: int | None
    """The most that was ever reserved on the GPU."""


class Failed(NamedTuple):
    """Why there will be no more rounds."""

    sentence: str


class Stage:
    """Where a contender says that a round is done, and waits until another is wanted.

    On a GPU the end of a round is marked in the queue of its work: waiting for it would keep the next round from being prepared.
    """

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self.wait()

    def wait(self) -> None:
        """Wait until rounds are wanted."""
        try:
            self._wanted = int(self._pipe.recv())
        except EOFError:
            self._wanted = 0
        if not self._wanted:
            raise Enough
        self._began = time.perf_counter()
        self._ends: list[float] = []
        self._start = _mark() if _on_gpu() else None
        self._marks: list[torch.cuda.Event] = []

    def round_done(self) -> None:
        """Note how long a round took; the first one's time has the set-up in it."""
        if _on_gpu():
            self._marks.append(_mark())
            if len(self._marks) == self._wanted:
                torch.cuda.synchronize()
        self._ends.append(time.perf_counter() - self._began)
        if len(self._ends) == self._wanted:
            self._pipe.send(Done(self._seconds(), torch.cuda.max_memory_reserved() if _on_gpu() else None))
            self.wait()

    def _seconds(self) -> list[float]:
        if self._start is None:
            return [end - before for before, end in itertools.pairwise([0.0, *self._ends])]
        return [before.elapsed_time(end) / 1000 for before, end in itertools.pairwise([self._start, *self._marks])]


def _on_gpu() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _mark() -> torch.cuda.Event:
    mark = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    mark.record()
    return mark


class Performer:
    """A contender at work in its process."""

    def __init__(self, contender: Contender) -> None:
        self.contender = contender
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_perform, args=(theirs, contender))
        start_without_main(self._process)
        theirs.close()

    def rounds(self, count: int) -> Done | Failed:
        """Let it do some rounds."""
        self.begin(count)
        return self.done()

    def begin(self, count: int) -> None:
        """Let it begin some rounds."""
        with suppress(ConnectionError):  # it has ended, as ``done`` will say
            self._pipe.send(count)

    def done(self) -> Done | Failed:
        """What came of the rounds that it was to do."""
        try:
            answer: Done | Failed = self._pipe.recv()
        except (EOFError, ConnectionError):
            self._process.join(PATIENCE)
            killed = (self._process.exitcode or 0) < 0
            return Failed("was killed, most likely because memory ran out" if killed else "ended unexpectedly")
        return answer

    def rest(self, resting: bool = True) -> None:
        """Let its processes lie still while another is measured, or go on."""
        if self._process.pid:
            rest(self._process.pid, resting)

    def host_bytes(self) -> int | None:
        """The most memory that its processes have had."""
        return host_memory(self._process.pid) if self._process.pid else None

    def end(self) -> None:
        """Let it go."""
        self.rest(False)
        self._pipe.close()
        self._process.join(PATIENCE)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _perform(pipe: Connection, contender: Contender) -> None:
    torch.set_num_threads(1)
    try:
        contender.perform(Stage(pipe))
        failure = Failed("ended before its time")
    except (Enough, KeyboardInterrupt):
        return
    except UserError as mistake:
        failure = Failed(str(mistake))
    except torch.OutOfMemoryError:
        failure = Failed("ran out of GPU memory; lower --clients-per-round or --batch-size, or choose a smaller model")
    except Exception as error:  # one contender that breaks must not take the measurements of the others with it
        failure = Failed(f"broke: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
    try:
        pipe.send(failure)
    except ConnectionError:
        return
