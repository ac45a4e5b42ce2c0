"""fedflat watch: finished, running, killed and progressing runs."""

from __future__ import annotations

import json
import os
import re
import shutil
import time

import pytest

from fedflat.cli.experiments.watch import read_run
from fedflat.experiment.store.files import locked


@pytest.fixture
def running(finished, tmp_path):
    """A run with status running after two of three rounds."""
    folder = tmp_path / "running"
    shutil.copytree(finished, folder)
    (folder / "status.json").write_text(json.dumps({"status": "running"}))
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(line for line in lines if json.loads(line)["round"] <= 2))
    (folder / "timing.jsonl").write_text(
        "".join(json.dumps({"round": n, "seconds": 10.0 + 4 * n + 100 * (n > 0)}) + "\n" for n in range(3))
    )
    with locked(folder / "checkpoint"):
        yield folder


def test_once_prints_the_current_state(fedflat, finished):
    shown = fedflat("watch", finished, "--once").stdout
    assert re.search(rf"\n{finished.name} .*finished +3 of 3", shown)
    assert "1 of 1 runs" in shown


def test_remaining_time_is_estimated_from_recent_rounds(running):
    sight = read_run(running)
    assert (sight.status, sight.rounds, sight.of) == ("running", 2, 3)
    assert sight.left == pytest.approx(4.0)
    assert sight.seconds == 118.0, "round 1 includes 100 s of set-up"


def test_a_killed_run_is_interrupted(fedflat, running, tmp_path):
    shutil.copytree(running, tmp_path / "killed")  # nobody holds the lock of the copy
    for flags in (["--once"], []):  # without --once, it ends by itself
        shown = fedflat("watch", tmp_path / "killed", *flags).stdout
        assert "interrupted" in shown and f"fedflat resume {tmp_path / 'killed'}" in shown
    assert read_run(tmp_path / "killed").left is None


def test_a_run_that_does_not_write_is_silent(fedflat, running):
    old = time.time() - 3600
    for path in running.iterdir():
        os.utime(path, (old, old))
    shown = fedflat("watch", running).stdout  # ends by itself, because a silent run counts as ended
    assert "silent" in shown
    assert f"fedflat resume {running}" in shown


def test_watch_ends_when_all_runs_have_ended(fedflat, running, finished, monkeypatch):
    waited = []

    def finish(seconds: float) -> None:
        waited.append(seconds)
        shutil.copy(finished / "metrics.jsonl", running / "metrics.jsonl")
        shutil.copy(finished / "status.json", running / "status.json")

    monkeypatch.setattr("fedflat.cli.experiments.watch.time.sleep", finish)  # between two polls
    shown = fedflat("watch", running, "--interval", "0.2").stdout
    assert waited == [0.2]
    assert shown.index("2 of 3") < shown.index("3 of 3")
    assert "1 of 1 runs" in shown


def test_json_of_all_runs_below_a_folder(fedflat, compared):
    found = json.loads(fedflat("watch", compared, "--json").stdout)
    assert {(one["algorithm"], one["seed"], one["status"]) for one in found} == {
        (name, seed, "finished") for name in ("fedavg", "fedsam") for seed in (0, 1)
    }


def test_runs_with_different_metrics_and_a_loss_that_is_not_finite(fedflat, finished, running):
    status = {"status": "diverged", "rounds": 2, "metric": "loss", "lower_is_better": True}
    (running / "status.json").write_text(json.dumps(status))
    lines = [json.loads(line) for line in (running / "metrics.jsonl").read_text().splitlines()]
    for metrics in lines[-1]["test"].values():
        metrics["loss"] = None
    (running / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert (run := read_run(running)).loss is run.value is None and run.best > 0
    shown = fedflat("watch", running, finished, "--once").stdout
    assert " metric " in shown and "accuracy" not in shown


def test_empty_and_missing_folders(fedflat, tmp_path):
    assert "no run has begun yet" in fedflat("watch", tmp_path, "--once").stdout
    result = fedflat("watch", tmp_path / "nowhere")
    assert result.exit_code != 0
    assert str(tmp_path / "nowhere") in result.stderr
    assert "test_watch.py is a file; expected a run folder" in fedflat("watch", __file__, "--once").stderr


@pytest.mark.parametrize(
    ("file", "content"), [("status.json", "half a"), ("status.json", "{}"), ("metrics.jsonl", '{"round": 3}\n')]
)
def test_a_damaged_run_is_reported_and_others_are_shown(fedflat, running, tmp_path, file, content):
    shutil.copytree(running, tmp_path / "whole")
    (running / file).write_text(content)
    look = fedflat("watch", tmp_path, "--once")
    assert "0 of 1 runs" in look.stdout
    assert look.stderr.startswith(f"fedflat: {running} ") and str(running / file) in look.stderr
    alone = fedflat("watch", running)  # there is nothing to wait for
    assert alone.exit_code == 2 and str(running / file) in alone.stderr


def test_a_paused_run_is_not_counted_as_finished(fedflat, small, tmp_path):
    fedflat("run", "fedavg", *small, "--set", "stop.seconds=1e-9", "--quiet", "--out", "late")
    shown = " ".join(fedflat("watch", "late", "--once").stdout.split())
    assert "0 of 1 runs finished; continue with: fedflat resume late" in shown
