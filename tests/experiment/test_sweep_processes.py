"""A sweep in real processes: killed, and resumed by two at the same time."""

from __future__ import annotations

import json
import os
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from typer.testing import CliRunner

import fedflat
from fedflat.cli.application import app
from fedflat.processes import ChildKilled, ChildProcess, close_children
from tests.sweeps import FILE, RUNS

pytestmark = pytest.mark.slow


def sweep(pipe: Connection, file: Path, out: Path) -> None:
    """Run the sweep as the command does, and send its exit code and what it prints."""
    result = CliRunner().invoke(app, ["sweep", str(file), "--out", str(out), "--no-probe", "--json", "--jobs", "1"])
    pipe.send((result.exit_code, result.stdout, result.stderr))


def finish(process: ChildProcess) -> dict[str, str]:
    """The origin of each run, as printed by a process."""
    code, printed, complaints = process.receive()
    close_children([process])
    assert code == 0, complaints
    return {run["name"]: run["by"] for run in json.loads(printed)["runs"]}


def over(out: Path) -> int:
    return sum('"finished"' in path.read_text() for path in out.glob("*/status.json"))


def kill_at(process: ChildProcess, out: Path, runs: int) -> None:
    while over(out) < runs:
        assert process.is_alive, "it ended before it could be killed"
        time.sleep(0.03)
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(ChildKilled):
        process.receive()


def files(out: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(out)): path.read_bytes()
        for path in out.rglob("*")
        if path.is_file() and path.name != "timing.jsonl"
    }


def test_two_processes_share_the_runs_that_a_killed_one_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files are those of an undisturbed sweep."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2])  # where the processes find this module
    file, killed, alone = tmp_path / "sweep.yaml", tmp_path / "killed", tmp_path / "alone"
    file.write_text(FILE)
    kill_at(ChildProcess(sweep, file, killed), killed, RUNS // 4)
    before = over(killed)
    two = [ChildProcess(sweep, file, killed), ChildProcess(sweep, file, killed)]
    done = [{name for name, by in finish(process).items() if by == "here"} for process in two]
    assert RUNS // 4 <= before < RUNS and not done[0] & done[1] and len(done[0] | done[1]) == RUNS - before
    fedflat.sweep(file, out=alone, jobs=1)
    ours, theirs = files(killed), files(alone)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if ours[name] != theirs[name]] == []
