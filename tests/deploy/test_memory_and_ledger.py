"""The state that a node saves of its client, and the server's record of participation."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedflat.deploy.server.ledger import RoundLedger
from fedflat.deploy.site.client_memory import INITIAL_STATE_VERSION, ClientMemory
from fedflat.errors import UserError


def vectors(value: float) -> dict[str, torch.Tensor]:
    return {"drift.c": torch.full((3,), value), "drift.alpha": torch.tensor(value)}


def test_a_site_keeps_its_last_two_states(tmp_path: Path) -> None:
    memory = ClientMemory(tmp_path, "experiment", 2)
    assert memory.read(INITIAL_STATE_VERSION) == {}
    before = INITIAL_STATE_VERSION
    for version in (1, 4, 5):
        memory.write(vectors(version), version, before)
        before = version
    assert torch.equal(memory.read(5)["drift.c"], torch.full((3,), 5.0))
    assert float(memory.read(4)["drift.alpha"]) == 4
    with pytest.raises(UserError, match="no state after round 1"):
        memory.read(1)
    assert sorted(path.name for path in memory.folder.iterdir()) == ["4.safetensors", "5.safetensors"]


def test_the_state_of_a_lost_update_is_overwritten(tmp_path: Path) -> None:
    memory = ClientMemory(tmp_path, "experiment", 0)
    memory.write(vectors(1), 1, INITIAL_STATE_VERSION)
    memory.write(vectors(2), 2, 1)  # never accepted
    memory.write(vectors(3), 3, 1)
    assert sorted(int(path.stem) for path in memory.folder.iterdir()) == [1, 3]


def test_experiments_and_clients_are_separate(tmp_path: Path) -> None:
    ClientMemory(tmp_path, "a", 1).write(vectors(1), 1, INITIAL_STATE_VERSION)
    for other in (ClientMemory(tmp_path, "a", 2), ClientMemory(tmp_path, "b", 1)):
        with pytest.raises(UserError):
            other.read(1)


@pytest.mark.parametrize("name", ["../elsewhere", "/etc", "", "a/b", "." * 3, "x" * 101])
def test_a_server_cannot_choose_a_folder_elsewhere(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="folder name"):
        ClientMemory(tmp_path, name, 0)


def test_a_damaged_file_is_reported(tmp_path: Path) -> None:
    memory = ClientMemory(tmp_path, "a", 0)
    memory.write(vectors(1), 1, INITIAL_STATE_VERSION)
    (memory.folder / "1.safetensors").write_bytes(b"half")
    with pytest.raises(UserError, match="is damaged"):
        memory.read(1)


def test_the_ledger_knows_when_a_client_was_last_accepted(tmp_path: Path) -> None:
    ledger = RoundLedger(tmp_path / "run" / "participation.jsonl")
    ledger.record(0, [0, 1], {2: "why"}, {})
    ledger.record(1, [0], {}, {1: "late"})
    again = RoundLedger(ledger.path)
    assert again.lines == ledger.lines
    assert [again.last_state_version(client, 2) for client in (0, 1, 2)] == [2, 1, INITIAL_STATE_VERSION]
    assert again.last_state_version(0, 1) == 1  # the second round is trained again


def test_rounds_trained_again_replace_their_lines(tmp_path: Path) -> None:
    ledger = RoundLedger(tmp_path / "participation.jsonl")
    for round in range(4):
        ledger.record(round, [0], {}, {})
    ledger = RoundLedger(ledger.path)
    ledger.record(2, [1], {}, {})
    assert [(line["round"], line["accepted"]) for line in RoundLedger(ledger.path).lines] == [
        (0, [0]),
        (1, [0]),
        (2, [1]),
    ]


def test_an_incomplete_line_is_ignored_and_a_damaged_one_reported(tmp_path: Path) -> None:
    ledger = RoundLedger(tmp_path / "participation.jsonl")
    ledger.record(0, [0], {}, {})
    with ledger.path.open("a") as file:
        file.write('{"round": 1, "acc')
    again = RoundLedger(ledger.path)
    assert len(again.lines) == 1
    again.record(1, [0], {}, {})
    assert [line["round"] for line in RoundLedger(ledger.path).lines] == [0, 1]
    ledger.path.write_text('{"round": 0, "acc\n' + ledger.path.read_text())
    with pytest.raises(UserError, match=r"participation\.jsonl is damaged"):
        RoundLedger(ledger.path)
