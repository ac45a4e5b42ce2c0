"""Runs with virtual time that are interrupted after any round resume to the same bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedflat
from fedflat.data import from_clients
from fedflat.errors import UserError
from fedflat.experiment.store.checkpoint import CHECKPOINT
from fedflat.experiment.store.run_folder import RunFolder

from ..experiment.test_resume import contents, die_at, in_a_process_to_be_killed

SETTINGS: dict[str, Any] = {
    "rounds": 8,
    "clients": 9,
    "clients_per_round": 4,
    "local_steps": 1,
    "workers": 1,
    "model": "mlp(hidden=2)",
    "evaluation__examples": 20,
    "eval_every": 2,
    "engine__checkpoint_every": 3,
}
POLICIES = {
    "fedbuff(buffer=3)": "scaffold+ema",
    "fedbuff(buffer=2,staleness=hinge)": "fedavgm",
    "fedasync": "scaffold",
    "over-select(0.5)": "scaffold",
    "deadline(seconds=1,late=partial)": "fednova",
}
CLOCK = "lognormal(1)+uplink(mbps=0.1)+diurnal(share=0.7,period=20)"


class Killed(fedflat.Callback):
    """Ends the process, as far as a test can, after a round."""

    def __init__(self, after: int) -> None:
        self.after = after

    def round_done(self, run: Any) -> None:
        if run.rounds == self.after:
            raise KeyboardInterrupt


@pytest.mark.parametrize("policy", POLICIES)
def test_a_killed_run_resumes_to_the_same_bytes(policy: str, tmp_path: Path) -> None:
    """Killed after rounds 2, 4 and 8: before the first checkpoint, after that of round 3, and in the last round."""
    algorithm, settings = POLICIES[policy], SETTINGS | {"policy": policy, "clock": CLOCK}
    fedflat.run(algorithm, out=tmp_path / "whole", **settings)
    with pytest.raises(KeyboardInterrupt):
        fedflat.run(algorithm, out=tmp_path / "parts", callbacks=Killed(2), **settings)
    for round in (4, 8):
        with pytest.raises(KeyboardInterrupt):
            fedflat.resume(tmp_path / "parts", callbacks=Killed(round))
    fedflat.resume(tmp_path / "parts")
    whole, parts = contents(tmp_path / "whole"), contents(tmp_path / "parts")
    assert whole.keys() == parts.keys()
    assert [name for name in whole if whole[name] != parts[name]] == []


def test_killed_by_the_operating_system_with_updates_in_flight(tmp_path: Path) -> None:
    """The process is killed within a checkpoint of its first rounds, and its successor in a later one."""
    settings = SETTINGS | {"policy": "fedbuff(buffer=3)", "clock": CLOCK}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    fedflat.run("scaffold", out=whole, **settings)
    assert in_a_process_to_be_killed(lambda: fedflat.run("scaffold", out=parts, **settings), die_at(60))
    assert in_a_process_to_be_killed(lambda: fedflat.resume(parts), die_at(20))
    assert (parts / CHECKPOINT).exists() and not RunFolder(parts).has_ended
    fedflat.resume(parts)
    assert contents(parts) == contents(whole)


def test_clients_that_start_twice_from_one_version_continue_their_own_statistics(tmp_path: Path) -> None:
    """The only client fills a buffer of two, i.e. trains twice per version, each time with two equal batches.

    Its statistics are no part of updates in flight.
    """
    inputs = np.arange(1, 9, dtype=np.float32).reshape(4, 2)
    data = from_clients([(inputs, np.arange(4) % 2)], test=(inputs, np.arange(4) % 2))
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))
    federation = {"partition": "natural", "clients_per_round": 1, "policy": "fedbuff(buffer=2)", "clock": "constant(1)"}
    training = {"rounds": 1, "local_steps": 2, "batch_size": 4, "workers": 1, "training__statistics": "own"}
    result = fedflat.run("fedavg", dataset=data, model=model, out=tmp_path / "run", **federation, **training)
    mean = torch.from_numpy((1 - 0.9**4) * inputs.mean(0))
    assert torch.allclose(result.record.statistics[0][:2], mean)


@pytest.mark.parametrize("policy", ["fedbuff(buffer=1)", "fedasync"])
def test_a_checkpoint_has_one_vector_per_update_in_flight(policy: str) -> None:
    """FedAsync also needs each model that clients in flight started from, once."""
    most = 0
    for round in fedflat.rounds("fedcm", **SETTINGS | {"policy": policy, "clock": "lognormal(1)"}):
        timeline, size = round.run.timeline, len(round.server.model.weights)
        vectors = [tensor for tensor in timeline.state().tensors.values() if tensor.numel() == size]
        starts = {flight.version for flight in timeline._pending} if policy == "fedasync" else ()
        assert len(vectors) == len(timeline._pending) + len(starts)
        most = max(most, len(vectors))
    assert most >= 3


def test_a_trace_that_changed_is_noticed(tmp_path: Path) -> None:
    file = tmp_path / "speeds.csv"
    file.write_text("client,seconds_per_step\n0,1\n1,2\n")
    settings = SETTINGS | {"clock": f"trace(path={file},repeat=true)"}
    for _ in fedflat.rounds("fedavg", out=tmp_path / "run", **settings):
        break
    file.write_text("client,seconds_per_step\n0,1\n1,3\n")
    with pytest.raises(UserError, match="has changed since the run began"):
        fedflat.resume(tmp_path / "run")


def test_without_clock_and_policy_nothing_is_recorded(tmp_path: Path) -> None:
    fedflat.run("fedavg", out=tmp_path / "run", **SETTINGS)
    metrics = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert not any(name in metrics for name in ("virtual_seconds", "idle_rounds", "staleness"))
    assert b"timeline" not in (tmp_path / "run" / "checkpoint" / "state.safetensors").read_bytes()
