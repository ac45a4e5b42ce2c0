"""Clocks: speeds, networks, availability and traces."""

from __future__ import annotations

import os
import pickle
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from fedflat.errors import UserError
from fedflat.timing import ClientClock, StepLimit, Synchronous, clock_spec, policy_spec
from fedflat.timing.traces import SessionTrace, SpeedTrace

MILLION = np.arange(10**6)


def clock(text: str, seed: int = 0, **values: int) -> ClientClock:
    return ClientClock(clock_spec(text), seed, **values)


def test_speeds_follow_their_distributions_and_the_seed() -> None:
    logarithms = np.log(clock("lognormal(sigma=0.6,seconds=2)").step_seconds(MILLION))
    assert abs(logarithms.mean() - np.log(2)) < 0.003 and abs(logarithms.std() - 0.6) < 0.002
    tiers = clock("tiers(seconds=1|2|4,shares=1|1|2)").step_seconds(MILLION)
    assert [round((tiers == seconds).mean(), 2) for seconds in (1, 2, 4)] == [0.25, 0.25, 0.5]
    speeds = [clock("lognormal", seed).step_seconds(np.arange(5)) for seed in (0, 0, 1)]
    assert (speeds[0] == speeds[1]).all() and (speeds[0] != speeds[2]).all()
    assert clock("lognormal").step_seconds(np.array([3]))[0] == speeds[0][3]  # whoever else is asked for


def test_links_and_latency_add_up() -> None:
    both = clock("constant(1)+uplink(mbps=8)+downlink(mbps=4)+latency(0.5)", bytes_up=10**6, bytes_down=10**6, passes=2)
    assert both.seconds(np.array([0]), np.array([3]))[0] == 6 + 1 + 2 + 0.5
    spread = clock("uplink(mbps=8,sigma=1)+downlink(mbps=8,sigma=1)", bytes_up=10**6, bytes_down=10**6)
    assert len(np.unique(spread.transfer_seconds(np.arange(9)))) == 9


def test_availability_has_its_stationary_share_and_its_durations() -> None:
    for text, share in (("diurnal(share=0.3)", 0.3), ("markov(on=100,off=300)", 0.25)):
        for time in (0.0, 250.0, 123456.0):
            assert abs(clock(text).available(MILLION[: 10**5], time).mean() - share) < 0.01
    states = np.array([clock("markov(on=100,off=300)").available(MILLION[:2000], float(t)) for t in range(0, 3000, 10)])
    switched_off = (states[:-1] & ~states[1:]).sum() / states[:-1].sum()  # per 10 s, from on to off
    assert abs(switched_off - (1 - np.exp(-0.1))) < 0.01


def test_steps_before_a_deadline() -> None:
    times = clock("constant(2)+latency(1)")
    assert [StepLimit(times, deadline)(0, 4) for deadline in (0.5, 2.9, 3, 6.9, 100)] == [0, 0, 1, 2, 4]
    assert StepLimit(clock("latency(1)"), 1.0)(0, 4) == 4
    assert len(pickle.dumps(StepLimit(times, 1.0))) < 2000


def test_a_deadline_that_is_met_exactly_up_to_rounding_is_met() -> None:
    hundredths = clock("constant(seconds=0.01)")
    assert hundredths.steps_within(np.arange(1), 0.29) == [29] and hundredths.steps_within(np.arange(1), 0.2899) == [28]
    deadline = policy_spec("deadline(seconds=0.3)")
    assert isinstance(deadline, Synchronous)
    deadline.check(clock("constant(seconds=0.1)"), clients=1, fewest_steps=3)  # 3 * 0.1 > 0.3
    with pytest.raises(UserError, match=r"no client can meet the deadline of 0\.3 s"):
        deadline.check(clock("constant(seconds=0.1001)"), clients=1, fewest_steps=3)


