"""Sites prove who they are and what they answer: strangers, replays and misdirected or changed updates are rejected."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'fedflat[flower]'")

from flwr.app import Message, RecordDict

from fedflat.deploy.server.app import serve
from fedflat.deploy.settings import config_of
from fedflat.deploy.trust.certificates import write_certificates
from fedflat.deploy.trust.signatures import read_private_key, read_site_list
from fedflat.errors import UserError
from fedflat.experiment.run import Run
from fedflat.experiment.store.run_folder import RunFolder

from .direct import DirectGrid, node
from .test_rounds import lines_of, settings_of

SITES = 3


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Keys of three sites, and of one that is not in the list."""
    folder = tmp_path_factory.mktemp("keys")
    write_certificates(folder, ["localhost"], SITES + 1, days=1)
    lines = (folder / "sites.txt").read_text().replace("1 site-1", "1 hospital-b").splitlines()
    (folder / "sites.txt").write_text("\n".join(lines[:-1]) + "\n")
    return folder


def signed_federation(folder: Path, keys: Path, **more: Any) -> tuple[DirectGrid, dict[str, Any]]:
    settings = settings_of(
        folder,
        **{"algorithm": "fedavg", "data.clients": SITES, "federation.clients_per_round": SITES, **more},
        **{"deploy.sites": str(keys / "sites.txt")},
    )
    return DirectGrid([node(folder, settings, site, keys / f"site-{site}.key") for site in range(SITES)]), settings


