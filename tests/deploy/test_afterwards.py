"""The run folder of a federation: resuming, replaying rounds, scores of sites."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'fedflat[flower]'")

import fedflat
from fedflat.cli.application import app
from fedflat.data import load
from fedflat.deploy.server.app import serve
from fedflat.deploy.server.nodes import NOT_CONNECTED
from fedflat.errors import UserError
from fedflat.experiment.analysis.reopen import reopen
from fedflat.experiment.analysis.replay import Replay, moment_at_checkpoint
from fedflat.experiment.store.files import LockedError
from fedflat.experiment.store.run_folder import RunFolder, load_record

from .direct import federation_of
from .test_rounds import settings_of


class Killed(BaseException):
    pass


def interrupted(folder: Path, group: str = "2", **more: object) -> dict[str, object]:
    """The settings of a run that was killed during its third round, or during another group of messages."""
    settings = settings_of(folder, **more)
    grid = federation_of(folder, settings)

    def tamper(reply: object) -> object:
        if grid.sent[-1].metadata.group_id == group:
            raise Killed
        return reply

    grid.tamper = tamper  # type: ignore[assignment]
    with pytest.raises(Killed):
        serve(grid, settings)
    return settings


def test_a_simulation_cannot_resume_a_run_of_sites(tmp_path: Path) -> None:
    """It would start with fresh control variates, on data that the server may not have."""
    interrupted(tmp_path)
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    with pytest.raises(UserError, match=r"flwr run"):
        fedflat.resume(tmp_path / "run")
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before
    shown = CliRunner().invoke(app, ["show", str(tmp_path / "run")], env={"COLUMNS": "200"}).output
    assert "the same flwr run as before" in shown


def test_a_second_server_leaves_the_status_of_a_live_run_alone(tmp_path: Path) -> None:
    settings = interrupted(tmp_path)
    folder = RunFolder(tmp_path / "run")
    folder.acquire_lock()  # as the process that executes the run
    status = folder.status()
    with pytest.raises(LockedError):
        serve(federation_of(tmp_path, settings), settings)
    assert folder.status() == status
    folder.release_lock()


@pytest.mark.parametrize(("algorithm", "kept"), [("scaffold", True), ("fedavg", False)])
def test_rounds_with_state_at_sites_cannot_be_replayed(algorithm: str, kept: bool, tmp_path: Path) -> None:
    interrupted(tmp_path, algorithm=algorithm)
    record = load_record(tmp_path / "run")
    problem, partition = reopen(record)
    moment = moment_at_checkpoint(RunFolder(tmp_path / "run"), fedflat.algorithm(algorithm), problem, record.config)
    replay = Replay(record.config, problem, partition, moment, workers=1)
    if not kept:
        assert len(replay.clients()) == 4
        return
    with pytest.raises(UserError, match="sites"):
        replay.clients()


def test_a_server_killed_while_sites_are_scored_asks_them_again(tmp_path: Path) -> None:
    settings = interrupted(tmp_path, "score", **{"deploy.score": True})
    folder = RunFolder(tmp_path / "run")
    assert folder.has_ended
    model = (folder.path / "model.safetensors").read_bytes()
    assert serve(federation_of(tmp_path, settings), settings).status == "finished"
    assert (folder.path / "model.safetensors").read_bytes() == model
    assert list(json.loads((folder.path / "sites.json").read_text())["sites"]) == ["0", "1", "2", "3"]
    with pytest.raises(UserError, match="finished"):
        serve(federation_of(tmp_path, settings), settings)


def test_scores_name_missing_sites(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "flwr")
    secure = {"deploy.secure_aggregation": True, "deploy.minimum": 2, "algorithm": "fedavg"}
    settings = settings_of(tmp_path, **{"deploy.score": True, "training.rounds": 1, **secure})
    grid = federation_of(tmp_path, settings, nodes=3)
    for number in (100, 101):
        grid.contexts[number].node_config["scores"] = False
    serve(grid, settings)
    scores = json.loads((tmp_path / "run" / "sites.json").read_text())
    assert list(scores["missing"]) == ["3", "0", "1"] and scores["missing"]["3"] == NOT_CONNECTED
    messages = [(record.levelname, record.getMessage()) for record in caplog.records[-2:]]
    reason = "this node reports no scores; scores=true in its --node-config would permit them"
    assert messages == [
        ("INFO", f"fedflat: no scores from client 0, client 1: {reason}; client 3: {NOT_CONNECTED}"),
        ("INFO", f"fedflat: done; show the results with: fedflat show {tmp_path / 'run'}"),
    ]
    shown = CliRunner().invoke(app, ["show", str(tmp_path / "run")], env={"COLUMNS": "200"}).output
    assert re.search(rf"client 2 +\d+ +1 +0 +{100 * scores['sites']['2']['accuracy']:.2f}", shown), shown
    assert re.search("secure aggregation +on", shown) and "secure aggregation is on" in caplog.text


def test_flatness_of_a_run_whose_data_are_at_its_sites(tmp_path: Path) -> None:
    data = load("digits")
    settings = settings_of(tmp_path, **{"training.rounds": 1})
    serve(federation_of(tmp_path, settings), settings, replace(data, name="public"))
    run = tmp_path / "run"
    asked = CliRunner().invoke(app, ["flatness", "spectrum", str(run)])
    assert asked.exit_code == 2 and f"fedflat.load('{run}').flatness(dataset=held_out())" in asked.output
    model = fedflat.load(run).flatness(dataset=data)
    network = f"{settings['model']} with {len(model.state.weights):,} parameters"
    assert repr(model) == f"RunModel({run}:server: {network}, on digits)"
