"""Requirements on the nodes of a Ray cluster, and events of remote runs; tests/cluster uses real nodes."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

import fedflat
from fedflat.data.sources.source import DATA_DIR_VARIABLE
from fedflat.experiment.callback import RemoteCallback
from fedflat.experiment.campaign.ray_sweep import RunResources, SweepLocation, UnfitNode, WatchedFolder, run_on_node
from fedflat.experiment.store.run_folder import load_record


@pytest.mark.parametrize(
    ("alive", "resources", "fits"),
    [
        (True, {"CPU": 2.0, "GPU": 1.0}, True),
        (True, {"CPU": 2.0}, False),
        (True, {"CPU": 1.0, "GPU": 4.0}, False),
        (False, {"CPU": 8.0, "GPU": 4.0}, False),
    ],
)
def test_only_live_and_large_enough_nodes_are_used(alive: bool, resources: dict[str, float], fits: bool) -> None:
    assert RunResources(2, 0.5).fit_on({"Alive": alive, "Resources": resources}) == fits


def test_a_node_enters_the_shared_folder_of_the_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "marker").write_text("this sweep")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(DATA_DIR_VARIABLE, str(tmp_path / "data"))
    location = SweepLocation.of_this_process(Path("marker"))
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setenv(DATA_DIR_VARIABLE, "another folder")
    location.enter()
    assert Path.cwd() == tmp_path and os.environ[DATA_DIR_VARIABLE] == str(tmp_path / "data")
    for wrong in ("another sweep", None):
        (tmp_path / "marker").write_text(wrong) if wrong else (tmp_path / "marker").unlink()
        with pytest.raises(UnfitNode, match=re.escape(str(tmp_path))):
            location.enter()


def test_another_version_is_refused_before_reading() -> None:
    with pytest.raises(UnfitNode, match=r"0\.0\.0"):
        run_on_node("0.0.0", b"what only that version could read")


SMALL = {"model": "mlp(hidden=4)", "clients": 4, "clients_per_round": 2, "rounds": 3, "local_steps": 2, "workers": 1}


class EventLog(RemoteCallback):
    """Records its events."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []

    def began(self, run: Any) -> None:
        self.events.append(("began",))

    def evaluated(self, run: Any) -> None:
        self.events.append(("evaluated", run.history[-1]["round"], run.primary))

    def round_done(self, run: Any) -> None:
        self.events.append(("round", run.rounds))

    def ended(self, run: Any, record: Any) -> None:
        self.events.append(("ended", record.status))


def test_callbacks_follow_the_metrics_file(tmp_path: Path) -> None:
    """The metrics of a finished run are written line by line, as another process would see them."""
    fedflat.run("fedavg+swa(start=0.5)", out=tmp_path / "run", **SMALL)
    metrics = tmp_path / "run" / "metrics.jsonl"
    lines = metrics.read_bytes().splitlines(keepends=True)
    config, log = load_record(tmp_path / "run").config, EventLog()
    watched = WatchedFolder(config, tmp_path / "run", (log,))
    status = tmp_path / "run" / "status.json"
    finished = status.read_text()
    status.write_text(finished.replace('"finished"', '"running"'))

    def seen(data: bytes) -> list[tuple[Any, ...]]:
        metrics.write_bytes(data)
        log.events.clear()
        watched.poll()
        return list(log.events)

    assert seen(b"") == []
    assert seen(lines[0][: len(lines[0]) // 2]) == [], "the first line is being written"
    assert seen(lines[0]) == [("began",), ("evaluated", 0, "server"), ("round", 0)]
    assert seen(lines[0]) == [], "nothing new"
    average = "swa(start=0.5)"
    assert seen(b"".join(lines[:3])) == [("evaluated", 2, average), ("round", 2)], (
        "events missed between two polls are not replayed"
    )
    log.events.clear()
    metrics.write_bytes(b"".join(lines))
    status.write_text(finished)
    assert watched.finish().status == "finished"
    assert log.events == [("evaluated", 3, average), ("round", 3), ("ended", "finished")]


def test_a_run_that_has_not_started_causes_no_events(tmp_path: Path) -> None:
    fedflat.run("fedavg", out=tmp_path / "run", **SMALL)
    log = EventLog()
    WatchedFolder(load_record(tmp_path / "run").config, tmp_path / "not yet", (log,)).poll()
    assert log.events == []
