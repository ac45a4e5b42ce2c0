"""A client's state stays with the worker that trained it, is copied to the driver later, and is never lost."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedflat
from fedflat.algorithms.algorithm import nested_state
from fedflat.engines.ray.scheduling import ClientCosts
from fedflat.engines.ray.state_directory import INITIAL_SECONDS_PER_BYTE
from fedflat.engines.ray.work_queue import WorkerHandle
from fedflat.engines.ray.worker import CacheMiss, StateCache
from fedflat.engines.round.contract import RemoteState
from fedflat.experiment.analysis.replay import Replay
from fedflat.experiment.run import Run
from fedflat.experiment.setup.problem import build_problem

from .federations import NO_OWN, engine_of, same, small, walk

EVERYONE: dict[str, Any] = {"clients": 6, "clients_per_round": 6, "rounds": 6, "partition": "iid"}
"""The same cohort in every round, of clients that cost the same."""


class TrafficLog(fedflat.Callback):
    """After each round: states sent to workers so far, and bytes copied to the driver."""

    def __init__(self) -> None:
        self.states: list[int] = []
        self.copied: list[int] = []

    def round_done(self, run: Any) -> None:
        self.states.append(run.engine.states.traffic.states)
        self.copied.append(run.engine.states.traffic.copied)


def never_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep workers from taking over work of others, as they do on a busy machine."""
    monkeypatch.setattr("fedflat.engines.ray.state_directory.INITIAL_SECONDS_PER_BYTE", 1.0)


@pytest.mark.parametrize("algorithm", ["scaffold", "fedmoswa", "fedsmoo"])
def test_a_cohort_that_stays_moves_no_state(
    ray: Any, monkeypatch: pytest.MonkeyPatch, algorithm: str, tmp_path: Path
) -> None:
    never_late(monkeypatch)
    config, moved = small(algorithm=algorithm, **EVERYONE), TrafficLog()
    fedflat.run(base=config, engine="ray", workers=2, callbacks=[moved], out=tmp_path / "ray")
    fedflat.run(base=config, engine="loop", workers=1, out=tmp_path / "loop")
    assert moved.states == [0] * 6, "initial states travel with the broadcast, later ones stay where they are"
    per_round = np.diff(moved.copied)
    assert moved.copied[0] == 0 and len(set(per_round)) == 1 and per_round[0] > 0, "copied during the next round"
    assert (tmp_path / "ray" / "model.safetensors").read_bytes() == (
        tmp_path / "loop" / "model.safetensors"
    ).read_bytes()


class KilledAfterThree(TrafficLog):
    """Kills a worker after the third round, when all states have been copied."""

    def round_done(self, run: Any) -> None:
        super().round_done(run)
        if run.server.rounds == 3:
            run.engine.states.fetch_all()
            os.kill(run.engine.pool.process_ids[0], signal.SIGKILL)


def same_files(tmp_path: Path, *names: str) -> bool:
    return all((tmp_path / "ray" / name).read_bytes() == (tmp_path / "loop" / name).read_bytes() for name in names)


