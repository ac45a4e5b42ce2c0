"""Rounds with rejected updates, late and dead clients, and mismatched nodes; restarts from a checkpoint."""

from __future__ import annotations

import json
import re
import shutil
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'fedflat[flower]'")

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from fedflat.cli.application import app
from fedflat.deploy.server import app as server
from fedflat.deploy.server.app import serve
from fedflat.deploy.server.nodes import NOT_CONNECTED
from fedflat.deploy.settings import config_of, deployment_of
from fedflat.errors import UserError
from fedflat.experiment.callback import Callback
from fedflat.experiment.run import Run
from fedflat.experiment.store.files import locked
from fedflat.experiment.store.run_folder import RunFolder

from .direct import SMALL, federation_of, node


def settings_of(folder: Path, **more: Any) -> dict[str, Any]:
    return {
        **SMALL,
        "algorithm": "scaffold",
        "federation.clients_per_round": 4,
        "deploy.out": str(folder / "run"),
        "deploy.timeout": 0.05,
        **more,
    }


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "run" / "participation.jsonl").read_text().splitlines()]


def test_a_poisoned_update_is_rejected_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = settings_of(tmp_path)
    grid = federation_of(tmp_path, settings)

    def poison(reply: Message) -> Message:
        if "arrays" in reply.content and grid.sent[-1].metadata.dst_node_id == 102:
            arrays = {
                name: np.full_like(array.numpy(), np.nan)
                for name, array in reply.content.array_records["arrays"].items()
            }
            reply.content["arrays"] = ArrayRecord({name: Array(array) for name, array in arrays.items()})
        return reply

    grid.tamper = poison
    record = serve(grid, settings)
    assert record.status == "finished"
    assert torch.isfinite(record.models["server"].weights).all()
    assert [line["accepted"] for line in lines_of(tmp_path)] == [[0, 1, 3]] * 3
    assert all(re.search("displacement.*NaN", line["rejected"]["2"]) for line in lines_of(tmp_path))
    assert re.search("round 0: rejected update from client 2: .*NaN", caplog.text)
    shown = CliRunner().invoke(app, ["show", str(tmp_path / "run")], env={"COLUMNS": "200"}).output
    assert re.search(r"client 2 +rejected +0-2 +displacement contains NaN", shown)
    assert re.search(r"client 1 +\d+ +3 +2 *\n", shown) and re.search(r"client 2 +\d+ +0 +– *\n", shown)
    assert "4 sites" in shown and "Partition" not in shown and "off: the server sees every update" in shown
    document = json.loads(CliRunner().invoke(app, ["show", str(tmp_path / "run"), "--json"]).output)
    (absence,) = document["absent_sites"]
    assert (absence["client"], absence["rounds"]) == (2, [0, 1, 2])


def test_a_client_whose_update_was_lost_continues_from_its_accepted_state(tmp_path: Path) -> None:
    """Its second update never arrives; the result is as if it had not taken part in that round."""
    settings = settings_of(tmp_path)
    grid = federation_of(tmp_path, settings)

    def tamper(reply: Message) -> Message | None:
        sent = grid.sent[-1].metadata
        return None if sent.dst_node_id == 101 and sent.group_id == "1" else reply

    grid.tamper = tamper
    record = serve(grid, settings)
    assert lines_of(tmp_path)[1]["missing"] == {"1": "no answer within 0.05 s"}
    assert [line["accepted"] for line in lines_of(tmp_path)] == [[0, 1, 2, 3], [0, 2, 3], [0, 1, 2, 3]]
    expected = _simulated_without(settings, round=1, client=1)
    assert torch.equal(record.models["server"].weights, expected)


def _simulated_without(settings: dict[str, Any], round: int, client: int) -> torch.Tensor:
    run = Run(config_of(settings))
    sampled = run.timeline.sample

    def sample(number: int, size: int, time: float) -> list[int]:
        return [other for other in sampled(number, size, time) if (number, other) != (round, client)]

    run.timeline.sample = sample  # type: ignore[method-assign]
    return run.execute().models["server"].weights


