"""Estimated memory, disk and time against what runs actually use."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fedflat.bench.setting import RandomImages
from fedflat.cli.shared.progress import in_words
from fedflat.experiment.campaign.estimate import Forecast, ForecastCallback, forecast, run_disk
from fedflat.experiment.config import config
from fedflat.experiment.run import Run
from fedflat.experiment.store.checkpoint import SECONDS_BETWEEN, CheckpointInterval

SMALL = {
    "model": "mlp(hidden=8)",
    "data": {"clients": 12, "partition": "iid"},
    "federation": {"clients_per_round": 4},
    "training": {"rounds": 40, "local_steps": 1},
    "evaluation": {"every": 40},
    "engine": {"workers": 1},
}


def told(algorithm: str, folder: Path | None = None, long: float = 0.0) -> tuple[list[Forecast], Run]:
    heard: list[Forecast] = []
    run = Run(config({**SMALL, "algorithm": algorithm}), folder, callbacks=(ForecastCallback(heard.append, long),))
    run.go()
    return heard, run


def test_a_run_is_foretold_once(tmp_path: Path) -> None:
    heard, run = told("scaffold+wima", tmp_path / "run")
    (found,) = heard
    size = 4 * run.problem.layout.size
    assert found.model == size
    assert found.states == 12 * size
    assert found.cohort == 4 * 3 * size  # displacement, control variate, and its change
    assert found.rounds == 37
    assert found.seconds == pytest.approx(37 * found.seconds_per_round)
    rows = tmp_path / "run" / "state" / "clients" / "rows.bin"
    assert rows.stat().st_size <= 2 * found.states <= found.disk
    written = sum(file.stat().st_size for file in (tmp_path / "run").rglob("*") if file.is_file())
    assert 0.5 * written < found.disk < 2 * written


def test_stateless_runs_without_a_folder_need_no_disk() -> None:
    (found,), _ = told("fedavg")
    assert found.states == found.disk == 0
    assert found.gpu is None


def test_only_clients_that_can_take_part_are_counted() -> None:
    many = {**SMALL, "algorithm": "scaffold", "data": {"clients": 10**6, "partition": "virtual"}}
    run = Run(config(many))
    found = forecast(run, 1.0)
    assert found.clients == 4 * 40 and found.states == 4 * 40 * 4 * run.problem.layout.size
    whole = run_disk(run.config, run.problem.layout.size, 0, 10**6)
    assert (
        whole
        == run_disk(run.config, run.problem.layout.size, 0, 4 * 40)
        != run_disk(run.config, run.problem.layout.size, 0, 4)
    )


def test_short_runs_are_not_foretold() -> None:
    assert told("fedavg", long=1000.0)[0] == []


def test_statistics_that_clients_keep_count() -> None:
    own = {
        **SMALL,
        "model": "resnet20(norm=batch)",
        "training": {"rounds": 3, "local_steps": 1, "batch_size": 4, "statistics": "own"},
    }
    run = Run(config(own), data=RandomImages(size=48, side=8).dataset())
    run._open()
    assert forecast(run, 1.0).states == 12 * 4 * run.problem.buffers.size


def test_in_words() -> None:
    text = in_words(Forecast(1000, 2000, 3000, 4_000_000, 1000, 5000, 7200.0, 0.05, 144_000, (2 * 10**9, 14 * 10**10)))
    assert re.search(r"144,000 rounds at about 0.05 s: 2 h", text)
    assert "2 GB of 140 GB of the GPU" in text
    assert "4 MB kept for 1,000 clients" in text


def test_checkpoints_are_no_more_frequent_than_a_disk_likes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[int] = []
    real = Run._checkpoint
    monkeypatch.setattr(Run, "_checkpoint", lambda run: (saved.append(run.server.rounds), real(run))[1])
    told("fedavg", tmp_path / "fast")
    assert saved == [40]
    monkeypatch.setattr("fedflat.experiment.store.checkpoint.SECONDS_BETWEEN", 0.0)
    monkeypatch.setattr("fedflat.experiment.store.checkpoint.MOST_OF_THE_TIME", float("inf"))
    told("fedavg", tmp_path / "slow")
    assert saved[1:] == [10, 20, 30, 40]
    saved.clear()
    monkeypatch.setattr("fedflat.experiment.store.checkpoint.MOST_OF_THE_TIME", 1e-6)
    told("fedavg", tmp_path / "dear")
    assert saved == [10, 40]


def test_checkpoints_that_take_long_are_further_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("fedflat.experiment.store.checkpoint.time.monotonic", lambda: now)
    open_, asked = CheckpointInterval(None), CheckpointInterval(7)
    assert not open_.is_due(10)
    now += SECONDS_BETWEEN
    assert open_.is_due(10) and not open_.is_due(15)
    for pace in (open_, asked):
        with pace.measured():
            now += 2
    now += 10
    assert not open_.is_due(20)  # two seconds in every twelve would be too much
    assert asked.is_due(21) and not asked.is_due(20)
    now += 30
    assert open_.is_due(30)
