"""Secure aggregation: the server sees only sums, which agree with those of other runs, even if sites drop out."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'fedflat[flower]'")

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from flwr.app import ConfigRecord, Message

from fedflat.algorithms import algorithm
from fedflat.algorithms.named import NAMED
from fedflat.cli.application import app
from fedflat.deploy.server.app import serve
from fedflat.deploy.settings import Deployment, config_of, deployment_of
from fedflat.deploy.site.site import Site
from fedflat.deploy.trust.certificates import write_certificates
from fedflat.deploy.trust.secure_sum import (
    add_mask,
    combine,
    decode,
    encode,
    interpolation,
    mask_key,
    new_secret,
    public_bytes,
    split,
)
from fedflat.deploy.trust.secure_support import secure_aggregation_conflict
from fedflat.engines.round.aggregation import Aggregation
from fedflat.errors import UserError
from fedflat.experiment.run import Run
from fedflat.experiment.store.run_folder import Record

from .direct import SECURE, SITES, DirectGrid, federation_of, node

Tamper = Callable[[Message], Message | None]


def federated(folder: Path, tamper: Tamper | None = None, **more: Any) -> tuple[Record, DirectGrid]:
    settings = {**SECURE, **more, "deploy.out": str(folder / "run")}
    grid = federation_of(folder, settings, SITES)
    grid.tamper = tamper or grid.tamper
    return serve(grid, settings), grid


def ledger(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "run" / "participation.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("text", "more"),
    [
        ("fedavg", {}),
        ("scaffold+ema", {"federation.weighting": "uniform", "training.rounds": 2}),  # client state, a second vector
        ("fedcm", {"federation.weighting": "uniform"}),  # the mean of directions
        (  # quotients, a scalar, and unequal steps
            "fednova",
            {"training.local_steps": None, "training.local_epochs": 1, "training.batch_size": 100},
        ),
        ("mime", {}),  # two sums per round
        ("fedavg", {"model": "resnet20(norm=batch)", "training.local_steps": 1}),  # statistics and integer buffers
        ("fedadamw", {"federation.weighting": "uniform", "deploy.secure_bits": 64}),  # tiny second moments
    ],
)
def test_sums_agree_with_a_simulation(text: str, more: dict[str, Any], tmp_path: Path) -> None:
    settings = {key: value for key, value in ({**SECURE, "algorithm": text} | more).items() if value is not None}
    settings["deploy.out"] = str(tmp_path / "run")
    grid = federation_of(tmp_path, settings, SITES)
    record, expected = serve(grid, settings), Run(config_of(settings)).execute()
    for name, model in expected.models.items():
        assert np.allclose(record.models[name].weights, model.weights, rtol=0, atol=2e-6), name
        assert np.allclose(record.models[name].buffers, model.buffers, rtol=1e-5, atol=2e-6), name
    assert record.history[-1]["train_loss"] == pytest.approx(expected.history[-1]["train_loss"], rel=1e-5)
    assert record.history[-1]["backward_passes"] == expected.history[-1]["backward_passes"]
    kinds = {
        array.numpy().dtype.kind
        for reply in grid.came
        for record in reply.content.array_records.values()
        for name, array in record.items()
        if not name.startswith("integers/")
    }
    assert kinds == {"u"}, "only masked integers leave a site"
    assert all(line["accepted"] == [0, 1, 2, 3] for line in ledger(tmp_path))


def test_masked_updates_look_random_and_never_repeat(tmp_path: Path) -> None:
    """The same update has other masks in every run, and its bits are uniform."""
    sent = []
    for name in ("one", "two"):
        _, grid = federated(tmp_path / name)
        replies = [reply.content.array_records["arrays"] for reply in grid.came if "arrays" in reply.content]
        sent.append([reply["displacement"].numpy() for reply in replies])
        losses = [reply.content.metric_records["numbers"]["loss"] for reply in grid.came if "numbers" in reply.content]
        assert losses == [0.0] * SITES
    for one, two in zip(*sent, strict=True):
        for values in (one, two, one - two):
            assert abs(np.unpackbits(values.view(np.uint8)).mean() - 0.5) < 0.02


def test_a_site_that_drops_out_does_not_spoil_the_round(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In each of four rounds, the answers of client 2 are lost from another message on."""
    stages = ["query.keys", "query.shares", "train", "query.unmask"]

    def tamper(reply: Message) -> Message | None:
        stage, round = reply.metadata.message_type, reply.metadata.group_id
        is_lost = stage in stages and stages.index(stage) >= int(round) and reply.metadata.src_node_id == 102
        return None if is_lost else reply

    more = {"training.rounds": 4, "evaluation.every": 4}
    secure, _ = federated(tmp_path, tamper, **more)
    expected, _ = federated(tmp_path / "clear", tamper, **more, **{"deploy.secure_aggregation": False})
    assert np.allclose(secure.models["server"].weights, expected.models["server"].weights, rtol=0, atol=1e-6)
    for line, clear in zip(ledger(tmp_path), ledger(tmp_path / "clear"), strict=True):
        # The last message comes after the update, which therefore counts.
        assert line["accepted"] == clear["accepted"] == ([0, 1, 2, 3] if line["round"] == 3 else [0, 1, 3])
        assert line["missing"].keys() == clear["missing"].keys() and "deploy.quorum" not in caplog.text


