"""A client's state stays with the worker that trained it, follows to the driver behind the training, and is never lost."""

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
from fedflat.engines.ray.scheduling import Costs
from fedflat.engines.ray.state_directory import GUESSED
from fedflat.engines.ray.worker import CacheMiss, StateCache
from fedflat.engines.ray.worker_pool import WorkerHandle
from fedflat.engines.round.remote_state import RemoteState
from fedflat.experiment.analysis.replay import Replay
from fedflat.experiment.run import Run
from fedflat.experiment.setup.problem import federation

from .federations import NO_OWN, engine_of, same, small, walk

EVERYONE: dict[str, Any] = {"clients": 6, "clients_per_round": 6, "rounds": 6, "partition": "iid"}
"""A cohort that is the same in every round, of clients that cost the same."""


class Moved(fedflat.Callback):
    """The states that were brought to workers, round by round, and the bytes that followed from them."""

    def __init__(self) -> None:
        self.states: list[int] = []
        self.copied: list[int] = []

    def round_done(self, run: Any) -> None:
        self.states.append(run.engine.states.traffic.states)
        self.copied.append(run.engine.states.traffic.copied)


def never_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no worker take from another, as one does where a busy machine holds the other up."""
    monkeypatch.setattr("fedflat.engines.ray.state_directory.GUESSED", 1.0)


@pytest.mark.parametrize("algorithm", ["scaffold", "fedmoswa", "fedsmoo"])
def test_a_cohort_that_stays_moves_no_state(
    ray: Any, monkeypatch: pytest.MonkeyPatch, algorithm: str, tmp_path: Path
) -> None:
    never_late(monkeypatch)
    config, moved = small(algorithm=algorithm, **EVERYONE), Moved()
    fedflat.run(base=config, engine="ray", workers=2, callbacks=[moved], out=tmp_path / "ray")
    fedflat.run(base=config, engine="loop", workers=1, out=tmp_path / "loop")
    assert moved.states == [0] * 6, "what clients start with goes with the broadcast, and the rest stays where it is"
    clients_per_round = np.diff(moved.copied)
    assert moved.copied[0] == 0 and len(set(clients_per_round)) == 1 and clients_per_round[0] > 0, (
        "copies of a round follow in the next"
    )
    assert (tmp_path / "ray" / "model.safetensors").read_bytes() == (
        tmp_path / "loop" / "model.safetensors"
    ).read_bytes()


class KilledAfterThree(Moved):
    """Ends a worker after the third round, when copies of all states are here."""

    def round_done(self, run: Any) -> None:
        super().round_done(run)
        if run.server.rounds == 3:
            run.engine.states.bring_all()
            os.kill(run.engine.crew.processes[0], signal.SIGKILL)


def same_files(tmp_path: Path, *names: str) -> bool:
    return all((tmp_path / "ray" / name).read_bytes() == (tmp_path / "loop" / name).read_bytes() for name in names)


def test_a_state_is_moved_when_its_worker_is_lost(ray: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Half of the clients, once; those of the other worker stay."""
    never_late(monkeypatch)
    config, moved = small(algorithm="scaffold", **EVERYONE), KilledAfterThree()
    fedflat.run(base=config, engine="ray", workers=2, callbacks=[moved], out=tmp_path / "ray")
    assert moved.states[:3] == [0] * 3 and moved.states[3] == 3
    # Whether the new worker is there by then, and takes some of what the old one has by now, is for the machine to say.
    assert moved.states[5] <= 3 + 3
    fedflat.run(base=config, engine="loop", workers=1, out=tmp_path / "loop")
    assert same_files(tmp_path, "model.safetensors", "metrics.jsonl")


def test_a_state_is_handed_over_by_the_worker_that_has_it(ray: Any) -> None:
    """A cohort that lies with one worker alone is divided all the same, since states so small are soon moved."""
    config = small(algorithm="scaffold", **EVERYONE)
    engine = engine_of(config, 2)
    problem, partition = federation(config)
    both = [Replay(config, problem, partition, workers=1) for _ in range(2)]
    both[0].engine = engine
    for replay in both:
        replay.advance()
    homes = {number: hand for number, (hand, _) in engine.states._homes.items()}
    there = max(([number for number, home in homes.items() if home is hand] for hand in engine.crew.present), key=len)
    before = replace(engine.states.traffic)
    engine.costs = dear_clients()
    engine.states._per_byte = GUESSED
    ours, theirs = (replay.train(replay.members(there)) for replay in both)
    moved, handed_over = (
        engine.states.traffic.states - before.states,
        engine.states.traffic.handed_over - before.handed_over,
    )
    assert len(there) >= 3 and 1 <= handed_over <= moved <= len(there)
    assert torch.equal(ours.returned.displacement, theirs.returned.displacement)
    for one, other in zip(ours.clients, theirs.clients, strict=True):
        assert torch.equal(one.state["drift"]["c"], other.state["drift"]["c"])


