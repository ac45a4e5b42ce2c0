"""Sweeps in real processes: killed and resumed, and two at the same time."""

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


def start(file: Path, out: Path, *more: str) -> subprocess.Popen[str]:
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
        *more,
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


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "sweep.yaml").write_text(FILE)
    fedflat.sweep(folder / "sweep.yaml", out=folder / "out", jobs=1)
    return folder / "sweep.yaml", folder / "out"


def test_a_killed_and_restarted_sweep_writes_the_same_files(undisturbed: tuple[Path, Path], tmp_path: Path) -> None:
    file, out = undisturbed
    kill_at(start(file, tmp_path), tmp_path, RUNS // 4)
    before = over(tmp_path)
    by = list(finish(start(file, tmp_path)).values())
    assert RUNS // 4 <= before < RUNS and by.count("before") == before and by.count("here") == RUNS - before
    ours, theirs = files(tmp_path), files(out)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if ours[name] != theirs[name]] == []


def test_two_processes_share_the_runs(undisturbed: tuple[Path, Path], tmp_path: Path) -> None:
    file, out = undisturbed
    two = [start(file, tmp_path), start(file, tmp_path)]
    done = [{name for name, by in finish(process).items() if by == "here"} for process in two]
    assert not done[0] & done[1] and len(done[0] | done[1]) == RUNS
    assert files(tmp_path) == files(out)