def test_a_server_killed_between_rounds_resumes_and_counts_no_round_twice(tmp_path: Path) -> None:
    """Killed after the sites trained the third round but before its checkpoint: they return to their previous state."""
    settings = settings_of(tmp_path, algorithm="fedmoswa+ema")
    expected = Run(config_of(settings)).execute()
    grid = federation_of(tmp_path, settings)

    class Killed(BaseException):
        pass

    def tamper(reply: Message) -> Message:
        if grid.sent[-1].metadata.group_id == "2" and grid.sent[-1].metadata.dst_node_id == 103:
            raise Killed
        return reply

    grid.tamper = tamper
    with pytest.raises(Killed):
        serve(grid, settings)
    assert [line["round"] for line in lines_of(tmp_path)] == [0, 1]
    record = serve(federation_of(tmp_path, settings), settings)
    assert record.history == expected.history
    for name, model in expected.models.items():
        assert torch.equal(record.models[name].weights, model.weights)
    assert [line["round"] for line in lines_of(tmp_path)] == [0, 1, 2]


@pytest.mark.parametrize("number", [203, 103], ids=["killed and restarted", "disconnected"])
def test_a_lost_node_is_skipped_and_may_return(number: int, tmp_path: Path) -> None:
    """After a kill Flower gives it a new id, after a lost connection it keeps the old one."""
    settings = settings_of(tmp_path)
    grid = federation_of(tmp_path, settings)

    class Reaper(Callback):
        def round_done(self, run: Run) -> None:
            if run.server.rounds == 1:
                del grid.contexts[103]
            if run.server.rounds == 2:
                grid.contexts[number] = node(tmp_path, settings, 3)

    log = server._ProgressLog
    try:
        server._ProgressLog = type("Both", (log,), {"round_done": Reaper.round_done})  # type: ignore[misc]
        record = serve(grid, settings)
    finally:
        server._ProgressLog = log  # type: ignore[misc]
    assert record.status == "finished"
    assert [line["accepted"] for line in lines_of(tmp_path)] == [[0, 1, 2, 3], [0, 1, 2], [0, 1, 2, 3]]
    assert lines_of(tmp_path)[1]["missing"] == {"3": NOT_CONNECTED}


def test_too_few_updates_pause_the_run(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, **{"deploy.minimum": 4, "deploy.tries": 2})
    grid = federation_of(tmp_path, settings)
    grid.tamper = lambda reply: (
        None if grid.sent[-1].metadata.group_id == "1" and grid.sent[-1].metadata.dst_node_id == 100 else reply
    )
    with pytest.raises(UserError, match=r"round 1.* 3, but at least 4 .*deploy.minimum"):
        serve(grid, settings)
    status = RunFolder(tmp_path / "run").status()
    assert status["status"] == "paused" and "round 1 has too few updates" in status["reason"]
    record = serve(federation_of(tmp_path, settings), settings)
    assert torch.equal(record.models["server"].weights, Run(config_of(settings)).execute().models["server"].weights)


def test_a_run_without_enough_sites_is_shown_and_may_be_replaced(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, **{"deploy.minimum": 4, "training.rounds": 1})
    grid = federation_of(tmp_path, settings)
    grid.contexts[103].node_config["key"] = str(tmp_path / "lost.key")
    with pytest.raises(UserError, match="too few sites have joined: 3, but at least 4"):
        serve(grid, settings)
    for folder in (tmp_path / "run", tmp_path):
        shown = " ".join(CliRunner().invoke(app, ["show", str(folder)], env={"COLUMNS": "200"}).output.split())
        assert re.search(
            r"paused.*too few sites have joined: 3.*rejected node 103: cannot read the key \[path\]", shown
        )
    other = {**settings, "seed": 1}
    with locked(tmp_path / "run" / "checkpoint"), pytest.raises(UserError, match="working on"):
        serve(federation_of(tmp_path, other), other)
    assert RunFolder(tmp_path / "run").config().seed == 0
    assert serve(federation_of(tmp_path, other), other).config.seed == 1
    (tmp_path / "run" / "metrics.jsonl").unlink()
    with pytest.raises(UserError, match="contains a run of another experiment"):  # it has trained
        serve(grid, settings)


