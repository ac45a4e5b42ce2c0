"""Contenders, the implementations that a benchmark compares, in child processes that train rounds on demand.

Each process has its own memory, settings and threads. Contenders can take turns, so that other load on the machine
affects all alike.
"""

from __future__ import annotations

import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
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
class Contender:
    """An implementation of federated rounds that can be measured."""

    setting: BenchmarkSetting
    algorithm: str = "fedavg"
    """The algorithm; empty for the bound, which has none."""
    precision: str = "float32"
    engine: str = ""
    """Engine of fedflat, or ``compiled`` or ``eager`` for the bound; empty for the others."""
    clients: int = 100
    """Number of clients in the federation."""
    name: ClassVar[str]
    """Name of the contender in the table."""

    def __str__(self) -> str:
        clients = f"{self.clients:,} clients" if self.algorithm else ""
        return ", ".join(word for word in (self.name, self.algorithm, self.precision, self.engine, clients) if word)


@dataclass(frozen=True)
class LocalContender(Contender, ABC):
    """A contender that needs nothing but fedflat and runs in this Python environment."""

    @abstractmethod
    def run_rounds(self, timer: RoundTimer) -> None:
        """Set up, then train one round after another and call ``timer.round_done`` after each.

        The loop has no other exit: ``round_done`` raises ``NoMoreRounds`` once all requested rounds are timed.
        """


class NoMoreRounds(Exception):
    """Raised by ``RoundTimer`` to end a contender once no more rounds are requested."""


class RoundTimes(NamedTuple):
    """The measured rounds of one request."""

    seconds: list[float]
    device_bytes: int | None
    """Peak of reserved GPU memory since the start, without the memory that computing the loss needs."""
    loss: float | None = None
    """Training loss after these rounds, which shows whether contenders do the same work."""
    loss_cpu_seconds: float = 0.0
    """CPU time of computing the loss, which is not part of the rounds."""
    cpu_seconds: float | None = None
    """CPU time of all these rounds in all processes of the contender; the measuring process adds it."""


class Failed(NamedTuple):
    """A contender that cannot train further rounds."""

    reason: str


class RoundTimer:
    """Times the rounds of a contender, in the contender's process.

    The measuring process requests a number of rounds through a pipe. When these are done, ``round_done`` sends their
    times and blocks until the next request, or raises ``NoMoreRounds`` if there is none.

    On a GPU, rounds are timed with events: synchronising after each round would delay the preparation of the next.
    """

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._device_bytes: int | None = None  # the peak of all requests so far
        self._wait_for_request()

    def _wait_for_request(self) -> None:
        """Wait until a number of rounds is requested; raises ``NoMoreRounds`` if it is 0 or the pipe was closed."""
        try:
            self._requested = int(self._pipe.recv())
        except EOFError:
            self._requested = 0
        if not self._requested:
            raise NoMoreRounds
        self._start_time = time.perf_counter()
        self._end_times: list[float] = []
        self._start_event = _recorded_event() if _on_gpu() else None
        self._events: list[torch.cuda.Event] = []

    def round_done(self, loss: Callable[[], float] | None = None) -> None:
        """Record the end of a round; after the last requested one, send the times and wait for the next request.

        The time of the contender's very first round includes its set-up.

        Args:
            loss: returns the training loss of the current model; it is not called while rounds are timed.
        """
        if _on_gpu():
            self._events.append(_recorded_event())
            if len(self._events) == self._requested:  # events can be read once the GPU has reached them
                torch.cuda.synchronize()
        self._end_times.append(time.perf_counter() - self._start_time)
        if len(self._end_times) == self._requested:
            if _on_gpu():
                self._device_bytes = max(self._device_bytes or 0, torch.cuda.max_memory_reserved())
            seconds, cpu_start = self._seconds(), time.process_time()
            loss_value = loss() if loss else None
            loss_cpu_seconds = time.process_time() - cpu_start
            self._pipe.send(RoundTimes(seconds, self._device_bytes, loss_value, loss_cpu_seconds))
            if _on_gpu():  # the memory of the loss must not count as memory of the next rounds
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            self._wait_for_request()

    def _seconds(self) -> list[float]:
        """Return the seconds of every round of the current request; CUDA events measure milliseconds."""
        if self._start_event is None:  # without a GPU, or in the first request, before the GPU was used
            return [end - start for start, end in itertools.pairwise([0.0, *self._end_times])]
        events = [self._start_event, *self._events]
        return [start.elapsed_time(end) / 1000 for start, end in itertools.pairwise(events)]


def _on_gpu() -> bool:
    """Whether this process has used a GPU so far."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _recorded_event() -> torch.cuda.Event:
    """Return an event that marks the current end of the GPU's queue."""
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


class ContenderProcess:
    """A contender in its own process, seen from the process that measures."""

    def __init__(self, contender: LocalContender) -> None:
        self.contender: Contender = contender
        # Not daemonic: contenders start workers of their own.
        self._child = ChildProcess(_run_contender, contender, daemon=False)

    @property
    def pid(self) -> int:
        """The process id of the contender's main process."""
        return self._child.pid

    def rounds(self, count: int) -> RoundTimes | Failed:
        """Let the contender train ``count`` rounds, and wait for their times."""
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
        """Suspend the contender's processes while another contender is measured."""
        set_paused(self.pid, True)

    def resume(self) -> None:
        """Let the contender's suspended processes continue."""
        set_paused(self.pid, False)

    def host_bytes(self) -> int | None:
        """Peak memory of the contender's processes."""
        return host_memory(self.pid)

    def end(self) -> None:
        """End the contender's process."""
        self.resume()
        close_children([self._child], PATIENCE)


def _run_contender(pipe: Connection, contender: LocalContender) -> None:
    """Main function of a contender's process: train rounds on request; send their times or the reason for a failure."""
    try:
        contender.run_rounds(RoundTimer(pipe))
        failure = Failed("stopped too early")  # ``run_rounds`` returns only if the rounds ended before ``NoMoreRounds``
    except (NoMoreRounds, KeyboardInterrupt):  # the regular end
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