def test_a_repeated_round_keeps_its_gradient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each attempt rounds differently, as GPUs may do, and the first one loses an update."""
    compute, rng, lost = Site.full_gradient, np.random.default_rng(0), []

    def rounded(*arguments: Any) -> tuple[Any, dict[str, float]]:
        gradient, numbers = compute(*arguments)
        return gradient * rng.uniform(1 - 1e-6, 1 + 1e-6), numbers

    def tamper(reply: Message) -> Message | None:
        lost.append(reply.metadata.message_type == "train" and not any(lost))
        return None if lost[-1] else reply

    monkeypatch.setattr(Site, "full_gradient", rounded)
    more = {"algorithm": "mime", "training.rounds": 2}
    secure, _ = federated(tmp_path, tamper, **more, **{"deploy.secure_threshold": 1.0})
    clear, _ = federated(tmp_path / "clear", **more, **{"deploy.secure_aggregation": False})
    assert any(lost) and np.allclose(secure.models["server"].weights, clear.models["server"].weights, rtol=0, atol=1e-5)


def test_a_sum_of_too_few_sites_is_never_revealed(tmp_path: Path) -> None:
    def tamper(reply: Message) -> Message | None:
        return None if reply.metadata.message_type == "train" and reply.metadata.src_node_id >= 102 else reply

    settings = {**SECURE, "deploy.out": str(tmp_path / "run")}
    grid = federation_of(tmp_path, settings, SITES)
    grid.tamper = tamper
    with pytest.raises(UserError, match="round 0 has too few updates: 2"):
        serve(grid, settings)
    assert "query.unmask" not in {message.metadata.message_type for message in grid.sent}


def changed(reply: Message, **values: Any) -> Message:
    """A message of secure aggregation with other values."""
    record = reply.content.config_records["secure"]
    reply.content["secure"] = ConfigRecord({**record, **values})
    return reply


def test_wrong_shares_are_noticed_and_the_round_is_repeated(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    forged = 0

    def tamper(reply: Message) -> Message:
        nonlocal forged
        if reply.metadata.message_type != "query.unmask" or forged:
            return reply
        forged += 1
        return changed(reply, shares=[bytes(17)] * SITES)

    with caplog.at_level(logging.WARNING, "flwr"):
        record, _ = federated(tmp_path, tamper)
    assert record.status == "finished" and "cannot be recovered" in caplog.text


def test_malformed_answers_are_rejected(tmp_path: Path) -> None:
    """Keys of one site and shares of another have the wrong length; the two other sites remain."""
    forgeries: dict[int, tuple[str, dict[str, Any]]] = {
        0: ("query.keys", {"mask": b"short"}),
        1: ("query.shares", {"boxes": [b"short"]}),
    }

    def tamper(reply: Message) -> Message:
        kind, values = forgeries.get(reply.metadata.src_node_id - 100, ("", {}))
        return changed(reply, **values) if reply.metadata.message_type == kind else reply

    federated(tmp_path, tamper)
    assert ledger(tmp_path)[0]["rejected"] == {
        "0": "its keys have an unexpected format",
        "1": "its shares have an unexpected format",
    }
    assert ledger(tmp_path)[0]["accepted"] == [2, 3]


def test_the_server_learns_only_how_many_sites_clip(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A site that refused to send values beyond the range, or NaN, would reveal something about its update."""
    _, grid = federated(tmp_path / "clear", **{"deploy.secure_aggregation": False})
    peaks = sorted(
        float(np.abs(reply.content.array_records["arrays"]["displacement"].numpy()).max())
        for reply in grid.came
        if "arrays" in reply.content
    )
    limit = (peaks[-2] + peaks[-1]) / 2
    federated(tmp_path, **{"deploy.secure_range": limit})
    assert f"1 of 4 sites clipped values that exceed deploy.secure_range={limit:g}" in caplog.text
    record, _ = federated(tmp_path / "nan", **{"training.lr": 1e38, "training.clip": 1e30})
    assert "4 of 4 sites clipped" in caplog.text and bool(record.models["server"].weights.isfinite().all())
    for folder in (tmp_path, tmp_path / "nan"):
        assert ledger(folder)[0]["accepted"] == [0, 1, 2, 3] and not ledger(folder)[0]["missing"]
    caplog.clear()
    federated(tmp_path / "private", **{"deploy.secure_range": 1e-9, "federation.privacy": "dp(noise=1e-9,clip=0.05)"})
    assert "sites clipped" not in caplog.text, "the number of sites that clip has no noise"


