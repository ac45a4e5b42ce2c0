"""A federation with TLS and node keys behind a gateway and proxies: strangers, bytes on the wire, lost connections."""

from __future__ import annotations

import json
import re
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'fedflat[flower]'")

from fedflat.algorithms import algorithm
from fedflat.deploy import client_app
from fedflat.deploy.flower.project import write_project
from fedflat.deploy.server.app import serve
from fedflat.deploy.trust.certificates import write_certificates
from fedflat.experiment.store.checkpoint import CHECKPOINT, PREVIOUS
from fedflat.experiment.store.run_folder import RunFolder, load_record

from .direct import DirectGrid, node
from .processes import RealFederation, free_port, real_federation

pytestmark = pytest.mark.slow

SITES = 2
HOOKS = '''
import torch
from fedflat.data import Dataset, Examples

def site_data(number):
    """Images of CIFAR's shape, so that the model has the size of the papers' models."""
    draws = torch.Generator().manual_seed(number)
    def some(count):
        pictures = torch.randint(0, 256, (count, 3, 32, 32), generator=draws, dtype=torch.uint8)
        return Examples(pictures, torch.randint(0, 10, (count,), generator=draws))
    return Dataset("pictures", some(8), some(4), tuple("abcdefghij"), mean=(0.5,) * 3, std=(0.25,) * 3)

def held_out():
    return site_data(99)

model = None
'''
SETTINGS: dict[str, Any] = {
    "model": "cnn",
    "seed": 0,
    "data.clients": SITES,
    "data.partition": "iid",
    "federation.clients_per_round": SITES,
    "training.local_epochs": 1,
    "training.batch_size": 4,
    "training.lr": 0.01,
    "deploy.minimum": SITES,
    "deploy.wait": 60.0,
    "deploy.timeout": 40.0,
    "deploy.score": False,
}
LIKE_THE_CARD = 0.05
"""Relative difference allowed between bytes on the wire and those of the card."""


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealFederation]:
    """Two sites, three strangers that claim to be the second, and one with the same claim that registered its key."""
    folder = tmp_path_factory.mktemp("wire")
    write_project(folder / "sites", "fedavg", SITES)
    (folder / "sites" / "sites" / "hooks.py").write_text(HOOKS)
    other = folder / "other"
    write_certificates(other, ["127.0.0.1"], sites=1, days=1)
    registered = folder / "registered"
    write_certificates(registered, ["127.0.0.1"], sites=1, days=1)
    own_key = registered / "site-0.key"
    with real_federation(folder / "processes", SITES, tls=True, stranger=registered / "site-0.key.pub") as found:
        right, key = ["--root-certificates", str(found.certificates / "ca.crt")], "--auth-supernode-private-key"
        strangers = {
            "another-authority": [
                "--root-certificates",
                str(other / "ca.crt"),
                key,
                str(found.certificates / "site-1.key"),
            ],
            "another-key": [*right, key, str(other / "site-0.key")],
            "no-key": right,
        }
        for name, trust in strangers.items():
            found.start_node(1, name, trust, free_port())
        found.start_node(1, "registered", [*right, key, str(own_key)], found.node_ports[SITES], own_key)
        yield found


