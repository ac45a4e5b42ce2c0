"""Parts of clocks that describe when clients are available."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedflat.text import param
from fedflat.timing.client_speed import ClockPart, check_rows
from fedflat.timing.draws import BoolArray, IntArray, uniform
from fedflat.timing.traces import session_trace


class Availability(ClockPart):
    """When clients can start to train; a client that has started always completes its round."""

    kind = "availability"

    @abstractmethod
    def available(self, seed: int, clients: IntArray, time: float) -> BoolArray:
        """Whether each of the clients [n] is available at a time in virtual seconds, [n]."""


@dataclass(frozen=True)
class Diurnal(Availability):
    """Each client is available in one part of the day, which starts at a random time of its own.

    >>> Diurnal(share=1.0).available(0, np.arange(2), 0.0)
    array([ True,  True])
    """

    share: float = param(0.5, "share of the day in which a client is available", above=0, high=1, positional=True)
    period: float = param(86400.0, "length of a day in seconds", above=0)

    def available(self, seed: int, clients: IntArray, time: float) -> BoolArray:
        phase = (time / self.period + uniform(seed, "diurnal", clients)) % 1.0
        present: BoolArray = phase < self.share
        return present


@dataclass(frozen=True)
class Markov(Availability):
    """Each client switches on and off at random; both durations are exponentially distributed.

    Time is divided into blocks of eight mean cycles. Every block starts from the stationary distribution, so that the
    state at any time costs the same to compute.
    """

    BLOCK_CYCLES: ClassVar = 8
    on: float = param(600.0, "mean seconds for which a client is available", above=0)
    off: float = param(600.0, "mean seconds for which a client is not available", above=0)

    def available(self, seed: int, clients: IntArray, time: float) -> BoolArray:
        block, remaining_time = divmod(time, self.BLOCK_CYCLES * (self.on + self.off))
        purpose = f"markov {int(block)}"
        is_on = uniform(seed, purpose, clients) < self.on / (self.on + self.off)
        remaining, switches = np.full(len(clients), remaining_time), 0
        moving = remaining >= 0
        while moving.any():
            switches += 1
            mean = np.where(is_on, self.on, self.off)
            remaining = remaining + mean * np.log(uniform(seed, purpose, clients, switches))
            moving &= remaining >= 0
            is_on = is_on ^ moving
        return is_on


@dataclass(frozen=True)
class Sessions(Availability):
    """Clients are available at the times listed in a CSV file with the columns ``client``, ``start`` and ``end``.

    Times are in virtual seconds. A client may have any number of sessions, which must not overlap.
    """

    path: str = param("", "CSV file", path=True, positional=True)
    repeat: bool = param(False, "whether clients beyond the last one of the file start again at the first one")

    def trace_files(self) -> list[str]:
        return [self.path]

    def check(self, clients: int) -> None:
        check_rows("sessions", self.path, len(session_trace(self.path)), clients, self.repeat)

    def available(self, seed: int, clients: IntArray, time: float) -> BoolArray:
        trace = session_trace(self.path)
        return trace.available(clients % len(trace), time)