def test_a_state_is_moved_when_its_worker_is_lost(ray: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Half of the clients, once; those of the other worker stay."""
    never_late(monkeypatch)
    config, moved = small(algorithm="scaffold", **EVERYONE), KilledAfterThree()
    fedflat.run(base=config, engine="ray", workers=2, callbacks=[moved], out=tmp_path / "ray")
    assert moved.states[:3] == [0] * 3 and moved.states[3] == 3
    # The new worker may or may not be up in time to take over some of the work.
    assert moved.states[5] <= 3 + 3
    fedflat.run(base=config, engine="loop", workers=1, out=tmp_path / "loop")
    assert same_files(tmp_path, "model.safetensors", "metrics.jsonl")


def test_a_state_is_handed_over_by_the_worker_that_has_it(ray: Any) -> None:
    """A cohort whose states are all with one worker is still divided, because small states are quick to move."""
    config = small(algorithm="scaffold", **EVERYONE)
    engine = engine_of(config, 2)
    problem, partition = build_problem(config)
    both = [Replay(config, problem, partition, workers=1) for _ in range(2)]
    both[0].engine = engine
    for replay in both:
        replay.advance()
    homes = {number: worker for number, (worker, _) in engine.states._homes.items()}
    workers = engine.pool.started_workers
    there = max(([number for number, home in homes.items() if home is worker] for worker in workers), key=len)
    before = replace(engine.states.traffic)
    engine.costs = expensive_clients()
    engine.states._seconds_per_byte = INITIAL_SECONDS_PER_BYTE
    ours, theirs = (replay.train(replay.clients(there)) for replay in both)
    moved, handed_over = (
        engine.states.traffic.states - before.states,
        engine.states.traffic.handed_over - before.handed_over,
    )
    assert len(there) >= 3 and 1 <= handed_over <= moved <= len(there)
    assert torch.equal(ours.returned.displacement, theirs.returned.displacement)
    for one, other in zip(ours.clients, theirs.clients, strict=True):
        assert torch.equal(one.state["drift"]["c"], other.state["drift"]["c"])


def expensive_clients() -> ClientCosts:
    """Costs with which moving a state takes no time compared to training."""
    costs = ClientCosts()
    costs.record([0], [1], 1.0)
    return costs


def test_a_worker_is_killed_before_its_states_are_copied(
    ray: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The states are lost, and the round is trained again from the previous ones."""
    config = small(algorithm="fedmoswa", engine="ray", workers=2, **EVERYONE)
    run = Run(config, tmp_path / "ray", **NO_OWN)
    engine: Any = run.engine
    killed: list[int] = []
    again: list[str] = []
    trained, run_now = engine.states.record_trained, engine.pool.run_now

    def killed_and_trained(worker: WorkerHandle, *others: Any) -> list[RemoteState]:
        if run.server.rounds == 3 and not killed:
            assert worker.info is not None
            killed.append(worker.info.process)
            os.kill(worker.info.process, signal.SIGKILL)
        states: list[RemoteState] = trained(worker, *others)
        return states

    monkeypatch.setattr(engine.states, "record_trained", killed_and_trained)
    monkeypatch.setattr(engine.pool, "run_now", lambda item, source: (again.append(item.call), run_now(item, source)))
    run.execute()
    assert len(killed) == 1 and again
    fedflat.run(base=config, engine="loop", workers=1, out=tmp_path / "loop")
    assert same_files(tmp_path, "model.safetensors", "metrics.jsonl")


@pytest.mark.parametrize("where", [{}, {"engine": "loop", "workers": 1}], ids=["with Ray", "without Ray"])
def test_a_resumed_run_has_all_states(where: dict[str, Any], ray: Any, tmp_path: Path) -> None:
    config = small(algorithm="scaffold", rounds=6, engine="ray", workers=2, engine__checkpoint_every=2)
    steps = Run(config, tmp_path / "ray", **NO_OWN).steps()
    assert [next(steps) for _ in range(3)] == [1, 2, 3]
    steps.close()
    fedflat.resume(tmp_path / "ray", **where)
    fedflat.run(base=config, engine="loop", workers=1, out=tmp_path / "loop")
    assert same_files(tmp_path, "model.safetensors", "metrics.jsonl", "checkpoint/state.safetensors")


def test_states_that_workers_evicted_are_sent_again(ray: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver assumes states that a worker does not have."""
    config = small(algorithm="scaffold", **EVERYONE)
    engine = engine_of(config, 2)
    once = walk(config, engine, 2)
    for worker in engine.pool.started_workers:
        worker.problem = ""  # rebuild the problem, with an empty cache
    before = engine.states.traffic.states
    assert same(walk(config, engine, 2), once) and same(once, walk(config, rounds=2))
    engine.states.fetch_all()
    monkeypatch.setattr(engine.states, "_has_state", lambda worker, client: isinstance(client.state, RemoteState))
    assert same(walk(config, engine, 2), once)
    assert engine.states.traffic.states >= before


def test_a_cache_keeps_recent_states_and_all_of_the_last_round() -> None:
    cache = StateCache(max_cached_bytes=100)
    for stamp in (1, 2):
        for client in range(3):
            cache.put("t", 10 * stamp + client, stamp, {"c": np.zeros(5)})
    assert [_has(cache, 10 + client, 1) for client in range(3)] == [False] * 3
    assert all(_has(cache, 20 + client, 2) for client in range(3)), "beyond the limit, but from the last round"
    with pytest.raises(CacheMiss):
        cache.get("t", 20, 1)


def _has(cache: StateCache, client: int, stamp: int) -> bool:
    try:
        return len(cache.get("t", client, stamp)["c"]) == 5
    except CacheMiss:
        return False


def test_a_remote_state_is_fetched_once_and_stored() -> None:
    fetched: list[str] = []
    states = nested_state({"drift.c": torch.ones(2)})
    remote = RemoteState(1, lambda: (fetched.append("now"), remote.deliver(states))[0])
    assert not fetched
    assert torch.equal(remote["drift"]["c"], torch.ones(2)) and set(remote) == set(states)
    assert len(remote) == len(states)
    assert fetched == ["now"]
    remote.store_with(lambda arrived: lambda: nested_state({"drift.c": arrived["drift"]["c"] + 1}))
    assert torch.equal(dict(remote.items())["drift"]["c"], torch.full((2,), 2.0))