def test_bytes_on_the_wire_agree_with_the_card_despite_a_lost_connection(
    federation: RealFederation, tmp_path: Path
) -> None:
    """All bytes of the second round, with TLS, headers and polls; in the first, Flower compresses vectors of zeros."""
    text = "fedmoswa"  # sends more than the model in both directions
    out = federation.folder / text
    settings = {**SETTINGS, "algorithm": text, "training.rounds": 2, "deploy.out": str(out)}
    federation.start_run(federation.folder.parent / "sites", settings)
    cut_off_and_mend(federation, number=0)
    federation.until(lambda: load_record(out).status == "finished", 120)
    start, end = (written_after(out, file, rounds) for rounds, file in ((1, PREVIOUS), (2, CHECKPOINT)))

    record, chosen = load_record(out), algorithm(text)
    weights = RunFolder(out).read_tensors("model.safetensors")[0]
    size = sum(tensor.numel() for tensor in weights.values())
    assert size == 797_962
    for proxy in federation.proxies:
        for passed, card in zip(
            proxy.bytes_between(start, end), (chosen.floats_down(size), chosen.floats_up(size)), strict=True
        ):
            assert abs(passed / (4 * card) - 1) <= LIKE_THE_CARD, (passed, 4 * card)

    lines = [json.loads(line) for line in (out / "participation.jsonl").read_text().splitlines()]
    assert [(line["round"], line["accepted"]) for line in lines] == [(0, [0, 1]), (1, [0, 1])]
    reasons = list(RunFolder(out).status()["rejected_nodes"].values())
    assert len(reasons) == 1
    assert re.search(r"claims to be client 1 \(site-1\), .*not signed with the key of site-1", reasons[0])
    assert "query.hello" in federation.log("registered") and "train" not in federation.log("registered")
    expected = undisturbed(settings, tmp_path)
    assert record.history == expected.history
    for name, tensor in expected.folder.read_tensors("model.safetensors")[0].items():
        assert torch.equal(weights[name], tensor), name


def written_after(out: Path, file: str, rounds: int) -> float:
    """When a checkpoint was written, which is that after a number of rounds."""
    assert RunFolder(out).read_tensors(file)[1]["rounds"] == rounds
    return (out / file).stat().st_mtime


def cut_off_and_mend(federation: RealFederation, number: int) -> None:
    """Disconnect a node while it trains in the first round, until it notices and the next round greets the stranger."""
    name = f"node-{number}"
    federation.until(lambda: federation.log(name).count("Received successfully") >= 2, 120)  # the first is a greeting
    federation.proxies[number].cut()
    federation.until(lambda: "Connection attempt failed" in federation.log(name), 60)
    federation.until(lambda: "SuperNode ID" in federation.log("registered"), 60)
    federation.proxies[number].mend()


def undisturbed(settings: dict[str, Any], folder: Path) -> Any:
    """The same federation in this process."""
    hooks: dict[str, Any] = {}
    exec(HOOKS, hooks)
    settings = {**settings, "deploy.out": str(folder / "run")}
    grid = DirectGrid([node(folder, settings, number) for number in range(SITES)], client_app(hooks["site_data"]))
    return serve(grid, settings, hooks["held_out"]())


def test_sites_do_not_reach_the_control_api(federation: RealFederation) -> None:
    """The gateway forwards the requests of SuperNodes only; the SuperLink itself answers the others."""
    context = ssl.create_default_context(cafile=federation.certificates / "ca.crt")
    for path in (
        "/v1/control/list-runs",
        "/v1/runtime/pull-messages",
        "/docs",
        "/openapi.json",
        "/v1/fleet/..%2fcontrol",
    ):
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"https://127.0.0.1:{federation.gateway_port}{path}", context=context)
    for port in (federation.gateway_port, federation.port):
        assert urllib.request.urlopen(f"https://127.0.0.1:{port}/health", context=context).status == 200
    interface = urllib.request.urlopen(f"https://127.0.0.1:{federation.port}/openapi.json", context=context)
    groups = {re.sub(r"^(/v1/\w+/).*", r"\1*", path) for path in json.load(interface)["paths"]}
    page = (Path(__file__).parents[2] / "docs" / "security.md").read_text()
    assert groups == {"/health", "/v1/control/*", "/v1/fleet/*", "/v1/runtime/*"}
    assert all(f"| SuperLink, 127.0.0.1:8000 | `{group}`" in page for group in groups - {"/health"})


def test_unauthorised_nodes_receive_no_messages(federation: RealFederation) -> None:
    """They exit with a reason, and nothing was sent to them."""
    reasons = {
        "another-authority": "CERTIFICATE_VERIFY_FAILED",
        "another-key": "Failed to activate SuperNode",
        "no-key": "SuperNode authentication is enabled",
    }
    for name, why in reasons.items():
        assert federation.processes[name].wait(60) != 0
        log = federation.log(name)
        assert why in log, log
        assert "SuperNode ID" not in log
        assert "Receiving" not in log
        assert not (federation.folder / name).exists()
