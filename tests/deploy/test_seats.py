"""Which node is which client: two that claim the same, one that was started again as something else, one that cannot take part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'fedflat[flower]'")

from flwr.app import Message

from fedflat.deploy.server.app import serve
from fedflat.deploy.server.settings import experiment_of
from fedflat.errors import UserError
from fedflat.experiment.run import Run

from .direct import DirectGrid, federation_of, node
from .test_rounds import lines_of, settings_of


def changed(grid: DirectGrid, group: str, change: Any) -> None:
    """Let something happen to a federation once a round has been trained."""

    def tamper(reply: Message) -> Message:
        if grid.sent[-1].metadata.group_id == group and grid.sent[-1].metadata.dst_node_id == 103:
            change()
        return reply

    grid.tamper = tamper


def test_two_nodes_with_one_number_are_told_of_and_the_first_has_its_place_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = settings_of(tmp_path, algorithm="fedavg", **{"federation.clients_per_round": 3, "data.clients": 3})
    grid = federation_of(tmp_path, settings, nodes=3)
    grid.contexts[103] = node(tmp_path, settings, 0)
    changed(grid, "1", lambda: grid.contexts.pop(103))
    record = serve(grid, settings)
    assert (
        "client 0 is no longer node 100 but node 103; where both run, give one of them another partition-id"
        in caplog.text
    )
    assert [line["accepted"] for line in lines_of(tmp_path)] == [[0, 1, 2]] * 3
    trained = [m.metadata.dst_node_id for m in grid.sent if m.metadata.message_type == "train"]
    assert trained.count(103) == 2 and trained.count(100) == 1
    assert torch.equal(record.models["server"].weights, Run(experiment_of(settings)).go().models["server"].weights)


def test_a_node_that_was_started_again_as_another_client_does_not_train_for_the_first(tmp_path: Path) -> None:
    """With a registered key it has its old number in Flower, so that nobody greets it."""
    settings = settings_of(tmp_path, **{"data.clients": 5})
    grid = federation_of(tmp_path, settings)

    def again() -> None:
        grid.contexts[100].node_config["partition-id"] = 4

    changed(grid, "0", again)
    serve(grid, settings)
    lines = {line["round"]: line for line in lines_of(tmp_path)}
    assert (
        "this node is client 4 with" in lines[1]["missing"]["0"]
        and "but joined as client 0 with" in lines[1]["missing"]["0"]
    )
    assert [client for client in lines[2]["accepted"] if client in (0, 4)] == [4]


def test_a_site_whose_data_have_changed_joins_anew(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, algorithm="fedavg")
    grid = federation_of(tmp_path, settings)
    changed(grid, "0", lambda: grid.contexts[100].run_config.update({"data.validation": 0.5}))
    serve(grid, settings)
    assert [line["accepted"] for line in lines_of(tmp_path)] == [[0, 1, 2, 3], [1, 2, 3], [0, 1, 2, 3]]


def test_a_node_that_cannot_remember_is_refused_before_it_trains(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = settings_of(tmp_path, **{"training.rounds": 1})
    grid = federation_of(tmp_path, settings)
    (tmp_path / "node-0").write_text("no folder")
    serve(grid, settings)
    assert f"this node cannot write to {tmp_path / 'node-0'}, where its client remembers (file exists)" in caplog.text
    assert "--node-config 'partition-id=N state=\"/path\"'" in caplog.text
    assert not [m for m in grid.sent if m.metadata.dst_node_id == 100 and m.metadata.message_type == "train"]


@pytest.mark.parametrize(
    "more",
    [{"federation.clients_per_round": 3}, {"federation.clients_per_round": 1, "federation.sampling": "bernoulli"}],
)
def test_a_minimum_that_no_cohort_can_reach_is_refused_before_anybody_waits(
    more: dict[str, Any], tmp_path: Path
) -> None:
    settings = settings_of(tmp_path, **{"deploy.minimum": 4, **more})
    with pytest.raises(
        UserError,
        match=r"deploy.minimum=4 is more than the clients that take part in round \d, which are [123]; lower it",
    ):
        serve(federation_of(tmp_path, settings), settings)
    assert not (tmp_path / "run").exists()