@pytest.mark.parametrize("fresh", [False, True])
def test_a_node_without_its_state_starts_afresh_on_request(fresh: bool, tmp_path: Path) -> None:
    settings = settings_of(tmp_path)
    grid = federation_of(tmp_path, settings)
    grid.contexts[100].node_config["fresh-state"] = fresh

    def tamper(reply: Message) -> Message:
        if grid.sent[-1].metadata.group_id == "0" and grid.sent[-1].metadata.dst_node_id == 103:
            shutil.rmtree(tmp_path / "node-0")
        return reply

    grid.tamper = tamper
    serve(grid, settings)
    if fresh:
        assert all(line["accepted"] == [0, 1, 2, 3] for line in lines_of(tmp_path))
    else:
        reason = lines_of(tmp_path)[1]["missing"]["0"]
        assert "no state after round 1" in reason and "fresh-state=true" in reason
        assert str(tmp_path) not in reason


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"algorithm": "fedavg"}, r"algorithm is fedavg \(\w+\) at the node but scaffold \(\w+\) at the server"),
        ({"model": "mlp(hidden=9)"}, r"model is \w+ at the node but \w+ at the server"),
        ({"training.lr": 0.06}, r"training is \w+ at the node but \w+ at the server"),
    ],
)
def test_a_node_with_another_experiment_is_rejected_at_hello(change: dict[str, Any], why: str, tmp_path: Path) -> None:
    settings = settings_of(tmp_path, **{"deploy.minimum": 4})
    grid = federation_of(tmp_path, settings)
    grid.contexts[102].run_config |= change
    with pytest.raises(UserError, match="3, but at least 4"):
        serve(grid, settings)
    reasons = [reply.content.config_records["refusal"]["why"] for reply in grid.came if "refusal" in reply.content]
    assert len(reasons) == 1
    assert re.search(why, str(reasons[0])), reasons


def test_an_implausible_greeting_is_rejected_by_the_server_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Indices of a quadrillion examples would fill the server's memory."""
    settings = settings_of(tmp_path)
    grid = federation_of(tmp_path, settings)

    def implausible(reply: Message) -> Message:
        if grid.sent[-1].metadata.message_type == "query.hello":
            change = {100: {"fedflat": "0.0.9"}, 101: {"examples": 10**15}}.get(grid.sent[-1].metadata.dst_node_id, {})
            reply.content.config_records["header"].update(change)
        return reply

    grid.tamper = implausible
    assert serve(grid, settings).status == "finished"
    assert all(line["accepted"] == [2, 3] for line in lines_of(tmp_path))
    assert "fedflat is 0.1.0 at the server but 0.0.9 at the node" in caplog.text
    assert "it claims to have 1000000000000000 examples" in caplog.text


def test_a_folder_with_another_run_is_refused(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, **{"training.rounds": 1})
    serve(federation_of(tmp_path, settings), settings)
    with pytest.raises(UserError, match=r"finished"):
        serve(federation_of(tmp_path, settings), settings)
    with pytest.raises(UserError, match="another experiment"):
        serve(federation_of(tmp_path, settings), {**settings, "seed": 1})


def test_invalid_settings(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"timout.*did you mean timeout"):
        deployment_of({"deploy.timout": 3})
    with pytest.raises(UserError, match=r"deploy.minimum=0"):
        deployment_of({"deploy.minimum": 0})
    with pytest.raises(UserError, match=r"flatness\.every"):
        config_of({"flatness.every": 1})
    for settings in ({"engine": "gpu"}, {"data": "digits", "data.clients": 3}):
        with pytest.raises(UserError, match="is a group of settings"):
            config_of(settings)
    with pytest.raises(UserError, match=r"federation\.dropout"):
        config_of({"federation.dropout": 0.1})
    for name, value in {"name": "ray", "compile": "on", "checkpoint_every": 10, "workers": 4}.items():
        with pytest.raises(UserError, match=f"engine.{name}"):
            config_of({f"engine.{name}": value})


