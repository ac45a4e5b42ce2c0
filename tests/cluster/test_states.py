"""A client's state stays on the node that trained it, is copied to the driver later, and is never lost."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedflat
from fedflat.algorithms.algorithm import nested_state
from fedflat.engines.ray.states import StoredState
from fedflat.engines.round.contract import RemoteState
from fedflat.experiment.run import Run

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


@pytest.mark.parametrize("algorithm", ["scaffold", "fedmoswa", "fedsmoo"])
def test_a_cohort_that_stays_moves_no_state(ray: Any, algorithm: str, tmp_path: Path) -> None:
    config, moved = small(algorithm=algorithm, **EVERYONE), TrafficLog()
    fedflat.run(base=config, engine="ray", workers=2, callbacks=[moved], out=tmp_path / "ray")
    fedflat.run(base=config, engine="loop", workers=1, out=tmp_path / "loop")
    assert moved.states == [0] * 6, "initial states travel with the broadcast, later ones stay where they are"
    per_round = np.diff(moved.copied)
    assert moved.copied[0] == 0 and len(set(per_round)) == 1 and per_round[0] > 0, "copied during the next round"
    assert same_files(tmp_path, "model.safetensors")


def same_files(tmp_path: Path, *names: str) -> bool:
    return all((tmp_path / "ray" / name).read_bytes() == (tmp_path / "loop" / name).read_bytes() for name in names)


class KillAll(fedflat.Callback):
    """Kills all workers after the third round, before their states are copied."""

    def round_done(self, run: Any) -> None:
        if run.server.rounds == 3:
            for process in run.engine.pool.process_ids:
                os.kill(process, signal.SIGKILL)


def test_all_workers_are_killed_before_their_states_are_copied(ray: Any, tmp_path: Path) -> None:
    """The states survive in the object store; a lost node is tested in ``test_nodes.py``."""
    config = small(algorithm="fedmoswa", **EVERYONE)
    fedflat.run(base=config, engine="ray", workers=2, callbacks=[KillAll()], out=tmp_path / "ray")
    fedflat.run(base=config, engine="loop", workers=1, out=tmp_path / "loop")
    assert same_files(tmp_path, "model.safetensors", "metrics.jsonl")


@pytest.mark.parametrize("where", [{}, {"engine": "loop", "workers": 1}], ids=["with Ray", "without Ray"])
def test_a_resumed_run_has_all_states(where: dict[str, Any], ray: Any, tmp_path: Path) -> None:
    config = small(algorithm="scaffold", rounds=6, engine="ray", workers=2, engine__checkpoint_every=2)
    steps = Run(config, tmp_path / "ray", **NO_OWN).train_rounds()
    assert [next(steps) for _ in range(3)] == [1, 2, 3]
    steps.close()
    fedflat.resume(tmp_path / "ray", **where)
    fedflat.run(base=config, engine="loop", workers=1, out=tmp_path / "loop")
    assert same_files(tmp_path, "model.safetensors", "metrics.jsonl", "checkpoint/state.safetensors")


def test_lost_states_are_trained_again_and_dropped_ones_sent_from_the_driver(
    ray: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One state is lost in every round, and the object store has no room for states of earlier rounds."""
    config = small(algorithm="scaffold", clients=8, clients_per_round=4)
    engine = engine_of(config, 2)
    record = engine.states.record

    @ray.remote
    def lost_state() -> None:
        raise ray.exceptions.ObjectLostError("0" * 56, None, "")

    def record_and_lose_one(*arguments: Any) -> list[StoredState]:
        states: list[StoredState] = record(*arguments)
        assert states[1].place is not None
        states[1].place = states[1].place._replace(ref=lost_state.remote())
        return states

    monkeypatch.setattr(engine.states, "record", record_and_lose_one)
    monkeypatch.setattr(engine.states, "_max_bytes", 0)
    assert same(walk(config, engine, 4), walk(config, rounds=4))
    assert engine.states.traffic.lost == 4 and engine.states.traffic.states > 0


def test_a_remote_state_is_fetched_once_and_stored() -> None:
    fetched: list[str] = []
    states = nested_state({"drift.c": torch.ones(2)})
    remote = RemoteState(lambda: (fetched.append("now"), remote.deliver(states))[0])
    assert not fetched
    assert torch.equal(remote["drift"]["c"], torch.ones(2)) and set(remote) == set(states)
    assert len(remote) == len(states)
    assert fetched == ["now"]
    remote.store_with(lambda arrived: lambda: nested_state({"drift.c": arrived["drift"]["c"] + 1}))
    assert torch.equal(dict(remote.items())["drift"]["c"], torch.full((2,), 2.0))