@pytest.mark.parametrize("bits", [16, 32, 64])
def test_rounding_is_within_its_bound(bits: int) -> None:
    deployment = deployment_of({"deploy.secure_bits": bits, "deploy.secure_range": 2.0})
    vectors, weights = np.random.default_rng(0).uniform(-2, 2, (3, 500)), [0.5, 0.3, 0.2]
    vectors[:, 0] = 2.0  # the largest sum does not overflow
    total = sum(encode(row, weight, deployment, False) for row, weight in zip(vectors, weights, strict=True))
    error = np.abs(decode(total, 1.0, deployment, (500,)) - weights @ vectors)
    assert error.max() <= 1.5 * 2.0 * 2.0 ** (2 - bits) + 1e-15
    shrunk = decode(encode(vectors[0], 1.0, deployment, True), 1.0, deployment, (500,))
    assert (np.abs(shrunk) <= np.abs(vectors[0])).all()
    beyond = decode(encode(np.array([np.nan, np.inf, -3.0]), 1.0, deployment, False), 1.0, deployment, (3,))
    assert beyond.tolist() == [0.0, 2.0, -2.0]


def test_masks_cancel_and_shares_need_the_threshold() -> None:
    array, seed = {"v": np.arange(5, dtype="<u4")}, new_secret()
    add_mask(array, seed, 1)
    assert (array["v"] != np.arange(5)).all()
    add_mask(array, seed, -1)
    assert (array["v"] == np.arange(5)).all()
    shares = split(seed, 3, 5)
    assert combine([shares[4], shares[0], shares[2]], interpolation([5, 1, 3])) == seed
    assert combine(shares[:2], interpolation([1, 2])) != seed


