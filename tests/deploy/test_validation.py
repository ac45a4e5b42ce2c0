"""Sites validate the model at every evaluation, and the server's evaluations are tracked."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'fedflat[flower]'")

from flwr.app import Message, MetricRecord

from fedflat.data import Dataset, load
from fedflat.deploy import client_app
from fedflat.deploy.server.app import serve
from fedflat.deploy.settings import TRACKERS
from fedflat.errors import UserError
from fedflat.experiment.store.run_folder import Record
from fedflat.reporting.tracking import BACKENDS

from .direct import DirectGrid, node
from .test_rounds import settings_of

HELD_OUT = (200, 50, 150, 100)
"""Held-out examples of each site."""


def site_data(number: int) -> Dataset:
    data = load("digits")
    first = sum(HELD_OUT[:number]) % 200
    train, test = np.arange(40 * number, 40 * number + 40), np.arange(first, first + HELD_OUT[number])
    return replace(data, train=data.train.take(train), test=data.test.take(test))


def validated(folder: Path, tamper: Any = lambda reply: reply, **more: Any) -> tuple[Record, DirectGrid]:
    """A run whose sites validate the average of the last two models."""
    settings = settings_of(
        folder, **{"algorithm": "fedavg+wima(window=2)", "deploy.validation": True, "evaluation.every": 1, **more}
    )
    grid = DirectGrid([node(folder, settings, number) for number in range(4)], client_app(site_data))
    grid.tamper = tamper
    return serve(grid, settings, load("digits")), grid


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Record, DirectGrid]:
    more = {"deploy.track": "tensorboard"} if importlib.util.find_spec("tensorboard") else {}
    return validated(tmp_path_factory.mktemp("validated"), **more)


def test_every_evaluation_has_the_mean_over_the_sites(run: tuple[Record, DirectGrid]) -> None:
    """The mean of the primary model's metrics, weighted by held-out examples."""
    record, grid = run
    answers = [
        reply.content.metric_records["numbers"] for reply in grid.came if reply.metadata.message_type == "evaluate"
    ]
    assert len(answers) == 4 * len(record.history) == 16
    for entry, start in zip(record.history, range(0, 16, 4), strict=True):
        numbers = answers[start : start + 4]
        assert [number["examples"] for number in numbers] == list(HELD_OUT)
        ((name, means),) = entry["sites"].items()
        assert name == ("wima(window=2)" if entry["round"] >= 1 else "server")
        for metric in ("accuracy", "loss"):
            total = sum(count * number[metric] for count, number in zip(HELD_OUT, numbers, strict=True))
            assert means[metric] == pytest.approx(total / sum(HELD_OUT))
    assert record.history[-1]["sites"] != record.history[-2]["sites"]


@pytest.mark.skipif(
    importlib.util.find_spec("tensorboard") is None,
    reason="tensorboard is not installed (pip install 'fedflat[track]')",
)
def test_the_server_logs_to_tensorboard(run: tuple[Record, DirectGrid]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    record, _ = run
    assert record.folder is not None
    events = EventAccumulator(str(record.folder.path / "tensorboard")).Reload()
    for evaluation_set in ("test", "sites"):
        logged = [(event.step, event.value) for event in events.Scalars(f"{evaluation_set}/wima_window_2/accuracy")]
        assert logged == [
            (entry["round"], pytest.approx(entry[evaluation_set]["wima(window=2)"]["accuracy"]))
            for entry in record.history[1:]
        ]


def test_sites_without_valid_metrics_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def tamper(reply: Message) -> Message | None:
        """Site 0 is silent, site 1 sends other metrics, and site 2 claims a negative number of examples."""
        if reply.metadata.message_type == "evaluate":
            if reply.metadata.src_node_id == 100:
                return None
            if reply.metadata.src_node_id == 101:
                reply.content["numbers"] = MetricRecord({"examples": 50})
            if reply.metadata.src_node_id == 102:
                reply.content.metric_records["numbers"]["examples"] = -1
        return reply

    caplog.set_level("INFO", "flwr")
    record, grid = validated(tmp_path, tamper, **{"deploy.sites": "any", "training.rounds": 1})
    assert "no scores from client 0: no answer within" in caplog.text
    for entry in record.history:
        (means,) = entry["sites"].values()
        assert set(means) == {"accuracy", "loss"}
    assert caplog.text.count("; client 1: it reports examples; expected accuracy") == len(record.history)
    last = grid.came[-1].content.metric_records["numbers"]
    assert means["accuracy"] == pytest.approx(last["accuracy"])


def test_without_answers_the_history_has_only_the_servers_metrics(tmp_path: Path) -> None:
    record, _ = validated(
        tmp_path,
        lambda reply: None if reply.metadata.message_type == "evaluate" else reply,
        **{"training.rounds": 1},
    )
    assert record.status == "finished" and all("sites" not in entry for entry in record.history)


def test_unsuitable_settings(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"deploy.validation does not work with federation.privacy=dp\(noise=1\)"):
        validated(tmp_path, **{"federation.privacy": "dp(noise=1)"})
    assert tuple(BACKENDS) == TRACKERS
    with pytest.raises(UserError, match="'tensorbord'; did you mean tensorboard"):
        validated(tmp_path, **{"deploy.track": "tensorbord"})
