"""A real SuperLink and real SuperNodes on loopback give the model that the loop gives."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'fedflat[flower]'")

from fedflat.deploy.project import write_project
from fedflat.deploy.settings import experiment_of
from fedflat.experiment.folder import RunFolder
from fedflat.experiment.record import load_record
from fedflat.experiment.run import Run

from .processes import RealFederation, real_federation, rounds_done

pytestmark = pytest.mark.slow

SITES = 4
ALGORITHMS = ["fedavg", "scaffold", "feddyn", "fedsam", "fedmoswa", "fedwmsam"]
SETTINGS: dict[str, Any] = {
    "data.clients": SITES,
    "data.split": "dirichlet(alpha=0.5)",
    "federation.per_round": 3,
    "training.rounds": 5,
    "training.epochs": 1,
    "training.batch": 20,
    "training.rate": 0.05,
    "seed": 0,
    "model": "mlp",
}


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealFederation]:
    folder = tmp_path_factory.mktemp("federation")
    write_project(folder / "sites", "fedavg", SITES)
    with real_federation(folder / "processes", SITES) as found:
        yield found


def test_six_algorithms_give_what_the_loop_gives(federation: RealFederation) -> None:
    """All at once: a node that has work does not wait for the next look at its messages."""
    project = federation.folder.parent / "sites"

    def run(text: str) -> str:
        more = {"algorithm": text, "deploy.out": str(federation.folder / text), "deploy.score": text == "fedavg"}
        return federation.run(project, {**SETTINGS, **more}, timeout=150)

    with ThreadPoolExecutor(len(ALGORITHMS)) as pool:
        printed = dict(zip(ALGORITHMS, pool.map(run, ALGORITHMS), strict=True))
    for text in ALGORITHMS:
        out = federation.folder / text
        assert RunFolder(out).exists, printed[text] + federation.log("warm")
        expected = Run(experiment_of({**SETTINGS, "algorithm": text})).go()
        record = load_record(out)
        assert record.status == "finished", printed[text]
        weights = RunFolder(out).read_tensors("model.safetensors")[0]
        problem = Run(record.config).problem
        gap = (problem.layout.flatten(weights) - expected.models["server"].weights).abs().max()
        assert gap <= 1e-6, (text, gap)
        assert torch.isfinite(problem.layout.flatten(weights)).all()
        assert record.history == expected.history, text
        lines = [json.loads(line) for line in (out / "participation.jsonl").read_text().splitlines()]
        assert [line["round"] for line in lines] == list(range(5))
        assert all(len(line["accepted"]) == 3 and not line["refused"] and not line["missing"] for line in lines)
    scores = json.loads((federation.folder / "fedavg" / "sites.json").read_text())
    assert sorted(scores["sites"]) == ["0", "1", "2", "3"]
    assert all(score["accuracy"] > 0.5 for score in scores["sites"].values())


def test_vectors_stay_in_the_folders_of_their_nodes(federation: RealFederation) -> None:
    experiment = json.loads((federation.folder / "scaffold" / "experiment.json").read_text())["experiment"]
    lines = [json.loads(line) for line in (federation.folder / "scaffold" / "participation.jsonl").read_text().splitlines()]
    for number in range(SITES):
        kept: list[Path] = sorted((federation.folder / f"node-{number}" / experiment).rglob("*.safetensors"))
        stamps = [line["round"] + 1 for line in lines if number in line["accepted"]]
        assert [path.parent.name for path in kept] == [f"client-{number}"] * len(kept)
        assert sorted(int(path.stem) for path in kept) == stamps[-2:]


def test_a_server_killed_between_rounds_goes_on_to_the_same_end(federation: RealFederation) -> None:
    project, out = federation.folder.parent / "sites", federation.folder / "killed-server"
    settings = {**SETTINGS, "algorithm": "scaffold+ema", "training.rounds": 4, "deploy.out": str(out), "deploy.score": False}
    printed = federation.start_run(project, settings)
    federation.until(lambda: rounds_done(out) >= 2, 60)
    federation.kill_server_of(out)
    federation.stop_run(printed)  # otherwise nodes wait, until Flower notices, for messages that were cut off
    done = rounds_done(out)
    assert 2 <= done < 4
    federation.run(project, settings, timeout=90)
    record = load_record(out)
    expected = Run(experiment_of({**SETTINGS, "algorithm": "scaffold+ema", "training.rounds": 4})).go()
    assert record.status == "finished"
    assert record.history == expected.history
    lines = [json.loads(line) for line in (out / "participation.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == [0, 1, 2, 3]
    assert all(len(line["accepted"]) == 3 for line in lines)


def test_a_node_killed_in_the_middle_of_a_round_comes_back_with_its_state(federation: RealFederation) -> None:
    project, out = federation.folder.parent / "sites", federation.folder / "killed-node"
    more = {"algorithm": "scaffold", "federation.per_round": SITES, "training.rounds": 5, "deploy.timeout": 15.0, "deploy.score": False}
    federation.start_run(project, {**SETTINGS, **more, "deploy.out": str(out)})
    federation.until(lambda: rounds_done(out) >= 1, 60)
    federation.kill("node-3")
    federation.start_node(3)
    federation.until(lambda: RunFolder(out).status()["status"] == "finished", 120)
    lines = [json.loads(line) for line in (out / "participation.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == [0, 1, 2, 3, 4]
    assert all({0, 1, 2} <= set(line["accepted"]) for line in lines)
    assert 3 in lines[0]["accepted"]
    assert 3 in lines[-1]["accepted"], lines
    assert load_record(out).history[-1]["test"]["server"]["accuracy"] > 0.5
