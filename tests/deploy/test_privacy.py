"""Flower's mods for differential privacy: clipping, noise at sites and server, and unsupported combinations."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'fedflat[flower]'")

from flwr.app import Array, ArrayRecord, Context, Message
from flwr.client.mod import secaggplus_mod
from flwr.clientapp.mod import LocalDpMod, adaptiveclipping_mod, fixedclipping_mod, message_size_mod

from fedflat.algorithms import algorithm
from fedflat.algorithms.named import NAMED
from fedflat.data import Dataset, load
from fedflat.deploy import client_app
from fedflat.deploy.server.app import serve
from fedflat.deploy.settings import experiment_of
from fedflat.deploy.trust.privacy import Mod, privacy_gap
from fedflat.errors import UserError
from fedflat.experiment.setup.engine import training_of
from fedflat.experiment.setup.problem import build_problem
from fedflat.experiment.store.run_folder import Record

from .direct import SMALL, DirectGrid, node

SITES, CLIP = 3, 0.05
SETTINGS: dict[str, Any] = {
    **SMALL,
    "algorithm": "fedsam",
    "model": "mlp(hidden=32)",
    "data.clients": SITES,
    "federation.clients_per_round": SITES,
    "federation.weighting": "uniform",
    "training.rounds": 1,
}


def federated(folder: Path, mods: Sequence[Mod], **more: Any) -> tuple[Record, list[np.ndarray], DirectGrid]:
    """A federation of sites with mods, and the displacements that they sent."""
    settings = {**SETTINGS, **more, "deploy.out": str(folder / "run")}
    grid = DirectGrid([node(folder, settings, number) for number in range(SITES)], client_app(mods=mods))
    record = serve(grid, settings)
    return record, [array(reply) for reply in grid.came if "arrays" in reply.content], grid


def array(reply: Message) -> np.ndarray:
    return reply.content.array_records["arrays"]["displacement"].numpy()


def clipped(vector: np.ndarray) -> np.ndarray:
    return vector * min(1.0, CLIP / np.linalg.norm(vector))


def test_a_site_clips_and_adds_noise(tmp_path: Path) -> None:
    """sigma = sensitivity sqrt(2 ln(1.25 / delta)) / epsilon, by Flower's mod."""
    epsilon, delta = 3.0, 1e-5
    _, plain, _ = federated(tmp_path / "plain", [])
    record, noisy, grid = federated(tmp_path / "noisy", [LocalDpMod(CLIP, CLIP, epsilon, delta), message_size_mod])
    sigma = CLIP * math.sqrt(2 * math.log(1.25 / delta)) / epsilon
    assert all(np.linalg.norm(vector) > CLIP for vector in plain)
    added = np.concatenate([sent - clipped(own) for sent, own in zip(noisy, plain, strict=True)])
    assert added.std() == pytest.approx(sigma, rel=0.05)
    assert abs(added.mean()) < 5 * sigma / math.sqrt(len(added))
    assert record.status == "finished"
    losses = [reply.content.metric_records["numbers"]["loss"] for reply in grid.came if "numbers" in reply.content]
    assert losses == [0.0] * SITES, "a loss reveals the data"


def test_the_first_mod_is_applied_last(tmp_path: Path) -> None:
    """As in Flower, an answer passes the last mod first: doubling then clipping is not clipping then doubling."""

    def doubled(message: Message, context: Context, call_next: Callable[[Message, Context], Message]) -> Message:
        reply = call_next(message, context)
        reply.content["arrays"] = ArrayRecord({"displacement": Array(2 * array(reply))})
        return reply

    _, plain, _ = federated(tmp_path / "plain", [])
    clip = {"deploy.clipping_norm": CLIP}
    _, sent, _ = federated(tmp_path / "clipped last", [fixedclipping_mod, doubled], **clip)
    assert all(np.allclose(vector, clipped(2 * own), atol=1e-7) for vector, own in zip(sent, plain, strict=True))
    settings = {**SETTINGS, **clip, "deploy.out": str(tmp_path / "run")}
    grid = DirectGrid(
        [node(tmp_path, settings, number) for number in range(SITES)], client_app(mods=[doubled, fixedclipping_mod])
    )
    with pytest.raises(UserError, match="round 0"):
        serve(grid, settings)
    assert all(
        np.linalg.norm(array(reply)) == pytest.approx(2 * CLIP, rel=1e-4)
        for reply in grid.came
        if "arrays" in reply.content
    )


def test_with_negligible_noise_a_private_run_is_the_clipped_one(tmp_path: Path) -> None:
    _, plain, _ = federated(tmp_path / "plain", [])
    _, sent, _ = federated(tmp_path / "sent", [LocalDpMod(CLIP, CLIP, 1e12, 1e-5)])
    for vector, own in zip(sent, plain, strict=True):
        assert vector.dtype == np.float32
        assert np.allclose(vector, clipped(own), atol=1e-7)