def test_a_million_clients_with_traces_in_bounded_memory(tmp_path: Path) -> None:
    speeds, sessions = tmp_path / "speeds.csv", tmp_path / "sessions.csv"
    speeds.write_text(
        "client,seconds_per_step\n" + "\n".join(f"{client},{client % 7 + 0.1}" for client in range(10**6))
    )
    sessions.write_text("client,start,end\n0,0,10\n1,5,20\n1,30,40\n2,0,99\n")
    traced = clock(f"trace({speeds})+sessions(path={sessions},repeat=true)")
    traced.clock.check(10**6)
    tracemalloc.start()
    chosen = traced.choose(np.random.default_rng(0), 10**6, 100, 7.0, {5})
    assert len(chosen) == 100 and traced.available(np.array(chosen), 7.0).all()
    assert traced.shortest(10**6, 3) == pytest.approx(0.3)
    assert traced.choose(np.random.default_rng(0), 10**6, 5, 100.0, set()) == []  # all clients were examined
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2e7


def test_a_session_trace_lists_when_clients_are_available(tmp_path: Path) -> None:
    file = tmp_path / "sessions.csv"
    file.write_text("client,start,end\n2,30,40\n0,0,10\n2,5,20\n")
    trace = SessionTrace(file)
    present = [trace.available(np.arange(3), time).tolist() for time in (0, 9.9, 10, 20, 35, 40)]
    assert present == [
        [True, False, False], [True, False, True], [False, False, True],
        [False, False, False], [False, False, True], [False, False, False],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "content", "message"),
    [
        (SpeedTrace, "client,seconds_per_step\n0,1\n2,1\n", "exactly one row per client, .* client 1 is missing"),
        (SpeedTrace, "client,seconds_per_step\n0,1\n0,1\n", "client 1 is missing"),
        (SpeedTrace, "client,seconds_per_step\n0,0\n", "seconds_per_step of client 0 is 0; expected a number above 0"),
        (SpeedTrace, "client,seconds_per_step,uplink_mbps\n0,1,-2\n", "uplink_mbps of client 0 is -2"),
        (SpeedTrace, "client,seconds_per_step\n0,nan\n", "not a finite number"),
        (SpeedTrace, "client,speed\n0,1\n", "has the columns client, speed; expected client, seconds_per_step"),
        (SpeedTrace, "client,seconds_per_step\n0,fast\n", "cannot be read"),
        (SpeedTrace, "", "has the columns"),
        (SpeedTrace, "client,seconds_per_step\n", "no rows"),
        (SessionTrace, "client,start,end\n0,5,5\n", "expected 0 <= start < end"),
        (SessionTrace, "client,start,end\n0,0,9\n0,5,12\n", "overlapping sessions"),
        (SessionTrace, "client,start,end\n-1,0,9\n", "expected integers from 0"),
        (SessionTrace, "client,start,end\n0.5,0,9\n", "client 0.5 in data row 1"),
        (SessionTrace, "client,start,end\n1e12,0,9\n", "expected integers from 0"),
        (SpeedTrace, "client,seconds_per_step\n#0,1\n", "cannot be read"),
    ],
)
def test_bad_traces_are_explained(kind: type, content: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text(content)
    with pytest.raises(UserError, match=message):
        kind(file)


def test_a_trace_that_was_edited_is_read_again(tmp_path: Path) -> None:
    """Its time of change, its size, or both may tell that it was edited."""
    file = tmp_path / "trace.csv"
    for seconds, changed in ((1, 10), (2, 20), (25, 20)):
        file.write_text(f"client,seconds_per_step\n0,{seconds}\n")
        os.utime(file, (changed, changed))
        assert clock(f"trace({file})").seconds(np.arange(1), np.ones(1, dtype=np.int64)) == [seconds]


def test_a_trace_must_describe_every_client_unless_it_repeats(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text("client,seconds_per_step,downlink_mbps\n0,1,8\n1,2,4\n")
    with pytest.raises(UserError, match=r"describes 2 clients, but the federation has 3; .*repeat=true"):
        clock(f"trace({file})").clock.check(3)
    repeated = clock(f"trace(path={file},repeat=true)", bytes_down=10**6)
    repeated.clock.check(3)
    assert repeated.seconds(np.arange(3), np.ones(3, dtype=np.int64)).tolist() == [2, 4, 2]