def test_a_node_without_the_sites_key_cannot_replace_it(
    tmp_path: Path, keys: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither with a key that is not in the list, nor without a key, nor as a client that is not in the list."""
    grid, settings = signed_federation(tmp_path, keys)
    grid.contexts[103] = node(tmp_path, settings, 1, keys / "site-3.key")
    grid.contexts[104] = node(tmp_path, settings, 1)
    record = serve(grid, settings)
    rejected = RunFolder(tmp_path / "run").status()["rejected_nodes"]
    assert re.search(r"client 1 \(hospital-b\), .*not signed with the key of hospital-b", rejected["node 103"])
    assert re.search(r"client 1 \(hospital-b\), .*not signed; .*--node-config", rejected["node 104"])
    assert "rejected node 103: it claims" in caplog.text
    trained = {m.metadata.dst_node_id for m in grid.sent if m.metadata.message_type == "train"}
    assert trained == {100, 101, 102}
    assert [line["accepted"] for line in lines_of(tmp_path)] == [[0, 1, 2]] * 3
    assert lines_of(tmp_path)[0]["sites"] == {"0": "site-0", "1": "hospital-b", "2": "site-2"}
    assert torch.equal(record.models["server"].weights, Run(config_of(settings)).execute().models["server"].weights)


def test_a_client_outside_the_list_cannot_join(tmp_path: Path, keys: Path) -> None:
    grid, settings = signed_federation(tmp_path, keys, **{"data.clients": 4, "training.rounds": 1})
    grid.contexts[103] = node(tmp_path, settings, 3, keys / "site-3.key")
    serve(grid, settings)
    assert "client 3, which is not in the list" in RunFolder(tmp_path / "run").status()["rejected_nodes"]["node 103"]


def test_the_same_site_may_return_from_another_node(tmp_path: Path, keys: Path) -> None:
    """A killed node gets a new id while Flower still believes that the old one is connected."""
    grid, settings = signed_federation(tmp_path, keys)

    def restart(reply: Message) -> Message:
        if grid.sent[-1].metadata.group_id == "0":
            grid.contexts[201] = node(tmp_path, settings, 1, keys / "site-1.key")
        return reply

    grid.tamper = restart
    serve(grid, settings)
    trained = [m.metadata.dst_node_id for m in grid.sent if m.metadata.message_type == "train"]
    assert trained.count(101) == 1 and trained.count(201) == 2


def with_receipt(**claims: str) -> Callable[[RecordDict, RecordDict, RecordDict], RecordDict]:
    def forge(answer: RecordDict, first: RecordDict, other: RecordDict) -> RecordDict:
        answer.config_records["receipt"].update(claims)
        return answer

    return forge


def replaced(answer: RecordDict, **records: Any) -> RecordDict:
    """An answer with other records; None removes one."""
    changed = {**answer, **records}
    return RecordDict({name: record for name, record in changed.items() if record is not None})


FORGERIES: dict[str, tuple[Callable[[RecordDict, RecordDict, RecordDict], RecordDict], str]] = {
    "a replay": (lambda answer, first, other: first, "it is for round 0, not for round 1"),
    "a misdirected update": (lambda answer, first, other: other, "it is the answer of client 0, not of client 1"),
    "a replay within the round": (with_receipt(challenge="0" * 32), "it answers another message, so it is a replay"),
    "an update of another run": (with_receipt(experiment="0123456789abcdef"), "it belongs to another run"),
    "an update of another model": (with_receipt(base="0" * 64), "it starts from another model"),
    "arrays of another site": (
        lambda answer, first, other: replaced(answer, arrays=other["arrays"]),
        "it is not signed with the key of hospital-b",
    ),
    "numbers of another site": (
        lambda answer, first, other: replaced(answer, numbers=other["numbers"]),
        "it is not signed with the key of hospital-b",
    ),
    "no receipt": (
        lambda answer, first, other: replaced(answer, receipt=None),
        "it does not say which message it answers",
    ),
}
"""Forges an answer of client 1, given its honest one, its first one and that of client 0; why it is rejected."""


def test_forged_updates_are_rejected(tmp_path: Path, keys: Path, caplog: pytest.LogCaptureFixture) -> None:
    """After an honest first round, another forgery in every round."""
    more = {"training.rounds": 1 + len(FORGERIES), "training.local_steps": 1, "evaluation.every": 99}
    grid, settings = signed_federation(tmp_path, keys, **more)
    forgeries = list(FORGERIES.values())
    answers: dict[tuple[int, int], RecordDict] = {}

    def tamper(reply: Message) -> Message:
        asked = grid.sent[-1].metadata
        if asked.message_type != "train":
            return reply
        client, round = asked.dst_node_id - 100, int(asked.group_id)
        answers[client, round] = reply.content
        if client != 1 or round == 0:
            return reply
        forge, _ = forgeries[round - 1]
        return Message(forge(reply.content, answers[1, 0], answers[0, round]), reply_to=grid.sent[-1])

    grid.tamper = tamper
    serve(grid, settings)
    first, *lines = lines_of(tmp_path)
    assert first["accepted"] == [0, 1, 2]
    for line, (name, (_, why)) in zip(lines, FORGERIES.items(), strict=True):
        assert line["accepted"] == [0, 2], name
        assert line["rejected"] == {"1": why}
        assert f"round {line['round']}: rejected update from client 1 (hospital-b): {why}" in caplog.text


def test_a_site_notices_a_changed_model(tmp_path: Path, keys: Path) -> None:
    grid, settings = signed_federation(tmp_path, keys, **{"training.rounds": 1})
    push = grid.push_messages

    def tampered(messages: Any) -> Any:
        messages = list(messages)
        for message in messages:
            if message.metadata.message_type == "train" and message.metadata.dst_node_id == 101:
                message.content.config_records["header"]["base"] = "0" * 64
        return push(messages)

    grid.push_messages = tampered  # type: ignore[method-assign]
    serve(grid, settings)
    assert "changed on the way" in lines_of(tmp_path)[0]["missing"]["1"]


def test_damaged_lists_of_sites(tmp_path: Path, keys: Path) -> None:
    path = tmp_path / "sites.txt"
    good = (keys / "site-0.key.pub").read_text().strip()
    with pytest.raises(UserError, match=r"cannot read .*sites.txt \(no such file.*deploy.sites"):
        read_site_list(path)
    for text, why in {
        "# nobody\n\n": "lists no site",
        f"zero a {good}": "line 1 .*expected CLIENT NAME PUBLIC-KEY",
        f"0 a/b {good}": "line 1 .*expected CLIENT NAME",
        "0 a ecdsa-sha2-nistp384 AAAA": "line 1 .*no ECDSA public key.*ssh-keygen",
        "0 a": "no ECDSA public key",
        f"0 a {good}\n1 b {good}": "line 2 .*repeats the client, the name or the key of a",
    }.items():
        path.write_text(text)
        with pytest.raises(UserError, match=why):
            read_site_list(path)
    path.write_text(f"# comment\n\n7 clinic {good} ann@clinic\n")
    assert {client: site.name for client, site in read_site_list(path).items()} == {7: "clinic"}
    with pytest.raises(UserError, match="no ECDSA private key"):
        read_private_key(path)


def test_a_node_without_its_key_file_is_rejected_and_its_path_stays(tmp_path: Path, keys: Path) -> None:
    grid, settings = signed_federation(tmp_path, keys, **{"training.rounds": 1})
    grid.contexts[101] = node(tmp_path, settings, 1, tmp_path / "secret" / "lost.key")
    serve(grid, settings)
    reason = RunFolder(tmp_path / "run").status()["rejected_nodes"]["node 101"]
    assert "cannot read the key [path] (no such file or directory)" in reason
