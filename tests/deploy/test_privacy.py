"""Differential privacy of real sites: the same clipping and accounting as in a simulation, with unpredictable noise."""

from __future__ import annotations

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'fedflat[flower]'")

from flwr.app import Array, ArrayRecord, Message

import fedflat
from fedflat.algorithms import algorithm
from fedflat.algorithms.named import NAMED
from fedflat.deploy.server.app import serve
from fedflat.deploy.site.client_memory import ClientMemory
from fedflat.deploy.site.site import Site
from fedflat.errors import UserError
from fedflat.experiment.store.run_folder import Record
from fedflat.privacy.accountant import Accountant

from .direct import SMALL, DirectGrid, federation_of

SITES, CLIP = 3, 0.05
SETTINGS: dict[str, Any] = {
    **SMALL,
    "algorithm": "fedsam",
    "model": "mlp(hidden=32)",
    "data.clients": SITES,
    "federation.clients_per_round": SITES,
    "training.rounds": 1,
}


def federated(folder: Path, privacy: str, **more: Any) -> tuple[Record, list[np.ndarray], DirectGrid]:
    """A private federation, and the displacements that its sites sent."""
    settings = {**SETTINGS, "federation.privacy": privacy, **more, "deploy.out": str(folder / "run")}
    grid = federation_of(folder, settings, SITES)
    record = serve(grid, settings)
    return record, [displacement(reply) for reply in grid.came if "arrays" in reply.content], grid


def displacement(reply: Message) -> np.ndarray:
    return reply.content.array_records["arrays"]["displacement"].numpy()