def dear_clients() -> Costs:
    """As if training took so long that moving a state is nothing, whatever the machine is busy with."""
    costs = Costs()
    costs.measured([0], [1], 1.0)
    return costs


def test_a_worker_is_killed_before_its_states_are_copied(
    ray: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nobody has them any more, so that the round is trained again from the states before."""
    config = small(algorithm="fedmoswa", engine="ray", workers=2, **EVERYONE)
    run = Run(config, tmp_path / "ray", **NO_OWN)
    engine: Any = run.engine
    killed: list[int] = []
    again: list[str] = []
    trained, do_now = engine.states.trained, engine.crew.do_now

    def killed_and_trained(hand: WorkerHandle, *others: Any) -> list[RemoteState]:
        if run.server.rounds == 3 and not killed:
            assert hand.about is not None
            killed.append(hand.about.process)
            os.kill(hand.about.process, signal.SIGKILL)
        found: list[RemoteState] = trained(hand, *others)
        return found

    monkeypatch.setattr(engine.states, "trained", killed_and_trained)
    monkeypatch.setattr(engine.crew, "do_now", lambda job, source: (again.append(job.call), do_now(job, source)))
    run.go()
    assert len(killed) == 1 and again
    fedflat.run(base=config, engine="loop", workers=1, out=tmp_path / "loop")
    assert same_files(tmp_path, "model.safetensors", "metrics.jsonl")


@pytest.mark.parametrize("where", [{}, {"engine": "loop", "workers": 1}], ids=["there", "without Ray"])
def test_a_run_that_is_left_and_resumed_has_all_states(where: dict[str, Any], ray: Any, tmp_path: Path) -> None:
    config = small(algorithm="scaffold", rounds=6, engine="ray", workers=2, engine__checkpoint_every=2)
    steps = Run(config, tmp_path / "ray", **NO_OWN).steps()
    assert [next(steps) for _ in range(3)] == [1, 2, 3]
    steps.close()
    fedflat.resume(tmp_path / "ray", **where)
    fedflat.run(base=config, engine="loop", workers=1, out=tmp_path / "loop")
    assert same_files(tmp_path, "model.safetensors", "metrics.jsonl", "checkpoint/state.safetensors")


def test_workers_that_forget_are_told_again(ray: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver counts on what a worker does not have."""
    config = small(algorithm="scaffold", **EVERYONE)
    engine = engine_of(config, 2)
    once = walk(config, engine, 2)
    for hand in engine.crew.present:
        hand.opened = ""  # so that the problem is built anew, on an empty shelf
    before = engine.states.traffic.states
    assert same(walk(config, engine, 2), once) and same(once, walk(config, rounds=2))
    engine.states.bring_all()
    monkeypatch.setattr(engine.states, "_has", lambda hand, client: isinstance(client.state, RemoteState))
    assert same(walk(config, engine, 2), once)
    assert engine.states.traffic.states >= before


def test_a_shelf_keeps_what_was_used_last_and_all_of_the_last_round() -> None:
    shelf = StateCache(most=100)
    for stamp in (1, 2):
        for client in range(3):
            shelf.put("t", 10 * stamp + client, stamp, {"c": np.zeros(5)})
    assert [_has(shelf, 10 + client, 1) for client in range(3)] == [False] * 3
    assert all(_has(shelf, 20 + client, 2) for client in range(3)), "more than it holds, but of the last round"
    with pytest.raises(CacheMiss):
        shelf.get("t", 20, 1)


def _has(shelf: StateCache, client: int, stamp: int) -> bool:
    try:
        return len(shelf.get("t", client, stamp)["c"]) == 5
    except CacheMiss:
        return False


def test_a_state_that_is_away_comes_once_and_is_kept_by_whoever_asks() -> None:
    came: list[str] = []
    states = nested_state({"drift.c": torch.ones(2)})
    away = RemoteState(1, lambda: (came.append("now"), away.arrived(states))[0])
    assert not away.is_here
    assert torch.equal(away["drift"]["c"], torch.ones(2)) and len(away) == 3 and set(away) == set(states)
    assert came == ["now"] and away.is_here
    away.kept_by(lambda found: lambda: nested_state({"drift.c": found["drift"]["c"] + 1}))
    assert torch.equal(dict(away.items())["drift"]["c"], torch.full((2,), 2.0))
