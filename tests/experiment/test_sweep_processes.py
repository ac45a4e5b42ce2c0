"""A sweep in real processes: killed, and resumed by two at the same time."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import fedflat
from tests.sweeps import FILE, RUNS
from tests.time_limits import scaled

pytestmark = pytest.mark.slow


def start(file: Path, out: Path) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-m",
        "fedflat",
        "sweep",
        str(file),
        "--out",
        str(out),
        "--no-probe",
        "--json",
        "--jobs",
        "1",
    ]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> dict[str, str]:
    """The origin of each run, as printed by a process."""
    printed, complaints = process.communicate(timeout=scaled(120))
    assert process.returncode == 0, complaints
    return {run["name"]: run["by"] for run in json.loads(printed)["runs"]}


def over(out: Path) -> int:
    return sum('"finished"' in path.read_text() for path in out.glob("*/status.json"))


def kill_at(process: subprocess.Popen[str], out: Path, runs: int) -> None:
    while over(out) < runs:
        assert process.poll() is None, "it ended before it could be killed"
        time.sleep(0.03)
    process.send_signal(signal.SIGKILL)
    process.communicate()


def files(out: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(out)): path.read_bytes()
        for path in out.rglob("*")
        if path.is_file() and path.name != "timing.jsonl"
    }


def test_two_processes_share_the_runs_that_a_killed_one_left(tmp_path: Path) -> None:
    """The files are those of an undisturbed sweep."""
    file, killed, alone = tmp_path / "sweep.yaml", tmp_path / "killed", tmp_path / "alone"
    file.write_text(FILE)
    kill_at(start(file, killed), killed, RUNS // 4)
    before = over(killed)
    two = [start(file, killed), start(file, killed)]
    done = [{name for name, by in finish(process).items() if by == "here"} for process in two]
    assert RUNS // 4 <= before < RUNS and not done[0] & done[1] and len(done[0] | done[1]) == RUNS - before
    fedflat.sweep(file, out=alone, jobs=1)
    ours, theirs = files(killed), files(alone)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if ours[name] != theirs[name]] == []