def test_a_site_refuses_what_would_reveal_its_update(tmp_path: Path) -> None:
    """A server cannot ask for shares twice, nor for those of a small sum, nor for an update without masks."""
    _, grid = federated(tmp_path)
    asked = {message.metadata.message_type: message for message in grid.sent if message.metadata.dst_node_id == 101}

    def answer(kind: str, **values: Any) -> str:
        """Why the site refuses a message, sent again with other values; empty if it does not."""
        message = changed(asked[kind], **values) if values else asked[kind]
        refusal = grid.app(message, grid.contexts[101]).content.config_records.get("refusal")
        return str(refusal["why"]) if refusal else ""

    assert "lost its keys" in answer("query.unmask")
    roster = asked["query.shares"].content.config_records["secure"]
    shares: dict[str, Any] = {name: list(values) for name, values in roster.items()}
    assert answer("query.keys") == "" and "list of keys" in answer("query.shares"), "not its new keys"
    own = grid.contexts[101].state.config_records["fedflat-secure"]

    shares["mask_keys"][1] = public_bytes(mask_key(own["secret"]))
    shares["box_keys"][1] = public_bytes(X25519PrivateKey.from_private_bytes(own["box_key"]))
    assert answer("query.shares", **shares) == ""
    assert "were changed on their way" in answer("train"), "shares for its former keys"
    assert "1 sites remain in the sum, but at least 3" in answer("train", clients=[], boxes=[])
    del asked["train"].content["secure"]
    assert "1 sites remain" in answer("train")


def asking_otherwise(grid: DirectGrid, kind: str, client: int, **values: Any) -> DirectGrid:
    """Let the server send one client something else than the others in one type of message."""
    push = grid.push_messages

    def tampered(messages: Iterable[Message]) -> Iterable[str]:
        return push(
            changed(message, **values)
            if (message.metadata.message_type, message.metadata.dst_node_id) == (kind, 100 + client)
            else message
            for message in messages
        )

    grid.push_messages = tampered  # type: ignore[method-assign]
    return grid


def test_a_server_cannot_unmask_a_single_update(tmp_path: Path) -> None:
    settings = {**SECURE, "deploy.out": str(tmp_path / "run")}
    grid = asking_otherwise(federation_of(tmp_path, settings, SITES), "query.unmask", 1, clients=[1])
    serve(grid, settings)
    refusals = [reply.content.config_records.get("refusal") for reply in grid.came]
    assert [record["why"] for record in refusals if record] == [
        "1 sites remain in the sum, but at least 3 are required"
    ]


def test_a_server_cannot_show_sites_different_weights(tmp_path: Path) -> None:
    settings = {**SECURE, "deploy.tries": 1, "deploy.out": str(tmp_path / "run")}
    grid = federation_of(tmp_path, settings, SITES)
    asking_otherwise(grid, "query.shares", 1, examples=[1, 361, 1, 1])
    with pytest.raises(UserError, match="round 0 has too few updates: 0"):
        serve(grid, settings)
    refusals = [reply.content.config_records.get("refusal") for reply in grid.came]
    assert sum("were changed on their way" in str(record["why"]) for record in refusals if record) == SITES


def test_a_site_with_a_list_of_sites_checks_keys(tmp_path: Path) -> None:
    """The server, or somebody in its place, cannot make up sites."""
    keys = tmp_path / "keys"
    write_certificates(keys, ["127.0.0.1"], SITES, days=1)
    settings = {**SECURE, "deploy.sites": str(keys / "sites.txt")}

    def federation(folder: Path, listed: Path) -> DirectGrid:
        contexts = [node(folder, settings, site, keys / f"site-{site}.key") for site in range(SITES)]
        contexts[1].node_config["sites"] = str(listed)
        return DirectGrid(contexts)

    serve(federation(tmp_path, keys / "sites.txt"), {**settings, "deploy.out": str(tmp_path / "run")})
    assert ledger(tmp_path)[0]["accepted"] == [0, 1, 2, 3]
    lines = (keys / "sites.txt").read_text().splitlines()
    swapped = tmp_path / "swapped.txt"
    sites = [line.split(maxsplit=2) for line in lines if line.strip() and not line.startswith("#")]
    sites[2][2], sites[3][2] = sites[3][2], sites[2][2]
    swapped.write_text("\n".join(map(" ".join, sites)))
    serve(federation(tmp_path / "b", swapped), {**settings, "deploy.out": str(tmp_path / "b" / "run")})
    assert "keys of client 2 are not signed" in ledger(tmp_path / "b")[0]["missing"]["1"]