def test_sites_clip_and_the_server_adds_noise_to_the_mean(tmp_path: Path) -> None:
    more = {"deploy.clipping_norm": CLIP}
    still, sent, _ = federated(tmp_path / "still", [fixedclipping_mod], **more)
    assert all(np.linalg.norm(vector) == pytest.approx(CLIP, rel=1e-4) for vector in sent)
    noisy, _, _ = federated(tmp_path / "noisy", [fixedclipping_mod], **more, **{"deploy.noise_multiplier": 0.5})
    added = (noisy.models["server"].weights - still.models["server"].weights).double().numpy()
    assert added.std() == pytest.approx(0.5 * CLIP / SITES, rel=0.05)
    again, _, _ = federated(tmp_path / "again", [fixedclipping_mod], **more, **{"deploy.noise_multiplier": 0.5})
    assert not np.allclose(again.models["server"].weights, noisy.models["server"].weights), (
        "the noise does not depend on the seed"
    )


def test_a_site_that_does_not_clip_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="round 0"):
        federated(tmp_path, [], **{"deploy.clipping_norm": CLIP})


@pytest.mark.parametrize(
    ("mod", "more"),
    [(LocalDpMod(CLIP, CLIP, 1.0, 1e-5), {}), (fixedclipping_mod, {"deploy.clipping_norm": CLIP})],
    ids=["noise", "clipping"],
)
def test_a_site_that_cannot_train_says_why_through_its_mods(mod: Mod, more: dict[str, Any], tmp_path: Path) -> None:
    dataset, greeted = load("digits"), set[int]()

    def data(number: int) -> Dataset:
        if number == 0 and number in greeted:
            raise UserError("the disk of this site is gone")
        greeted.add(number)
        return dataset

    settings = {**SETTINGS, "deploy.out": str(tmp_path / "run"), **more}
    grid = DirectGrid([node(tmp_path, settings, number) for number in range(SITES)], client_app(data, mods=[mod]))
    serve(grid, settings, dataset)
    (line,) = (tmp_path / "run" / "participation.jsonl").read_text().splitlines()
    assert json.loads(line)["missing"] == {"0": "the disk of this site is gone"}


@pytest.mark.parametrize(
    ("text", "mod", "why"),
    [
        (
            "scaffold",
            LocalDpMod(1, 1, 1, 1e-5),
            "LocalDpMod.* dc",
        ),
        (
            "feddyn",
            fixedclipping_mod,
            "fixedclipping_mod.*clients keep",
        ),
        ("mime", LocalDpMod(1, 1, 1, 1e-5), "gradient of their data"),
        (
            "fedavg",
            adaptiveclipping_mod,
            "adaptiveclipping_mod.*fixedclipping_mod",
        ),
        (
            "fedavg",
            secaggplus_mod,
            "secaggplus_mod.*older workflows",
        ),
    ],
)
def test_unsupported_mods_are_refused_at_hello(text: str, mod: Mod, why: str, tmp_path: Path) -> None:
    settings = {**SETTINGS, "algorithm": text, "deploy.out": str(tmp_path / "run")}
    grid = DirectGrid([node(tmp_path, settings, 0)], client_app(mods=[mod]))
    with pytest.raises(UserError, match="too few sites"):
        serve(grid, settings)
    assert re.search(why, str(grid.came[0].content.config_records["refusal"]["why"]))


def test_secure_aggregation_does_not_support_these_messages(tmp_path: Path) -> None:
    """Flower's secure aggregation needs records of its own workflow, which these messages lack."""
    _, _, grid = federated(tmp_path, [])
    asked = next(message for message in grid.sent if message.metadata.message_type == "train")
    with pytest.raises(KeyError, match="secaggplus_configs"):
        secaggplus_mod(asked, grid.contexts[100], lambda message, context: message)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"deploy.noise_multiplier": 1.0}, "deploy.clipping_norm"),
        ({"deploy.clipping_norm": 1.0, "federation.weighting": "samples"}, "federation.weighting=uniform"),
        (
            {"deploy.clipping_norm": 1.0, "federation.aggregation": "median"},
            "federation.aggregation=mean",
        ),
        (
            {"deploy.clipping_norm": 1.0, "algorithm": "scaffold"},
            "clients also send dc",
        ),
        ({"deploy.clipping_norm": 1.0, "algorithm": "fedawa"}, "the server chooses the weights of sites"),
        ({"deploy.clipping_norm": 1.0, "model": "resnet20(norm=batch)"}, "training.statistics=own"),
    ],
)
def test_ineffective_noise_is_rejected(more: dict[str, Any], why: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=re.escape(why)):
        federated(tmp_path, [fixedclipping_mod], **more)


def test_the_docs_list_the_supported_algorithms() -> None:
    """The table in docs/security.md says yes or no for every algorithm."""
    page = (Path(__file__).parents[2] / "docs" / "security.md").read_text()
    rows = re.findall(r"^\| (`.*`) \| (.*) \| (.*) \|$", page.split("## Supported algorithms")[1], re.M)
    written = {name: (private, robust) for names, private, robust in rows for name in re.findall(r"`([a-z-]+)`", names)}
    assert written.keys() == set(NAMED)
    problem, _ = build_problem(experiment_of(SETTINGS))
    for name, answers in written.items():
        chosen = algorithm(name)
        private = privacy_gap(problem, training_of(experiment_of(SETTINGS), chosen, SITES, problem))
        robust = next(
            (slot.robust_aggregation_conflict() for _, slot in chosen.slots() if slot.robust_aggregation_conflict()), ""
        )
        expected = ["no" if reason else "yes" for reason in (private, robust)]
        assert [answer.split(":")[0] for answer in answers] == expected, name
