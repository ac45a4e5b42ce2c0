"""Attacks on secure aggregation by a server that does not follow the protocol, and by dishonest sites."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'fedflat[flower]'")

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict

from fedflat.deploy.server.app import serve
from fedflat.deploy.trust.certificates import write_certificates
from fedflat.deploy.trust.secure_sum import is_usable, require_public_integers
from fedflat.deploy.trust.signatures import add_receipt, arrays_digest, read_private_key
from fedflat.errors import UserError

from .direct import SECURE, SITES, DirectGrid, federation_of, node


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

    def train(
        self, client: int, senders: Iterable[int] | None = None, kind: str = "train", arrays: Any = None, **values: Any
    ) -> None:
        """Let a site mask its update with the masks that it has in common with ``senders``, by default all others."""
        senders = [sender for sender in senders or self.clients if sender != client]
        boxes = [self.boxes[sender][client] for sender in senders]
        answer = self.ask(client, kind, arrays or self.arrays, clients=senders, boxes=boxes, **values)
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

    def sum(self, clients: Iterable[int] = range(SITES), round: int = 0, **header: Any) -> None:
        """Learn the sum of the updates of some sites; the first one gets other values of the header."""
        self.clients, self.header["round"], self.header["state_version"] = list(clients), round, round
        self.begin()
        for client in self.clients:
            self.train(client, header=header if client == self.clients[0] else {})
        for client in self.clients:
            self.unmask(client, self.clients)

    def change(self, *clients: int, **settings: Any) -> None:
        """Change the run config of some sites, by default of all; dots in names of settings are written as __."""
        for client in clients or range(SITES):
            values = {name.replace("__", "."): value for name, value in settings.items()}
            self.grid.contexts[100 + client].run_config.update(values)


@pytest.fixture(scope="module")
def honest_task(tmp_path_factory: pytest.TempPathFactory) -> Message:
    """The message to train of an honest run."""
    folder = tmp_path_factory.mktemp("honest")
    grid = federation_of(folder, SECURE, SITES)
    serve(grid, {**SECURE, "deploy.out": str(folder / "run")})
    return next(message for message in grid.sent if message.metadata.message_type == "train")


@pytest.fixture
def server(honest_task: Message, tmp_path: Path) -> MaliciousServer:
    return MaliciousServer(federation_of(tmp_path, SECURE, SITES), honest_task)


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
    server.sum([0, 1, 2])
    server.sum([0, 1, 2])
    with pytest.raises(Refused, match=r"round 0 has been summed with clients 0, 1, 2 .*, and another sum"):
        server.sum([0, 1])
    server.change(deploy__secure_range=0.001)
    with pytest.raises(Refused, match=r"summed with clients 0, 1, 2 \(range 64.*clients 0, 1, 2 \(range 0.001"):
        server.sum([0, 1, 2])
    server.sum([0, 1], round=1)
    with pytest.raises(Refused, match="round 1 of this run has already begun"):
        server.sum([0, 1, 2])
    folder = Path(server.grid.contexts[100].node_config["state"]) / "attack" / "client-0"
    assert sorted(path.name for path in folder.glob("[01].*")) == ["1.sum", "1.update"]
    assert len(list(folder.glob("*.token"))) == 1


def test_both_sums_of_a_round_have_the_same_settings(server: MaliciousServer) -> None:
    """Sums of the same gradients with different weights would reveal the gradients."""
    server.change(algorithm="mime")
    server.begin()
    for client in server.clients:
        server.train(client, kind="train.gradient")
    for client in server.clients:
        server.unmask(client, server.clients)
    server.change(algorithm="fedavg", federation__weighting="uniform")
    with pytest.raises(Refused, match=r"round 0 has been summed with clients 0, 1, 2, 3 .*, and another sum"):
        server.sum()


@pytest.mark.parametrize(
    "setting", [{"training.lr": 1e-9}, {"data.augmentation": "cutout"}, {"deploy.secure_range": 1.0}]
)
def test_sites_with_different_settings_have_no_masks_in_common(
    setting: dict[str, Any], server: MaliciousServer
) -> None:
    """If the updates of all sites but one were almost 0, their sum would be the update of this one."""
    server.grid.contexts[103].run_config.update(setting)
    server.begin()
    with pytest.raises(Refused, match="were changed on their way"):
        server.train(0)


def test_a_site_sends_one_update_per_round(server: MaliciousServer) -> None:
    """Two sums of a round differ by the updates that differ, for example in the state that a client trains from."""
    server.change(algorithm="scaffold", federation__weighting="uniform")
    control = server.arrays["model"].numpy() * 0
    server.arrays = ArrayRecord({"model": server.arrays["model"], "drift.c": Array(control)})
    server.header["base"] = arrays_digest(server.arrays)
    server.sum()
    with pytest.raises(Refused, match="round 0 has already been summed, so this node refuses to train"):
        server.sum(round=1, state_version=0)
    server.sum(round=1)
    server.sum(round=1)
    (state,) = Path(server.grid.contexts[100].node_config["state"]).rglob("1.safetensors")
    with pytest.raises(Refused, match="round 1 has already begun with a different model, client state"):
        server.sum(round=1, state_version=0)
    server.change(training__lr=0.01)
    with pytest.raises(
        Refused, match="round 1 has already begun with a different model, client state, dataset or settings"
    ):
        server.sum(round=1)
    server.change(training__lr=SECURE["training.lr"])
    state.write_bytes(state.with_name("2.safetensors").read_bytes())
    with pytest.raises(Refused, match="round 1 has already begun with a different model, client state"):
        server.sum(round=1)
    with pytest.raises(Refused, match="round 1 of this run has already begun"):
        server.sum(round=0)  # it would replace the state that round 1 starts from


@pytest.mark.parametrize("kind", ["query.shares", "train", "query.confirm", "query.unmask"])
def test_a_site_answers_a_message_once(kind: str, server: MaliciousServer) -> None:
    """Flower may handle two messages at the same time, which then use the same secrets."""
    app, context = server.grid.app, server.grid.contexts[100]

    def answered_twice(message: Message, current: Context) -> Message:
        if current is context and message.metadata.message_type == kind:
            app(message, copy.deepcopy(context))
        return app(message, current)

    server.grid.app = answered_twice  # type: ignore[assignment]
    with pytest.raises(Refused, match="has already answered this message"):
        server.begin()
        for client in server.clients:
            server.train(client)
        if kind == "query.confirm":
            server.confirm(0, [0, 1, 2])
        server.unmask(0, server.clients)


def test_both_messages_of_a_round_belong_to_one_model(honest_task: Message, tmp_path: Path) -> None:
    """With MIME, sites receive the model with the first message, and the mean gradient with the second."""
    server = MaliciousServer(federation_of(tmp_path, {**SECURE, "algorithm": "mime"}, SITES), honest_task)
    first_base, model = server.header["base"], server.arrays["model"]
    server.begin()
    for client in server.clients:
        server.train(client, kind="train.gradient")
    server.unmask(0, server.clients)
    other = ArrayRecord({"model": Array(model.numpy() + 1)})
    other_base = {"base": arrays_digest(other)}
    with pytest.raises(Refused, match="lost its keys"):
        server.train(0, kind="train.gradient", arrays=other, header=other_base)
    server.arrays = ArrayRecord({"gradient": model})
    server.header["base"] = arrays_digest(server.arrays)
    server.begin()
    with pytest.raises(Refused, match="lost what it received"):
        server.train(0)
    server.header["first_base"] = first_base
    with pytest.raises(Refused, match="lost its keys"):
        server.train(0)  # the keys are for a sum without a first message
    server.clients = [0, 1, 2]
    server.begin()
    for client in server.clients:
        server.train(client)
    with pytest.raises(Refused, match=r"has been summed with clients 0, 1, 2, 3 .*, and another sum"):
        server.unmask(0, server.clients)


def test_the_site_knows_which_algorithms_have_secure_sums(server: MaliciousServer) -> None:
    server.change(algorithm="feddisco")
    server.begin()
    with pytest.raises(Refused, match="the server chooses the weights of clients"):
        server.train(0)


def test_a_site_checks_what_the_server_says(server: MaliciousServer) -> None:
    with pytest.raises(Refused, match="this node is client 0, but the message is for client 1"):
        server.ask(0, "query.keys", header={"client": 1})
    with pytest.raises(Refused, match="a site without examples"):
        server.begin(examples=[361, 361, 360, -1000])
    server.begin(secret=bytes(16), seed=bytes(16), survivors=[0])
    assert all(server.secrets(client)["secret"] != bytes(16) for client in server.clients)
    assert all(server.secrets(client).keys().isdisjoint({"survivors", "signatures"}) for client in server.clients)
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
def test_a_sites_node_config_overrides_the_server(config: dict[str, Any], why: str, server: MaliciousServer) -> None:
    server.grid.contexts[100].node_config |= config
    with pytest.raises(Refused) as refusal:
        server.ask(0, "evaluate", server.arrays)
    assert why in str(refusal.value)


def test_a_private_site_scores_one_model(honest_task: Message, tmp_path: Path) -> None:
    """Scores have no noise."""
    settings = {**SECURE, "federation.privacy": "local-dp(noise=1)"}
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
    settings = {**SECURE, **more}
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

    settings = {**SECURE, "deploy.tries": 1, "deploy.secure_bits": 16, "deploy.out": str(tmp_path / "run")}
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