GARBLED = {
    "empty": RecordDict(),
    "lists for numbers": RecordDict(
        {"arrays": ArrayRecord(), "numbers": MetricRecord({"lr_sum": [1.0, 2.0], "examples": 3})}
    ),
    "bytes that are no array": RecordDict(
        {"arrays": ArrayRecord({"displacement": Array("float32", (9,), "numpy.ndarray", b"no array at all")})}
    ),
    "refusal without a reason": RecordDict({"refusal": ConfigRecord()}),
    "forged lines of the log": RecordDict({"refusal": ConfigRecord({"why": "\x1b[2K\nround 0: accepted" * 1000})}),
    "header only": RecordDict({"header": ConfigRecord({"client": "two", "examples": -1})}),
}


@pytest.mark.parametrize("kind", ["train", "query.hello"])
def test_garbled_answers_do_no_harm(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Another one in every round."""
    settings = settings_of(tmp_path, **{"training.rounds": len(GARBLED), "training.local_steps": 1})
    grid, garbled = federation_of(tmp_path, settings), cycle(GARBLED.values())

    def garble(reply: Message) -> Message:
        sent = grid.sent[-1]
        is_garbled = sent.metadata.dst_node_id == 102 and sent.metadata.message_type == kind
        return Message(next(garbled), reply_to=sent) if is_garbled else reply

    grid.tamper = garble
    assert serve(grid, settings).status == "finished"
    for line, name in zip(lines_of(tmp_path), GARBLED, strict=True):
        assert line["accepted"] == [0, 1, 3], name
        assert list(line["rejected"] | line["missing"]) == ["2"], name
    for message in caplog.messages:
        assert message.isprintable() and len(message) < 5000, message


def test_a_node_that_never_answers_does_not_delay_rounds(tmp_path: Path) -> None:
    settings = settings_of(tmp_path)
    grid = federation_of(tmp_path, settings)
    grid.tamper = lambda reply: None if grid.sent[-1].metadata.dst_node_id == 103 else reply
    assert serve(grid, settings).status == "finished"
    greetings = [m for m in grid.sent if m.metadata.dst_node_id == 103]
    assert [m.metadata.message_type for m in greetings] == ["query.hello"]
    assert all(line["accepted"] == [0, 1, 2] for line in lines_of(tmp_path))
    status = RunFolder(tmp_path / "run").status()
    assert status["rejected_nodes"] == {"node 103": "it has not answered the greeting so far"}
    shown = CliRunner().invoke(app, ["show", str(tmp_path / "run")], env={"COLUMNS": "200"}).output
    assert re.search(r"node 103 +site rejected +\S+ +it has not answered the greeting so far", shown)


@pytest.mark.parametrize("number", [103, 203])
def test_a_failed_handshake_is_repeated_in_the_next_round(number: int, tmp_path: Path) -> None:
    """The node has another experiment at first; its id may change when it is restarted."""
    settings = settings_of(tmp_path)
    grid = federation_of(tmp_path, settings)
    grid.contexts[103].run_config["training.lr"] = 0.06

    def tamper(reply: Message) -> Message:
        if grid.sent[-1].metadata.group_id == "0":
            grid.contexts.pop(103, None)
            grid.contexts[number] = node(tmp_path, settings, 3)
        return reply

    grid.tamper = tamper
    serve(grid, settings)
    assert [line["accepted"] for line in lines_of(tmp_path)] == [[0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3]]
    assert "rejected_nodes" not in RunFolder(tmp_path / "run").status()


def test_a_round_closes_at_its_quorum(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, **{"deploy.quorum": 3, "deploy.timeout": 60.0, "training.rounds": 1})
    grid = federation_of(tmp_path, settings)
    grid.tamper = lambda reply: (
        None if grid.sent[-1].metadata.group_id == "0" and grid.sent[-1].metadata.dst_node_id == 100 else reply
    )
    serve(grid, settings)
    assert lines_of(tmp_path)[0]["missing"] == {"0": "no answer before 3 others (deploy.quorum)"}
    with pytest.raises(UserError, match=r"deploy.quorum=1 .*deploy.minimum=2"):
        serve(grid, settings_of(tmp_path / "other", **{"deploy.quorum": 1, "deploy.minimum": 2}))
    with pytest.raises(UserError, match=r"deploy.quorum=5, but at most 4 clients"):
        serve(grid, settings_of(tmp_path / "large", **{"deploy.quorum": 5}))
