"""The simulation of arrivals against the specification and against a reference that keeps no queue."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedflat.timing import ArrivalSimulation, Flight, ServerUpdate, SimulationState

from ..reference.arrivals import Arrival, arrivals

GOLDEN = {
    1: ["0/0/1", "1/0/2", "0/2/3", "2/1/4", "4/0/5", "5/0/6", "3/3/7", "7/0/8"],
    2: ["0/0/0", "0/0/1", "0/1/1", "1/0/2", "2/0/2", "2/0/3", "1/2/3", "3/0/4"],
    3: ["0/0/0", "0/0/0", "0/0/1", "0/1/1", "1/0/1", "1/0/2", "1/1/2", "2/0/2"],
}
"""Version at the start / staleness / version after each of eight arrivals, by size of the buffer (section 6.3)."""
DURATIONS = [1.0, 2.5]


def schedule(durations: list[float], buffer: int) -> ArrivalSimulation:
    """A schedule in which all clients are always in flight."""
    everyone = list(range(len(durations)))
    return ArrivalSimulation(
        concurrency=len(durations),
        buffer=buffer,
        choose=lambda draw, count, time, busy: [client for client in everyone if client not in busy],
        cohort=lambda version, time: everyone,
        seconds=lambda version, client, repetition: durations[client],
        wait_seconds=60.0,
    )


def arrived(updates: list[ServerUpdate], buffer: int) -> list[Arrival]:
    """The arrivals of complete updates, in the form of the reference."""
    result = []
    for update in updates:
        for position, flight in enumerate(update.arrived, 1):
            version = update.version + (position == buffer)
            staleness = update.version - flight.version
            result.append(Arrival(flight.time, flight.client, flight.version, staleness, version))
    return result


@pytest.mark.parametrize("buffer", GOLDEN)
def test_arrivals_of_the_specification(buffer: int) -> None:
    reference = arrivals(DURATIONS, buffer, 8)
    assert [f"{a.started}/{a.staleness}/{a.version}" for a in reference] == GOLDEN[buffer]
    assert [(a.time, a.client) for a in reference] == [
        (1, 0), (2, 0), (2.5, 1), (3, 0), (4, 0), (5, 0), (5, 1), (6, 0),
    ]  # fmt: skip
    simulation = schedule(DURATIONS, buffer)
    complete = 8 // buffer * buffer
    updates = [simulation.next_update() for _ in range(8 // buffer)]
    assert arrived(updates, buffer) == reference[:complete]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=6), st.integers(1, 5), st.integers(1, 12))
def test_any_durations_and_any_buffer(quarters: list[int], buffer: int, updates: int) -> None:
    """Durations are multiples of 1/4, so that many arrivals coincide; those of zero length repeat within an instant."""
    durations = [quarter / 4 for quarter in quarters]
    if 0 in quarters:  # the reference cannot restart a client at the instant of its arrival, unless all do
        durations = [0.0] * len(quarters)
    simulation = schedule(durations, buffer)
    ours = arrived([simulation.next_update() for _ in range(updates)], buffer)
    assert ours == arrivals(durations, buffer, updates * buffer)


def test_everything_dispatched_is_trained_once_and_arrives_once() -> None:
    simulation = schedule([1.0, 1.5, 0.25, 7.0], 3)
    dispatched: list[Flight] = []
    for _ in range(20):
        update = simulation.next_update()
        assert {flight.version for flight in update.dispatched} <= {update.version}
        dispatched += update.dispatched
        for flight in update.arrived:
            dispatched.remove(flight)
    assert sorted(dispatched) == simulation.state.in_flight
    assert len(set(dispatched)) == len(dispatched)


def test_a_stored_state_continues_in_the_same_way() -> None:
    simulation, resumed = schedule(DURATIONS, 2), schedule(DURATIONS, 2)
    for _ in range(5):
        simulation.next_update()
    resumed.state = SimulationState.from_json(json.loads(json.dumps(simulation.state.to_json())))
    assert [resumed.next_update() for _ in range(5)] == [simulation.next_update() for _ in range(5)]


def test_the_server_looks_again_for_available_clients_while_others_train() -> None:
    """Client 1 becomes available at time 100, when client 0, which needs 1000 seconds, is still in flight."""
    simulation = ArrivalSimulation(
        concurrency=2,
        buffer=1,
        choose=lambda draw, count, time, busy: [1] if time >= 100 and 1 not in busy else [],
        cohort=lambda version, time: [0],
        seconds=lambda version, client, repetition: 1000.0 if client == 0 else 5.0,
        wait_seconds=60.0,
    )
    first = simulation.next_update()
    assert [(flight.client, flight.time) for flight in first.arrived] == [(1, 185.0)]  # it looks at times 60 and 180


def test_an_arrival_when_the_server_looks_again_does_not_delay_its_next_look() -> None:
    """Client 0 arrives at time 60, so the server looks at times 60 and 120; client 1 is available from time 100 on."""
    simulation = ArrivalSimulation(
        concurrency=3,
        buffer=2,
        choose=lambda draw, count, time, busy: [1] if time >= 100 and 1 not in busy else [],
        cohort=lambda version, time: [0, 2],
        seconds=lambda version, client, repetition: {0: 60.0, 1: 5.0, 2: 1000.0}[client],
        wait_seconds=60.0,
    )
    update = simulation.next_update()
    assert [(flight.client, flight.time) for flight in update.arrived] == [(0, 60.0), (1, 125.0)]


def test_a_round_without_progress_if_nobody_is_there() -> None:
    """The first client arrives, then nobody is available: the buffer keeps its update for the next round."""
    simulation = ArrivalSimulation(
        concurrency=1,
        buffer=2,
        choose=lambda draw, count, time, busy: [4],
        cohort=lambda version, time: [3] if version != 1 else [],
        seconds=lambda version, client, repetition: 5.0,
        wait_seconds=60.0,
        first_version=1,
    )
    idle = simulation.next_update()
    assert (idle.version, idle.time, idle.arrived, idle.dispatched) == (1, 60.0, [], [])
    update = simulation.next_update()
    assert [(flight.client, flight.time) for flight in update.arrived] == [(3, 65.0), (4, 70.0)]


def test_rounds_without_progress_do_not_make_updates_stale() -> None:
    """Client 0 arrives and stays in the buffer while nobody is available."""
    simulation = ArrivalSimulation(
        concurrency=1,
        buffer=2,
        choose=lambda draw, count, time, busy: [1] if time >= 200 else [],
        cohort=lambda version, time: [1] if time >= 200 else [0] if time == 0 else [],
        seconds=lambda version, client, repetition: 5.0,
        wait_seconds=60.0,
    )
    updates = [simulation.next_update() for _ in range(5)]
    assert [len(update.arrived) for update in updates] == [0, 0, 0, 0, 2]
    assert [updates[-1].staleness(flight) for flight in updates[-1].arrived] == [0, 0]
    assert simulation.state.idle_versions == []


def test_a_cohort_starts_only_once_from_a_version() -> None:
    """If the buffer is larger than the number of clients in flight, other clients fill it."""
    simulation = ArrivalSimulation(
        concurrency=1,
        buffer=3,
        choose=lambda draw, count, time, busy: [10 + draw],
        cohort=lambda version, time: [version],
        seconds=lambda version, client, repetition: 1.0,
        wait_seconds=60.0,
    )
    assert [[f.client for f in simulation.next_update().arrived] for _ in range(2)] == [[0, 10, 11], [1, 12, 13]]
