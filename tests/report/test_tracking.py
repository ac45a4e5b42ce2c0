"""Experiment tracking: real TensorBoard files if it is installed, and the callback with a recording backend."""

from __future__ import annotations

import importlib.util
import json

import pytest

import fedflat
from fedflat.errors import UserError
from fedflat.reporting import tracking
from fedflat.reporting.tracking import Tracker

SMALL = {"rounds": 2, "local_steps": 1, "workers": 1, "device": "cpu"}


class Remembers:
    """A backend that records what it receives."""

    package = "json"

    def __init__(self, name, config, folder):
        self.name, self.sent, self.status = name, {}, ""
        BACKENDS.append(self)

    def log(self, values, rounds):
        assert rounds not in self.sent
        self.sent[rounds] = values

    def close(self, status):
        self.status = status


BACKENDS: list[Remembers] = []


@pytest.fixture
def remembers(monkeypatch):
    BACKENDS.clear()
    monkeypatch.setitem(tracking.BACKENDS, "memory", Remembers)
    return BACKENDS


def test_every_evaluation_is_sent_once(remembers):
    result = fedflat.run("fedavg+wima(window=2)", **SMALL, callbacks=[Tracker("memory")])
    (backend,) = remembers
    assert backend.name == "fedavg-wima-window-2-seed0"
    assert backend.status == "finished"
    assert list(backend.sent) == [entry["round"] for entry in result.history]
    last = result.history[-1]
    assert backend.sent[2]["test/server/accuracy"] == last["test"]["server"]["accuracy"]
    assert backend.sent[2]["test/wima_window_2/loss"] == last["test"]["wima(window=2)"]["loss"]
    assert backend.sent[2]["bytes_up"] == last["bytes_up"]


def test_a_comparison_opens_a_backend_for_every_run(remembers):
    fedflat.compare(["fedavg", "fedsam"], seeds=1, **SMALL, callbacks=[Tracker("memory")])
    assert [(backend.name, backend.status) for backend in remembers] == [
        ("fedavg-seed0", "finished"),
        ("fedsam-seed0", "finished"),
    ]


def test_tracking_does_not_change_results(remembers, tmp_path):
    fedflat.run("fedavg", **SMALL, out=tmp_path / "plain")
    fedflat.run("fedavg", **SMALL, out=tmp_path / "tracked", callbacks=[Tracker("memory")])
    assert (tmp_path / "plain" / "metrics.jsonl").read_text() == (tmp_path / "tracked" / "metrics.jsonl").read_text()


def test_unknown_and_missing_backends():
    with pytest.raises(UserError, match="'tensorbord'; did you mean tensorboard"):
        Tracker("tensorbord")


def test_a_missing_package_is_reported(monkeypatch):
    monkeypatch.setattr(tracking.TensorBoard, "package", "no_such_package_at_all")
    with pytest.raises(UserError, match=r"tensorboard is not installed.*fedflat\[track\]"):
        Tracker("tensorboard")


@pytest.mark.skipif(
    importlib.util.find_spec("tensorboard") is None,
    reason="tensorboard is not installed (pip install 'fedflat[track]')",
)
def test_event_files_of_tensorboard(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    fedflat.run("fedavg", **SMALL, out=tmp_path / "run", callbacks=[Tracker("tensorboard")])
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    found = [(event.step, event.value) for event in events.Scalars("test/server/accuracy")]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert found == [(line["round"], pytest.approx(line["test"]["server"]["accuracy"])) for line in lines]


@pytest.mark.skipif(
    importlib.util.find_spec("mlflow") is None, reason="mlflow is not installed (pip install 'fedflat[track]')"
)
def test_metrics_of_mlflow(tmp_path, monkeypatch):
    import mlflow

    monkeypatch.chdir(tmp_path)
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    result = fedflat.run("fedavg", **SMALL, callbacks=[Tracker("mlflow")])
    (run,) = mlflow.search_runs(experiment_names=["fedflat"], output_format="list")
    assert run.data.params["algorithm"] == "fedavg"
    assert run.data.metrics["test/server/accuracy"] == pytest.approx(result.history[-1]["test"]["server"]["accuracy"])


@pytest.mark.skipif(
    importlib.util.find_spec("wandb") is None, reason="wandb is not installed (pip install 'fedflat[track]')"
)
def test_wandb_offline(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    fedflat.run("fedavg", **SMALL, out=tmp_path / "run", callbacks=[Tracker("wandb")])
    assert list((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))
