"""The simulation of asynchronous arrivals; it needs no weights, so it runs ahead of training.

Rules:

1. ``concurrency`` clients are in flight. Arrivals are processed in order of time, and at equal times in order of client
   number.
2. When the buffer is full, the server updates its model, which increases its version, and empties the buffer.
3. All clients that arrive at one instant are replaced together, after the last of them has been processed. Their
   replacements start from the model of that moment.
4. Replacements are drawn among the available clients that are not in flight. If no client is in flight and none has
   started from this version yet, the server samples a whole cohort, as in a synchronous round.
5. If too few clients are available, the server looks again after ``wait_seconds``, then after twice as long, and so on,
   or earlier if a client arrives. If no client is in flight or available, the round ends without progress after
   ``wait_seconds``.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple


class Flight(NamedTuple):
    """A client in flight, ordered by time of arrival and client number."""

    time: float
    """Virtual time of its arrival at the server."""
    client: int
    version: int
    """Version of the server model that it started from."""
    repetition: int
    """How many times it had started from this version before."""


class ServerUpdate(NamedTuple):
    """What happens while the server has one version of its model."""

    version: int
    """The version, before the update."""
    time: float
    """Virtual time of the update."""
    arrived: list[Flight]
    """The content of the full buffer, in order of arrival; empty if the round ended without progress."""
    dispatched: list[Flight]
    """All clients that started from this version, in order of their start."""
    idle_versions: tuple[int, ...] = ()
    """Versions that ended without an update of the model, since the oldest update in the buffer started."""

    def staleness(self, flight: Flight) -> int:
        """tau: the number of updates of the server model since a client started."""
        return self.version - flight.version - sum(version >= flight.version for version in self.idle_versions)


@dataclass
class SimulationState:
    """The state of a schedule between two server updates."""

    version: int = 0
    time: float = 0.0
    dispatches: int = 0
    """How often replacements have been drawn."""
    free: int = 0
    """Clients to replace."""
    in_flight: list[Flight] = field(default_factory=list)
    """In order of arrival."""
    buffer: list[Flight] = field(default_factory=list)
    """Arrived, and not yet part of an update."""
    idle_versions: list[int] = field(default_factory=list)
    """Versions without progress, since the oldest update in the buffer started."""

    def copy(self) -> SimulationState:
        """An independent copy."""
        return replace(self, in_flight=[*self.in_flight], buffer=[*self.buffer], idle_versions=[*self.idle_versions])

    def to_json(self) -> dict[str, Any]:
        """The state as plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> SimulationState:
        """The inverse of ``to_json``; flights may have become lists."""
        flights = {name: [Flight(*flight) for flight in values[name]] for name in ("in_flight", "buffer")}
        return cls(**{**values, **flights})


class ArrivalSimulation:
    """Simulates arrivals from one server update to the next.

    Args:
        concurrency: clients in flight.
        buffer: arrivals per server update.
        choose: draws clients, given the number of the draw, how many are needed, the time and who is in flight; may
            return fewer.
        cohort: samples a whole cohort, given the version and the time; may return fewer clients.
        seconds: how long a client takes from start to arrival, given version, client and repetition.
        wait_seconds: time after which the server looks again for available clients.
        first_version: version of the initial model.
    """

    def __init__(
        self,
        concurrency: int,
        buffer: int,
        choose: Callable[[int, int, float, set[int]], list[int]],
        cohort: Callable[[int, float], list[int]],
        seconds: Callable[[int, int, int], float],
        wait_seconds: float,
        first_version: int = 0,
    ) -> None:
        self._buffer, self._choose, self._cohort, self._seconds = buffer, choose, cohort, seconds
        self._wait_seconds = wait_seconds
        self.state = SimulationState(version=first_version, free=concurrency)

    def next_update(self) -> ServerUpdate:
        """Simulate until the buffer is full, or until no client is in flight or available."""
        state, dispatched, wait = self.state, list[Flight](), self._wait_seconds
        while True:
            instant_is_over = not state.in_flight or state.in_flight[0].time > state.time
            if state.free and instant_is_over:
                dispatched += self._dispatch(dispatched)
            if not state.in_flight:
                state.time += self._wait_seconds
                return self._end_version(dispatched, [])
            arrival = state.in_flight[0].time
            if state.free and instant_is_over and arrival > state.time + wait:
                state.time += wait  # look again for available clients, less and less often
                wait *= 2
                continue
            flight = state.in_flight.pop(0)
            state.time = flight.time
            state.free += 1
            state.buffer.append(flight)
            if len(state.buffer) == self._buffer:
                arrived, state.buffer = state.buffer, []
                return self._end_version(dispatched, arrived)

    def _end_version(self, dispatched: list[Flight], arrived: list[Flight]) -> ServerUpdate:
        """Advance to the next version."""
        state = self.state
        idle = tuple(state.idle_versions)
        # A version ends without progress only if no client is in flight, so it matters only to updates in the buffer.
        oldest = min((flight.version for flight in state.buffer), default=state.version)
        state.idle_versions = [version for version in state.idle_versions if version >= oldest]
        state.idle_versions += [] if arrived else [state.version]
        state.version += 1
        return ServerUpdate(state.version - 1, state.time, arrived, dispatched, idle)

    def _dispatch(self, dispatched: list[Flight]) -> list[Flight]:
        """Start replacements for all free clients, as far as clients are available; returns their flights.

        ``dispatched`` are the earlier flights from the current version.
        """
        state = self.state
        if state.in_flight or dispatched:
            busy = {flight.client for flight in state.in_flight}
            clients = self._choose(state.dispatches, state.free, state.time, busy)
            state.dispatches += 1
        else:
            clients = self._cohort(state.version, state.time)
        earlier = Counter(flight.client for flight in dispatched)
        flights = []
        for client in clients:
            seconds = self._seconds(state.version, client, earlier[client])
            flights.append(Flight(state.time + seconds, client, state.version, earlier[client]))
            insort(state.in_flight, flights[-1])
        state.free -= len(flights)
        return flights
