"""Contenders in child processes that do rounds on demand.

Each has its own memory, settings and threads. Contenders can take turns, so that other load on the machine affects all
alike.
"""

from __future__ import annotations

import itertools
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import ClassVar, NamedTuple

import torch

from fedflat.bench.machine import host_memory, set_paused
from fedflat.bench.setting import BenchmarkSetting
from fedflat.errors import UserError
from fedflat.processes import ChildDied, ChildProcess, close_children

PATIENCE = 20.0
"""Seconds that a contender has to exit by itself."""
MAX_ERROR_LENGTH = 300
"""Characters of an unexpected error that are reported."""


@dataclass(frozen=True)
class Contender(ABC):
    """An implementation of federated rounds that can be measured."""

    setting: BenchmarkSetting
    algorithm: str = "fedavg"
    precision: str = "float32"
    engine: str = ""
    clients: int = 100
    name: ClassVar[str]

    @abstractmethod
    def perform(self, stage: Stage) -> None:
        """Set up, then do rounds forever and call ``stage.round_done()`` after each; the stage raises ``Enough``."""

    def __str__(self) -> str:
        clients = f"{self.clients:,} clients" if self.algorithm else ""
        return ", ".join(word for word in (self.name, self.algorithm, self.precision, self.engine, clients) if word)


class Enough(Exception):
    """No more rounds are needed."""


class RoundTimes(NamedTuple):
    """The measured rounds of one request."""

    seconds: list[float]
    device_bytes: int | None
    """Peak of reserved GPU memory."""


class Failed(NamedTuple):
    """A contender that cannot do more rounds."""

    reason: str


class Stage:
    """Times the rounds of a contender and blocks it between requests.

    On a GPU, rounds are timed with events: synchronising after each round would delay the preparation of the next.
    """

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._wait_for_request()

    def _wait_for_request(self) -> None:
        """Wait until a number of rounds is requested; raises ``Enough`` if there is no further request."""
        try:
            self._requested = int(self._pipe.recv())
        except EOFError:
            self._requested = 0
        if not self._requested:
            raise Enough
        self._start_time = time.perf_counter()
        self._end_times: list[float] = []
        self._start_event = _recorded_event() if _on_gpu() else None
        self._events: list[torch.cuda.Event] = []

    def round_done(self) -> None:
        """Record the end of a round; the time of the first includes the set-up."""
        if _on_gpu():
            self._events.append(_recorded_event())
            if len(self._events) == self._requested:
                torch.cuda.synchronize()
        self._end_times.append(time.perf_counter() - self._start_time)
        if len(self._end_times) == self._requested:
            self._pipe.send(RoundTimes(self._seconds(), torch.cuda.max_memory_reserved() if _on_gpu() else None))
            self._wait_for_request()

    def _seconds(self) -> list[float]:
        """The duration of every round of the current request."""
        if self._start_event is None:
            return [end - start for start, end in itertools.pairwise([0.0, *self._end_times])]
        events = [self._start_event, *self._events]
        return [start.elapsed_time(end) / 1000 for start, end in itertools.pairwise(events)]


def _on_gpu() -> bool:
    """Whether this process has used a GPU so far."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _recorded_event() -> torch.cuda.Event:
    """An event at the current end of the GPU's queue."""
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


class Performer:
    """A contender in its own process, seen from the process that measures."""

    def __init__(self, contender: Contender) -> None:
        self.contender = contender
        # Not daemonic: contenders start workers of their own.
        self._child = ChildProcess(_perform, contender, daemon=False)

    def rounds(self, count: int) -> RoundTimes | Failed:
        """Do ``count`` rounds and wait for the times."""
        self.start_rounds(count)
        return self.wait_for_rounds()

    def start_rounds(self, count: int) -> None:
        """Start ``count`` rounds without waiting."""
        self._child.send(count)

    def wait_for_rounds(self) -> RoundTimes | Failed:
        """Wait for the rounds that were started."""
        try:
            answer: RoundTimes | Failed = self._child.receive()
        except ChildDied as death:
            return Failed(str(death))
        return answer

    def pause(self) -> None:
        """Stop the contender's processes while another contender is measured."""
        set_paused(self._child.pid, True)

    def resume(self) -> None:
        """Continue the contender's processes."""
        set_paused(self._child.pid, False)

    def host_bytes(self) -> int | None:
        """Peak memory of the contender's processes."""
        return host_memory(self._child.pid)

    def end(self) -> None:
        """End the contender's process."""
        self.resume()
        close_children([self._child], PATIENCE)


def _perform(pipe: Connection, contender: Contender) -> None:
    """Main function of a contender's process: do rounds on request and send their times, or the reason of a failure."""
    try:
        contender.perform(Stage(pipe))
        failure = Failed("stopped too early")
    except (Enough, KeyboardInterrupt):
        return
    except UserError as error:
        failure = Failed(str(error))
    except torch.OutOfMemoryError:
        failure = Failed("ran out of GPU memory; lower --clients-per-round or --batch-size, or choose a smaller model")
    except Exception as error:  # a contender that breaks must not stop the others
        failure = Failed(f"broke: {type(error).__name__}: {' '.join(str(error).split())[:MAX_ERROR_LENGTH]}")
    try:
        pipe.send(failure)
    except ConnectionError:
        return
