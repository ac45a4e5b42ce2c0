"""Clocks: how long each client computes and communicates, and when it is available.

A clock is a text of parts joined by ``+``, such as ``lognormal(sigma=0.6)+uplink(mbps=10)+diurnal``, with at most one
part of each kind: speed, uplink, downlink, latency and availability. Every number is a function of the seed, the client
and, for availability, the time. Nothing is stored per client, so a federation may have millions of clients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from fedflat.errors import UserError
from fedflat.registry import Registry
from fedflat.text import make, parse
from fedflat.timing.availability import Availability, Diurnal, Markov, Sessions
from fedflat.timing.client_speed import (
    ClockPart,
    ConstantSpeed,
    Downlink,
    Latency,
    Link,
    LognormalSpeed,
    Speed,
    TieredSpeed,
    TracedSpeed,
    Uplink,
)
from fedflat.timing.draws import BoolArray, FloatArray, IntArray
from fedflat.timing.traces import digest

CHUNK = 2**16
"""Clients whose times are computed at once, which bounds the memory of a scan over all clients."""
TOLERANCE = 1e-9
"""Relative rounding error that does not count as missing a deadline."""
WAIT_SECONDS: float = 60.0
"""Virtual seconds after which the server looks again if no client is available."""

CLOCK_PARTS: Registry[type[Any]] = Registry("part of a clock", see="fedflat settings")
"""Parts of clocks by name."""
CLOCK_PARTS.register("constant", ConstantSpeed)
CLOCK_PARTS.register("lognormal", LognormalSpeed)
CLOCK_PARTS.register("tiers", TieredSpeed)
CLOCK_PARTS.register("trace", TracedSpeed)
CLOCK_PARTS.register("uplink", Uplink)
CLOCK_PARTS.register("downlink", Downlink)
CLOCK_PARTS.register("latency", Latency)
CLOCK_PARTS.register("diurnal", Diurnal)
CLOCK_PARTS.register("markov", Markov)
CLOCK_PARTS.register("sessions", Sessions)


@dataclass(frozen=True)
class Clock:
    """The parts of a clock by kind; None for a kind that its text does not mention."""

    speed: Speed | None = None
    uplink: Uplink | None = None
    downlink: Downlink | None = None
    latency: Latency | None = None
    availability: Availability | None = None

    def parts(self) -> list[ClockPart]:
        """The parts that the text mentions."""
        every = (self.speed, self.uplink, self.downlink, self.latency, self.availability)
        return [part for part in every if part is not None]

    def check(self, clients: int) -> None:
        """Read traces and raise a ``UserError`` unless all ``clients`` clients of the federation are described."""
        for part in self.parts():
            part.check(clients)

    def digests(self) -> dict[str, str]:
        """The sha256 hash of each trace, by path."""
        return {path: digest(path) for part in self.parts() for path in part.trace_files()}


def clock_spec(text: str) -> Clock:
    """Parse the text of a clock.

    Raises:
        UserError: a part or parameter is unknown or out of range, or two parts have the same kind.

    >>> clock_spec("lognormal(0.5)+uplink(mbps=10)").speed
    LognormalSpeed(sigma=0.5, seconds=0.1)
    """
    parts: dict[str, ClockPart] = {}
    for call in parse(text):
        part = make(CLOCK_PARTS.find(call.name), call, "clock")
        if part.kind in parts:
            raise UserError(f"the clock '{text}' sets the {part.kind} twice; remove {call.name} or the other part")
        if part.trace_files() == [""]:
            raise UserError(f"{call.name} needs a file; write {call.name}(path=FILE.csv)")
        parts[part.kind] = part
    return Clock(**parts)  # type: ignore[arg-type]


@dataclass(frozen=True)
class ClientClock:
    """The times of the clients of one run.

        seconds_i = steps_i passes seconds_per_step_i + 8e-6 (bytes_down / downlink_i + bytes_up / uplink_i) + latency

    Args:
        clock: the models of speed, network and availability.
        seed: seed of the run.
        passes: backward passes per local step; SAM needs two.
        bytes_down: bytes that each client receives per participation.
        bytes_up: bytes that it sends.

    >>> clock = ClientClock(clock_spec("constant(seconds=0.5)+uplink(mbps=8)"), bytes_up=10**6)
    >>> clock.seconds(np.arange(2), np.array([2, 4]))
    array([2., 3.])
    """

    clock: Clock
    seed: int = 0
    passes: int = 1
    bytes_down: int = 0
    bytes_up: int = 0

    @property
    def always_available(self) -> bool:
        """Whether all clients are available at all times."""
        return self.clock.availability is None

    def step_seconds(self, clients: IntArray) -> FloatArray:
        """Seconds that each client [n] needs for one local step, [n]."""
        if self.clock.speed is None:
            return np.zeros(len(clients))
        return self.passes * self.clock.speed.seconds_per_step(self.seed, clients)

    def transfer_seconds(self, clients: IntArray) -> FloatArray:
        """Seconds that each client [n] spends on communication, including latency, [n]."""
        total = np.full(len(clients), self.clock.latency.seconds if self.clock.latency else 0.0)
        for direction, size in (("downlink", self.bytes_down), ("uplink", self.bytes_up)):
            mbps = self._mbps(direction, clients)
            if mbps is not None:
                total += 8e-6 * size / mbps
        return total

    def _mbps(self, direction: str, clients: IntArray) -> FloatArray | None:
        """Bandwidths in a direction; those of a part such as ``uplink`` take precedence over those of a trace."""
        link: Link | None = getattr(self.clock, direction)
        if link is not None:
            return link.link_mbps(self.seed, clients)
        return self.clock.speed.link_mbps(direction, clients) if self.clock.speed else None

    def seconds(self, clients: IntArray, steps: IntArray) -> FloatArray:
        """Seconds from a client's start until its update has arrived, [n], given its local steps [n]."""
        return steps * self.step_seconds(clients) + self.transfer_seconds(clients)

    def steps_within(self, clients: IntArray, seconds: float) -> FloatArray:
        """Largest number of steps with which each client's update arrives within ``seconds``, [n]; may be infinite."""
        remaining = seconds - self.transfer_seconds(clients)
        step_seconds = self.step_seconds(clients)
        with np.errstate(divide="ignore", invalid="ignore"):
            steps = np.where(remaining < 0, 0.0, np.floor(remaining / step_seconds * (1 + TOLERANCE)))
        return np.where((remaining >= 0) & (step_seconds == 0), np.inf, steps)

    def shortest(self, clients: int, steps: int) -> float:
        """Seconds of the fastest of ``clients`` clients if each takes ``steps`` steps."""
        fastest = np.inf
        for start in range(0, clients, CHUNK):
            chunk = np.arange(start, min(start + CHUNK, clients))
            fastest = min(fastest, float(self.seconds(chunk, np.full(len(chunk), steps)).min()))
        return fastest

    def available(self, clients: IntArray, time: float) -> BoolArray:
        """Whether each of the clients [n] is available at a time, [n]."""
        if self.clock.availability is None:
            return np.ones(len(clients), dtype=bool)
        return self.clock.availability.available(self.seed, clients, time)

    def choose(self, rng: np.random.Generator, clients: int, count: int, time: float, busy: set[int]) -> list[int]:
        """Draw up to ``count`` of ``clients`` clients that are available and not busy, in ascending order.

        Candidates are drawn at random, which needs no list of all clients. Only if most of them are unavailable are all
        clients examined.
        """
        chosen: dict[int, None] = {}
        for _ in range(8):
            candidates = rng.integers(clients, size=4 * count + 16)
            for client in candidates[self.available(candidates, time)].tolist():
                if client not in busy and len(chosen) < count:
                    chosen[client] = None
            if len(chosen) == count:
                return sorted(chosen)
        free: list[int] = []
        for start in range(0, clients, CHUNK):
            chunk = np.arange(start, min(start + CHUNK, clients))
            free += [client for client in chunk[self.available(chunk, time)].tolist() if client not in busy]
        others = [client for client in free if client not in chosen]
        missing = min(count - len(chosen), len(others))
        return sorted([*chosen, *(int(client) for client in rng.choice(others, missing, replace=False))])


@dataclass(frozen=True)
class StepLimit:
    """The number of its steps that a client completes before a deadline; small, because it is sent to workers."""

    clock: ClientClock
    deadline: float

    def __call__(self, client: int, steps: int) -> int:
        """How many of ``steps`` steps a client completes; 0 if not even one fits."""
        return int(min(steps, self.clock.steps_within(np.array([client]), self.deadline)[0]))
