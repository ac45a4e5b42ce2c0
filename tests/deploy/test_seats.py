"""Which node is which client: duplicates, nodes restarted as another client, and nodes that cannot take part."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'fedflat[flower]'")

from flwr.app import Error, Message

from fedflat.deploy.server.app import serve
from fedflat.deploy.settings import config_of
from fedflat.errors import UserError
from fedflat.experiment.run import Run

from .direct import DirectGrid, federation_of, node
from .test_rounds import lines_of, settings_of


def changed(grid: DirectGrid, group: str, change: Any) -> None:
    """Change the federation once a round has been trained."""

    def tamper(reply: Message) -> Message:
        if grid.sent[-1].metadata.group_id == group and grid.sent[-1].metadata.dst_node_id == 103:
            change()
        return reply

    grid.tamper = tamper


def test_the_first_of_two_nodes_with_one_number_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The second takes over once the first has left."""
    settings = settings_of(tmp_path, algorithm="fedavg", **{"federation.clients_per_round": 3, "data.clients": 3})
    grid = federation_of(tmp_path, settings, nodes=3)
    grid.contexts[103] = node(tmp_path, settings, 0)

    def tamper(reply: Message) -> Message:
        if grid.sent[-1].metadata.group_id == "1":
            grid.contexts.pop(100, None)
        return reply

    grid.tamper = tamper
    record = serve(grid, settings)
    assert "node 103 claims to be client 0, which is node 100" in caplog.text
    assert [line["accepted"] for line in lines_of(tmp_path)] == [[0, 1, 2]] * 3
    trained = [m.metadata.dst_node_id for m in grid.sent if m.metadata.message_type == "train"]
    assert trained.count(100) == 2 and trained.count(103) == 1
    assert torch.equal(record.models["server"].weights, Run(config_of(settings)).execute().models["server"].weights)


def test_a_node_restarted_as_another_client_joins_again(tmp_path: Path) -> None:
    """With a registered key it keeps its id in Flower, so it is not greeted again."""
    settings = settings_of(tmp_path, **{"data.clients": 5})
    grid = federation_of(tmp_path, settings)

    def again() -> None:
        grid.contexts[100].node_config["partition-id"] = 4

    changed(grid, "0", again)
    serve(grid, settings)
    lines = {line["round"]: line for line in lines_of(tmp_path)}
    assert re.search("client 4 .*joined as client 0", lines[1]["missing"]["0"])
    assert [client for client in lines[2]["accepted"] if client in (0, 4)] == [4]


def test_a_site_whose_data_changed_joins_again(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, algorithm="fedavg")
    grid = federation_of(tmp_path, settings)
    changed(grid, "0", lambda: grid.contexts[100].run_config.update({"data.validation": 0.5}))
    serve(grid, settings)
    assert [line["accepted"] for line in lines_of(tmp_path)] == [[0, 1, 2, 3], [1, 2, 3], [0, 1, 2, 3]]


def test_a_node_that_has_gone_when_it_is_greeted_joins_as_soon_as_it_returns(tmp_path: Path) -> None:
    """Flower notices after a minute that a node was killed, and reports it as connected until then."""
    settings = settings_of(tmp_path, **{"training.rounds": 1, "deploy.wait": 5.0, "deploy.minimum": 4})
    grid = federation_of(tmp_path, settings)
    without_first = [number for number in grid.contexts if number != 100]
    connected = iter([list(grid.contexts), without_first])
    grid.get_node_ids = lambda: next(connected, list(grid.contexts))  # type: ignore[method-assign]
    grid.tamper = lambda reply: (
        Message(Error(1, "Node Unavailable"), reply_to=grid.sent[-1])
        if len(grid.sent) == 1  # the first greeting, to node 100
        else reply
    )
    serve(grid, settings)
    assert lines_of(tmp_path)[0]["accepted"] == [0, 1, 2, 3]


def test_a_node_that_cannot_save_state_is_rejected(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = settings_of(tmp_path, **{"training.rounds": 1})
    grid = federation_of(tmp_path, settings)
    (tmp_path / "node-0").write_text("no folder")
    serve(grid, settings)
    site, server = (
        [record.getMessage() for record in caplog.records if record.levelname == level]
        for level in ("ERROR", "WARNING")
    )
    assert f"{tmp_path / 'node-0'} (file exists)" in site[0]  # of the site's own log
    assert "--node-config 'partition-id=N state=" in site[0]
    assert "cannot write its client's state to [path] (file exists)" in server[1]
    assert not any(str(tmp_path) in line for line in server)
    assert not [m for m in grid.sent if m.metadata.dst_node_id == 100 and m.metadata.message_type == "train"]


def test_a_site_that_requires_larger_sums_is_rejected(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It names the setting that it needs, and the others continue; sites with the same reason share a line."""
    settings = settings_of(tmp_path, **{"algorithm": "fedavg", "training.rounds": 1, "deploy.minimum": 2})
    settings["deploy.secure_aggregation"] = True
    for node_config, reason in (
        ({"secure-minimum": 4}, "write secure_threshold = 1.0 below [tool.flwr.app.config.deploy] in pyproject.toml"),
        ({"secure-minimum": 5}, "set federation.clients_per_round to at least 5"),
    ):
        settings["deploy.out"] = str(tmp_path / reason.split()[0])
        grid = federation_of(tmp_path, settings)
        for number in (101, 103):
            grid.contexts[number].node_config |= {**node_config, "secure-aggregation": False}
        serve(grid, settings)
        names = "rejected client 1, client 3: sums of this run need only 3 of 4 sites, but this node requires"
        assert re.search(f"{names} .*{re.escape(reason)}\n", caplog.text)
    settings |= {"deploy.secure_threshold": 1.0, "deploy.out": str(tmp_path / "run")}
    for number, context in grid.contexts.items():
        context.run_config.update(settings)
        context.node_config |= {"secure-minimum": 4} if number in (101, 103) else {}
    serve(grid, settings)
    assert lines_of(tmp_path)[0]["accepted"] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "more",
    [{"federation.clients_per_round": 3}, {"federation.clients_per_round": 1, "federation.sampling": "bernoulli"}],
)
def test_an_unreachable_minimum_is_rejected_at_once(more: dict[str, Any], tmp_path: Path) -> None:
    settings = settings_of(tmp_path, **{"deploy.minimum": 4, **more})
    with pytest.raises(UserError, match=r"deploy.minimum=4.* [123] clients.* round \d"):
        serve(federation_of(tmp_path, settings), settings)
    assert not (tmp_path / "run").exists()
