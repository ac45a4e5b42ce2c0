"""Attacks on secure aggregation by a server that does not follow the protocol, and by dishonest sites."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'fedflat[flower]'")

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict

from fedflat.deploy.server.app import serve
from fedflat.deploy.trust.certificates import write_certificates
from fedflat.deploy.trust.secure_sum import is_usable, require_public_integers
from fedflat.deploy.trust.signatures import add_receipt, read_private_key
from fedflat.errors import UserError

from .direct import SMALL, DirectGrid, federation_of, node

SITES = 4
SETTINGS: dict[str, Any] = {
    **SMALL,
    "algorithm": "fedavg",
    "federation.clients_per_round": SITES,
    "training.rounds": 1,
    "evaluation.every": 1,
    "deploy.secure_aggregation": True,
    "deploy.minimum": 2,
    "deploy.timeout": 0.1,
}


class Refused(Exception):
    """A site refuses to answer."""


class MaliciousServer:
    """Sends sites what it likes: it begins a sum of a round as the protocol demands, and then deviates.

    Args:
        grid: the sites.
        train: an honest message to train, whose model it sends.
        clients: the sites of the sum.
    """

    def __init__(self, grid: DirectGrid, train: Message, clients: Iterable[int] = range(SITES)) -> None:
        self.grid, self.arrays = grid, train.content.array_records["arrays"]
        self.header = dict(train.content.config_records["header"]) | {"experiment": "attack"}
        self.clients, self.examples = list(clients), [361, 361, 360, 360]
        self.boxes: dict[int, dict[int, bytes]] = {}
        self.tags: dict[int, dict[int, bytes]] = {}

    def ask(self, client: int, kind: str, arrays: ArrayRecord | None = None, **values: Any) -> dict[str, Any]:
        header = self.header | {"client": client, "examples": self.examples[client]}
        header |= values.pop("header", {})
        records = RecordDict({"header": ConfigRecord(header), "secure": ConfigRecord(values)})
        if arrays is not None:
            records["arrays"] = arrays
        message = Message(records, 100 + client, kind, ttl=60, group_id="0")
        message.metadata.__dict__["_message_id"] = "m"
        answer = self.grid.app(message, self.grid.contexts[100 + client]).content
        if "refusal" in answer:
            raise Refused(str(answer.config_records["refusal"]["why"]))
        return dict(answer.config_records.get("secure") or answer.config_records.get("header") or {"arrays": answer})

    def begin(self, **roster: Any) -> None:
        """Collect keys and shares; ``roster`` replaces values in the list of sites."""
        keys = {client: self.ask(client, "query.keys") for client in self.clients}
        lists = {"mask_keys": "mask", "box_keys": "box", "signatures": "signature"}
        content: dict[str, Any] = {
            name: [keys[client][value] for client in self.clients] for name, value in lists.items()
        }
        content |= {"members": self.clients, "examples": [self.examples[client] for client in self.clients]} | roster
        for client in self.clients:
            answer = self.ask(client, "query.shares", **content)
            self.boxes[client] = dict(zip(answer["clients"], answer["boxes"], strict=True))

    def secrets(self, client: int) -> dict[str, Any]:
        """What a site keeps between messages; the real server cannot see it."""
        return dict(self.grid.contexts[100 + client].state.config_records["fedflat-secure"])

    def train(self, client: int, senders: Iterable[int] | None = None, **values: Any) -> None:
        """Let a site mask its update with the masks that it has in common with ``senders``, by default all others."""
        senders = [sender for sender in senders or self.clients if sender != client]
        boxes = [self.boxes[sender][client] for sender in senders]
        answer = self.ask(client, "train", self.arrays, clients=senders, boxes=boxes, **values)
        self.tags[client] = dict(zip(answer["clients"], answer["tags"], strict=True))

    def survivors(self, client: int, survivors: list[int]) -> dict[str, Any]:
        """What the server tells a site about the updates that have arrived, with the proofs that it has."""
        others = [other for other in survivors if other != client]
        return {"clients": survivors, "tags": [self.tags[other].get(client, bytes(32)) for other in others]}

    def confirm(self, client: int, survivors: list[int]) -> dict[int, bytes]:
        answer = self.ask(client, "query.confirm", **self.survivors(client, survivors))
        return dict(zip(answer["clients"], answer["tags"], strict=True))

    def unmask(self, client: int, survivors: list[int], confirmations: dict[int, bytes] | None = None) -> list[int]:
        given = confirmations or {}
        proofs = {"confirmed": list(given), "confirmations": list(given.values())}
        answer = self.ask(client, "query.unmask", **self.survivors(client, survivors), **proofs)
        return list(answer["clients"])


@pytest.fixture(scope="module")
def honest_task(tmp_path_factory: pytest.TempPathFactory) -> Message:
    """The message to train of an honest run."""
    folder = tmp_path_factory.mktemp("honest")
    grid = federation_of(folder, SETTINGS, SITES)
    serve(grid, {**SETTINGS, "deploy.out": str(folder / "run")})
    return next(message for message in grid.sent if message.metadata.message_type == "train")


@pytest.fixture
def server(honest_task: Message, tmp_path: Path) -> MaliciousServer:
    return MaliciousServer(federation_of(tmp_path, SETTINGS, SITES), honest_task)


def test_no_site_is_isolated_among_sites_that_drop_out(server: MaliciousServer) -> None:
    """Of three sites, client 0 has masks in common only with client 2, whose key the others would then reveal."""
    server.clients = [0, 1, 2]
    server.begin()
    server.train(0, [2])
    server.train(1)
    server.train(2)
    for client in (1, 2):
        with pytest.raises(Refused, match=r"client 0 shares masks with a different set of sites|lacks this one"):
            server.unmask(client, [0, 1])
    server.begin()
    server.train(0, [2])
    server.train(1)
    with pytest.raises(Refused, match="client 0 shares masks with a different set of sites"):
        server.confirm(1, [0, 1])
    server.tags[0][1] = server.tags[1][0]
    with pytest.raises(Refused, match="client 0 shares masks with a different set of sites"):
        server.confirm(1, [0, 1])  # a site cannot confirm on behalf of another


def test_sites_reveal_keys_only_if_enough_confirm_who_remains(server: MaliciousServer) -> None:
    server.begin()
    for client in server.clients:
        server.train(client)
    confirmed = {client: server.confirm(client, [0, 1, 2]) for client in (0, 1, 2)}
    with pytest.raises(Refused, match="lost its keys"):
        server.confirm(0, [0, 1, 3])  # it has confirmed other survivors
    with pytest.raises(Refused, match="lacks this one"):
        server.confirm(3, [0, 1, 2])  # nor does a site help to unmask itself
    with pytest.raises(Refused, match="2 sites remain in the sum, but at least 3"):
        server.unmask(0, [0, 1, 2], {1: confirmed[1][0], 2: confirmed[0][2]})
    with pytest.raises(Refused, match="a different set of sites than this node confirmed"):
        server.unmask(1, [0, 1, 2, 3])
    assert server.unmask(2, [0, 1, 2], {client: confirmed[client][2] for client in (0, 1)}) == [2, 0, 1, 3]
    with pytest.raises(Refused, match="a different set of sites than this node confirmed"):
        server.unmask(3, [0, 1, 3])  # without confirmation


def test_a_round_is_summed_with_the_same_sites_only(server: MaliciousServer) -> None:
    """The difference of two sums would be the update of one site; also after a restart, which loses the context."""

    def unmask_all(clients: list[int], round: int = 0) -> None:
        server.clients, server.header["round"] = clients, round
        server.begin()
        for client in clients:
            server.train(client)
        for client in clients:
            server.unmask(client, clients)

    unmask_all([0, 1, 2])
    unmask_all([0, 1, 2])
    with pytest.raises(Refused, match="round 0 has been summed with clients 0, 1, 2, and another sum"):
        unmask_all([0, 1])
    unmask_all([0, 1], round=1)
    with pytest.raises(Refused, match="round 1 of this run has already been summed"):
        unmask_all([0, 1, 2])
    records = sorted(path.name for path in Path(server.grid.contexts[100].node_config["state"]).rglob("*.sum*"))
    assert records == ["update-1.sum"]


def test_a_site_checks_what_the_server_says(server: MaliciousServer) -> None:
    with pytest.raises(Refused, match="this node is client 0, but the message is for client 1"):
        server.ask(0, "query.keys", header={"client": 1})
    with pytest.raises(Refused, match="a site without examples"):
        server.begin(examples=[361, 361, 360, -1000])
    server.begin(secret=bytes(16), seed=bytes(16), survivors=[0])
    assert all(server.secrets(client)["secret"] != bytes(16) for client in server.clients)
    assert all(server.secrets(client).keys().isdisjoint({"survivors", "signatures"}) for client in server.clients)
    with pytest.raises(Refused, match="lost its keys"):
        server.train(0, header={"state_version": 1})  # another update with the same masks
    server.grid.contexts[101].node_config |= {"secure-minimum": 3, "secure-aggregation": False}
    server.clients = [0, 1]
    with pytest.raises(Refused, match="needs only 2 of 2 sites, but this node requires at least 3"):
        server.begin()
    with pytest.raises(Refused, match="needs no gradient before training"):
        server.ask(0, "train.gradient", server.arrays)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"secure_aggregation": True}, "did you mean 'secure-aggregation'"),
        ({"secure-aggregation": "false"}, "expected true or false, without quotes"),
        ({"secure-aggregation": True}, "needs key and sites as well"),
        ({"secure-minimum": 3}, "needs key and sites as well"),
        ({"secure-minimum": 1}, "expected at least 2"),
        ({"privacy": "local-dp(noise=1)"}, "takes part only in runs with federation.privacy=local-dp(noise=1)"),
        ({"scores": False}, "reports no scores"),
    ],
)
def test_the_site_decides(config: dict[str, Any], why: str, server: MaliciousServer) -> None:
    server.grid.contexts[100].node_config |= config
    with pytest.raises(Refused) as refusal:
        server.ask(0, "evaluate", server.arrays)
    assert why in str(refusal.value)


def test_a_private_site_scores_one_model(honest_task: Message, tmp_path: Path) -> None:
    """Scores have no noise."""
    settings = {**SETTINGS, "federation.privacy": "local-dp(noise=1)"}
    server = MaliciousServer(federation_of(tmp_path, settings, 1), honest_task)
    for _ in range(2):
        assert "arrays" in server.ask(0, "evaluate", server.arrays)
    server.header["base"] = "0" * 64
    with pytest.raises(Refused, match="changed on the way"):
        server.ask(0, "evaluate", server.arrays)
    server.header["experiment"], server.header["base"] = "other", honest_task.content["header"]["base"]
    assert "arrays" in server.ask(0, "evaluate", server.arrays)
    (tmp_path / "node-0" / "other" / "client-0" / "scored.txt").write_text("another model")
    with pytest.raises(Refused, match="it scores only one"):
        server.ask(0, "evaluate", server.arrays)


def test_dishonest_keys_exclude_only_their_site(tmp_path: Path) -> None:
    """All other sites would refuse a list with the keys that client 3 sends in two rounds."""
    write_certificates(tmp_path, ["127.0.0.1"], SITES, days=1)
    more = {"training.rounds": 2, "deploy.sites": str(tmp_path / "sites.txt"), "deploy.out": str(tmp_path / "run")}
    settings = {**SETTINGS, **more}
    contexts = [node(tmp_path, settings, site, tmp_path / f"site-{site}.key") for site in range(SITES)]
    for context in contexts:
        context.node_config |= {"sites": str(tmp_path / "sites.txt"), "secure-aggregation": True}
    grid = DirectGrid(contexts)
    honest_app, key = grid.app, read_private_key(tmp_path / "site-3.key")

    def dishonest_app(message: Message, context: Context) -> Message:
        reply = honest_app(message, context)
        if message.metadata.message_type == "query.keys" and context is contexts[3]:
            keys = dict(reply.content.config_records["secure"])
            forged = {"signature": b"forged"} if message.metadata.group_id == "0" else {"mask": keys["box"]}
            del reply.content["receipt"]
            reply.content["secure"] = ConfigRecord(keys | forged)
            add_receipt(reply.content, message.content, key)
        return reply

    grid.app = dishonest_app  # type: ignore[assignment]
    serve(grid, settings)
    lines = [json.loads(line) for line in (tmp_path / "run" / "participation.jsonl").read_text().splitlines()]
    assert [line["accepted"] for line in lines] == [[0, 1, 2]] * 2
    reasons = [line["rejected"]["3"] for line in lines]
    assert reasons == [
        "its keys are not signed with the key of site-3",
        "its keys are invalid or repeat another site's",
    ]
    assert is_usable(bytes([9, *bytes(31)])) and not is_usable(bytes(32))


def test_failures_say_what_is_missing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def tamper(reply: Message) -> Message | None:
        return None if reply.metadata.message_type == "query.unmask" and reply.metadata.src_node_id > 101 else reply

    settings = {**SETTINGS, "deploy.tries": 1, "deploy.secure_bits": 16, "deploy.out": str(tmp_path / "run")}
    grid = federation_of(tmp_path, settings, SITES)
    grid.tamper = tamper
    with pytest.raises(UserError, match=r"too few updates: 0, but at least 3 are required \(deploy.secure_threshold\)"):
        serve(grid, settings)
    with pytest.raises(UserError, match=r"began with deploy\.secure_aggregation=true; restore this setting"):
        serve(grid, {**settings, "deploy.secure_aggregation": False})
    grid.tamper = lambda reply: reply
    with caplog.at_level(logging.WARNING, "flwr"):
        serve(grid, settings)
    assert "rounding to 16 bits changes displacement by about" in caplog.text


def test_integers_that_depend_on_data_have_no_masks() -> None:
    require_public_integers(["integers/bn.num_batches_tracked"])
    with pytest.raises(UserError, match=r"integers/codebook\.counts"):
        require_public_integers(["integers/codebook.counts"])