def test_a_site_can_insist_on_secure_aggregation(tmp_path: Path) -> None:
    settings = {**SECURE, "deploy.secure_aggregation": False, "deploy.out": str(tmp_path / "run")}
    grid = federation_of(tmp_path, settings, SITES)
    grid.contexts[102].node_config["secure-aggregation"] = True
    serve(grid, settings)
    assert all(line["accepted"] == [0, 1, 3] for line in ledger(tmp_path))
    rejected = json.loads((tmp_path / "run" / "status.json").read_text())["rejected_nodes"]
    assert "takes part only in runs with secure aggregation" in rejected["client 2"]


@pytest.mark.parametrize("privacy", ["dp(noise=1e-9,clip=0.05)", "local-dp(noise=1e-9,clip=0.05)"])
def test_private_sums(privacy: str, tmp_path: Path) -> None:
    """Sites clip; the noise of ``dp`` is added to the sum."""
    more = {"federation.privacy": privacy, "federation.clients_per_round": SITES}
    secure, clear = (
        federated(tmp_path / str(is_secure), **more, **{"deploy.secure_aggregation": is_secure})[0]
        for is_secure in (True, False)
    )
    assert np.allclose(secure.models["server"].weights, clear.models["server"].weights, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"federation.aggregation": "median"}, "compares single updates; use mean"),
        ({"algorithm": "feddisco"}, "chooses the weights of clients"),
        ({"algorithm": "scaffold"}, "set federation.weighting=uniform"),
        ({"algorithm": "feddyn"}, "equal weights; set federation.weighting=uniform"),
        ({"algorithm": "mime", "federation.weighting": "uniform"}, "set federation.weighting=samples"),
        ({"algorithm": "fednova+exp"}, "of their quotients"),
        ({"deploy.minimum": 1}, "set deploy.minimum to at least 2"),
    ],
)
def test_unsupported_experiments_are_rejected(more: dict[str, Any], why: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=re.escape(why)):
        federated(tmp_path, **more)
    assert not (tmp_path / "run" / "participation.jsonl").exists()


def test_projects_with_secure_aggregation(tmp_path: Path) -> None:
    def fedflat(*words: str) -> tuple[int, str]:
        done = CliRunner().invoke(app, ["deploy", *words])
        return done.exit_code, " ".join(done.output.split())

    new = ["init", str(tmp_path / "secured"), "--secure-aggregation"]
    assert "chooses the weights" in fedflat(*new, "--algorithm", "fedawa")[1]
    assert "--clients of at least 2" in fedflat(*new, "--clients", "1")[1]
    assert fedflat(*new, "--algorithm", "scaffold")[0] == 0
    assert fedflat("check", str(tmp_path / "secured"))[0] == 1  # the list of sites is missing
    settings = tmp_path / "secured" / "pyproject.toml"
    settings.write_text(settings.read_text().replace('weighting = "uniform"', 'weighting = "samples"'))
    code, output = fedflat("check", str(tmp_path / "secured"))
    assert code == 2 and "set federation.weighting=uniform" in output


def test_the_docs_list_the_supported_algorithms() -> None:
    """The table in docs/security.md says which weights each algorithm needs."""
    page = (Path(__file__).parents[2] / "docs" / "security.md").read_text()
    section = page.split("### Weights of sites")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`.*`) \| `?(samples|uniform|no)`?[^|]* \|$", section, re.M)
    rows += [(names, "both") for names in re.findall(r"^\| (`.*`) \| `samples` or `uniform` \|$", section, re.M)]
    written = {name: answer for names, answer in rows for name in re.findall(r"`([a-z-]+)`", names)}
    for name in NAMED:
        fits = [
            weighting
            for weighting in ("samples", "uniform")
            if not secure_aggregation_conflict(algorithm(name), Aggregation(weighting), equal_steps=True)
        ]
        assert written[name] == {2: "both", 1: fits[0] if fits else "", 0: "no"}[len(fits)], name
    assert Deployment().secure_range == 64 and Deployment().secure_bits == 32, "the errors in the docs"