def test_sites_clip_and_the_server_adds_unpredictable_noise_to_the_mean(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    silent, sent, grid = federated(tmp_path / "silent", f"dp(noise=1e-9,clip={CLIP})")
    assert all(np.linalg.norm(vector) == pytest.approx(CLIP, rel=1e-5) for vector in sent)
    losses = [reply.content.metric_records["numbers"]["loss"] for reply in grid.came if "numbers" in reply.content]
    assert losses == [0.0] * SITES, "a loss reveals the data"
    names = {"privacy": f"dp(noise=1e-9,clip={CLIP})", "model": "mlp(hidden=32)", "clients": SITES}
    more = {"clients_per_round": SITES, "rounds": 1, "local_steps": 3, "lr": 0.05, "clip": 10.0, "workers": 1}
    simulated = fedflat.run("fedsam", **names, **more).record
    weights = simulated.models["server"].weights
    assert np.allclose(silent.models["server"].weights, weights, atol=1e-6), "the same as in a simulation"
    assert "expect low accuracy" not in caplog.text
    runs = [federated(tmp_path / name, f"dp(noise=0.5,clip={CLIP})")[0] for name in ("one", "two")]
    assert caplog.text.count("expect low accuracy") == 2
    one, two = ((run.models["server"].weights - weights).double().numpy() for run in runs)
    assert one.std() == pytest.approx(0.5 * CLIP / SITES, rel=0.1), "7 deviations for 2410 weights"
    assert abs(np.corrcoef(one, two)[0, 1]) < 0.1, "the noise does not depend on the seed"
    assert runs[0].history[-1]["epsilon"] > 0


def test_a_site_clips_and_adds_noise_of_its_own(tmp_path: Path) -> None:
    _, clipped, _ = federated(tmp_path / "silent", f"local-dp(noise=1e-9,clip={CLIP})")
    record, noisy, _ = federated(tmp_path / "noisy", f"local-dp(noise=3,clip={CLIP})")
    added = [sent - own for sent, own in zip(noisy, clipped, strict=True)]
    assert np.concatenate(added).std() == pytest.approx(3 * CLIP, rel=0.05)
    assert abs(np.corrcoef(added[0], added[1])[0, 1]) < 0.1
    start = fedflat.run("fedsam", rounds=1, privacy="dp(noise=1e-9,clip=1e-9)", model="mlp(hidden=32)", workers=1)
    moved = record.models["server"].weights - start.record.models["server"].weights
    assert np.allclose(moved, np.mean(noisy, axis=0), atol=1e-6), "the server adds nothing"


def test_the_server_clips_a_site_that_does_not(tmp_path: Path) -> None:
    """It is neither refused nor allowed to move the model further than others."""
    settings = {**SETTINGS, "federation.privacy": f"dp(noise=1e-9,clip={CLIP})", "deploy.out": str(tmp_path / "run")}
    grid = federation_of(tmp_path, settings, SITES)

    def lengthened(message: Message) -> Message:
        if "arrays" in message.content and message.metadata.src_node_id == 100:
            message.content["arrays"] = ArrayRecord({"displacement": Array(1000 * displacement(message))})
        return message

    grid.tamper = lengthened
    long = serve(grid, settings).models["server"].weights
    short = federated(tmp_path / "honest", f"dp(noise=1e-9,clip={CLIP})")[0].models["server"].weights
    assert np.allclose(long, short, atol=1e-6)


def test_a_site_with_other_noise_cannot_join(tmp_path: Path) -> None:
    settings = {**SETTINGS, "federation.privacy": "dp(noise=1)", "deploy.out": str(tmp_path / "run")}
    grid = federation_of(tmp_path, settings | {"federation.privacy": "dp(noise=0.1)"}, SITES)
    with pytest.raises(UserError, match="too few sites"):
        serve(grid, settings)


def test_privacy_cannot_change_when_a_run_is_resumed(tmp_path: Path) -> None:
    settings = {"training.rounds": 2, "stop.seconds": 1e-9}
    record, _, _ = federated(tmp_path, "dp(noise=0.5)", **settings)
    assert record.status == "paused"
    for other in ("dp(noise=0.001)", "none"):
        with pytest.raises(UserError, match="another experiment"):
            federated(tmp_path, other, **settings)


def test_a_failed_round_of_local_privacy_is_not_tried_again(tmp_path: Path) -> None:
    """Every answer costs epsilon."""
    settings = {**SETTINGS, "federation.privacy": "local-dp(noise=1)", "deploy.out": str(tmp_path / "run")}
    settings["deploy.timeout"] = 0.1
    grid = federation_of(tmp_path, settings, SITES)
    grid.tamper = lambda message: None if "arrays" in message.content else message
    with pytest.raises(UserError, match="round 0"):
        serve(grid, settings)
    assert sum(message.metadata.message_type == "train" for message in grid.sent) == SITES


class Killed(BaseException):
    pass


def killed(folder: Path, privacy: str, group: str) -> dict[str, Any]:
    """The settings of a run whose server is killed in a round, when the first site has answered."""
    settings = {**SETTINGS, "federation.privacy": privacy, "training.rounds": 2, "deploy.out": str(folder / "run")}
    settings |= {"evaluation.every": 1, "deploy.timeout": 0.1}
    grid = federation_of(folder, settings, SITES)

    def tamper(message: Message) -> Message:
        if grid.sent[-1].metadata.group_id == group:
            raise Killed
        return message

    grid.tamper = tamper
    with pytest.raises(Killed):
        serve(grid, settings)
    return settings


@pytest.mark.parametrize(("kind", "group"), [("local-dp", "0"), ("dp", "1")])
def test_a_round_trained_again_costs_epsilon_again(kind: str, group: str, tmp_path: Path) -> None:
    """Killed in the first round, before any checkpoint, or in the second."""
    settings = killed(tmp_path, f"{kind}(noise=5,clip={CLIP})", group)
    record = serve(federation_of(tmp_path, settings, SITES), settings)
    spent = [entry["epsilon"] for entry in record.history]
    accountant = Accountant(1e-5, 1.0)
    # One round was trained twice; the evaluation of the initial model comes before the first round.
    rounds = {"0": [1, 2, 3], "1": [0, 1, 3]}[group]
    assert record.rounds == 2
    assert spent == [pytest.approx(accountant.epsilon(5.0, count)) for count in rounds]
    if kind == "local-dp":  # the site that had answered counts by itself
        answers = [path.read_text() for path in sorted(tmp_path.rglob("answers.txt"))]
        assert answers == ["3\n", "2\n", "2\n"]


def test_repeated_rounds_do_not_exceed_the_budget(tmp_path: Path) -> None:
    settings = killed(tmp_path, f"local-dp(epsilon=8,clip={CLIP})", "1")
    record = serve(federation_of(tmp_path, settings, SITES), settings)
    assert (record.status, record.rounds) == ("stopped", 1)
    assert "would exceed the budget" in record.reason


def test_simultaneous_answers_do_not_exceed_the_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower may handle two messages at the same time."""
    privacy = SimpleNamespace(exceeds_budget=lambda answers: answers > 1, epsilon=float, budget=1.0)
    site: Any = SimpleNamespace(client=0, training=SimpleNamespace(privacy=privacy))
    answers = ClientMemory.answers

    def slowly(memory: ClientMemory) -> int:
        count = answers(memory)
        time.sleep(0.05)
        return count

    monkeypatch.setattr(ClientMemory, "answers", slowly)
    with ThreadPoolExecutor() as pool:
        spent = [pool.submit(Site._spend_privacy, site, ClientMemory(tmp_path, "run", 0)) for _ in range(2)]
    assert sorted(isinstance(answer.exception(), UserError) for answer in spent) == [False, True]


def test_a_site_refuses_an_answer_beyond_its_budget(tmp_path: Path) -> None:
    """Even if the server has forgotten that it asked before."""
    settings = killed(tmp_path, f"local-dp(epsilon=8,clip={CLIP})", "1")
    (tmp_path / "run" / "private_rounds.json").unlink()
    record = serve(federation_of(tmp_path, settings, SITES), settings)
    assert record.status == "finished"
    line = json.loads((tmp_path / "run" / "participation.jsonl").read_text().splitlines()[-1])
    assert line["accepted"] == [1, 2]
    assert "has answered 2 training requests" in line["missing"]["0"] and "epsilon=8" in line["missing"]["0"]


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"federation.weighting": "samples"}, "equal weights"),
        ({"algorithm": "fedawa"}, "chooses the weights"),
        ({"model": "resnet20(norm=batch)"}, "training.statistics=own"),
    ],
)
def test_ineffective_noise_is_rejected(more: dict[str, Any], why: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=re.escape(why)):
        federated(tmp_path, "dp(noise=1)", **more)


def test_the_docs_list_the_supported_algorithms() -> None:
    """The table in docs/security.md says yes or no for every algorithm."""
    page = (Path(__file__).parents[2] / "docs" / "security.md").read_text()
    rows = re.findall(r"^\| (`.*`) \| (.*) \| (.*) \|$", page.split("## Supported algorithms")[1], re.M)
    written = {name: (private, robust) for names, private, robust in rows for name in re.findall(r"`([a-z-]+)`", names)}
    assert written.keys() == set(NAMED)
    for name, answers in written.items():
        slots = [slot for _, slot in algorithm(name).slots()]
        reasons = (
            [slot.privacy_conflict(equal_steps=True) for slot in slots],
            [slot.robust_aggregation_conflict() for slot in slots],
        )
        expected = ["no" if any(conflicts) else "yes" for conflicts in reasons]
        assert [answer.split(":")[0] for answer in answers] == expected, name
