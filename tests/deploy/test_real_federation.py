"""A real SuperLink and real SuperNodes on loopback agree with the loop engine."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'fedflat[flower]'")

from flwr.app import ArrayRecord

from fedflat.deploy import Strategy
from fedflat.deploy.flower.project import write_project
from fedflat.deploy.settings import config_of
from fedflat.experiment.run import Run
from fedflat.experiment.store.run_folder import RunFolder, load_record

from ..time_limits import scaled
from .direct import AppGrid, node
from .processes import RealFederation, real_federation, rounds_done, run_number

pytestmark = pytest.mark.slow

SITES, ROUNDS = 3, 2
SETTINGS: dict[str, Any] = {
    "data.clients": SITES,
    "data.partition": "dirichlet(alpha=0.5)",
    "federation.clients_per_round": 2,
    "training.rounds": ROUNDS,
    "training.local_epochs": 3,
    "training.batch_size": 20,
    "training.lr": 0.1,
    "seed": 0,
    "model": "mlp",
}
KILLED = {**SETTINGS, "algorithm": "fedwmsam+ema", "deploy.score": True}
"""The run whose server is killed. Its clients have state, send scalars and perturb the weights; test_agreement.py runs
all algorithms in one process."""
EXAMPLE = Path(__file__).parents[2] / "examples" / "flower-app"
PATIENCE = 420
"""Seconds for the run: usually half a minute, but Flower restarts a hanging process only after 3.5 minutes."""


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealFederation]:
    folder = tmp_path_factory.mktemp("federation")
    write_project(folder / "sites", "fedavg", SITES)
    with real_federation(folder / "processes", SITES) as found:
        yield found


class Runs(NamedTuple):
    """Runs that share the federation at the same time, because most of the time they wait."""

    resumed: Path
    """Folder of a run whose ServerApp and SuperLink are killed after the first round, and which is resumed."""
    wrong: str
    """Output of ``flwr run`` for a run that fails at once."""
    strategy: Path
    """Output file of the example of a strategy."""


def decorated_example(folder: Path) -> Path:
    """Copy the example app into a folder, with its decorated clients in place of the unchanged ones."""
    shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("__pycache__"))
    project = (folder / "pyproject.toml").read_text()
    assert project.count('"example_app.client:app"') == 1
    project = project.replace('"example_app.client:app"', '"example_app.decorated_client:app"')
    (folder / "pyproject.toml").write_text(project)
    return folder


@pytest.fixture(scope="module")
def runs(federation: RealFederation) -> Runs:
    project, out = federation.folder.parent / "sites", federation.folder / "killed-server"
    settings = {**KILLED, "deploy.out": str(out)}
    printed = federation.start_run(project, settings)
    federation.until(lambda: rounds_done(out) >= 1, PATIENCE)
    federation.kill_server_of(out)
    # Otherwise nodes wait for lost messages until Flower notices; fails if it has done so already.
    federation.flwr("stop", run_number(printed), "sites")
    assert 1 <= rounds_done(out) < ROUNDS
    federation.kill("superlink")
    federation.start_link()
    strategy = federation.folder / "strategy.pt"
    example = {"out": str(strategy), "rounds": 2, "algorithm": "scaffold+ema", "sites": SITES}
    federation.start_run(decorated_example(federation.folder / "flower-app"), example, sites=False)
    wrong = {**SETTINGS, "deploy.minimum": 3, "deploy.out": str(federation.folder / "wrong")}
    printed = federation.start_run(project, wrong)
    federation.start_run(project, settings)
    federation.until((out / "sites.json").exists, PATIENCE)
    return Runs(out, printed, strategy)


@pytest.fixture(scope="module")
def resumed(runs: Runs) -> Path:
    return runs.resumed


def participation(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "participation.jsonl").read_text().splitlines()]


def test_a_run_whose_server_was_killed_agrees_with_the_loop(resumed: Path) -> None:
    out, expected = resumed, Run(config_of(KILLED)).execute()
    record = load_record(out)
    assert record.status == "finished"
    weights = Run(record.config).problem.layout.flatten(RunFolder(out).read_tensors("model.safetensors")[0])
    assert torch.isfinite(weights).all()
    assert (weights - expected.models["server"].weights).abs().max() <= 1e-6
    assert record.history == expected.history
    lines = participation(out)
    assert [line["round"] for line in lines] == list(range(ROUNDS))
    assert all(len(line["accepted"]) == 2 and not line["rejected"] and not line["missing"] for line in lines)


def test_nodes_reconnect_to_a_restarted_superlink(federation: RealFederation, resumed: Path) -> None:
    """With a database, the SuperLink still knows them: each has connected once and was never started again."""
    for number in range(SITES):
        log = federation.log(f"node-{number}")
        assert log.count("SuperNode ID") == 1 and log.count("[RUN") > 2, log


def test_an_error_of_the_server_is_reported_at_once(
    federation: RealFederation, runs: Runs, capfd: pytest.CaptureFixture[str]
) -> None:
    number, listed = run_number(runs.wrong), ""

    def printed(*command: str) -> str:
        return federation.flwr(*command).output + capfd.readouterr().out  # JSON bypasses a redirected sys.stdout

    def failed() -> bool:
        nonlocal listed
        listed = printed("list", "sites", "--run-id", number, "--format", "json")
        return "finished:failed" in listed

    federation.until(failed, 30)
    shown = printed("log", number, "sites", "--show")
    assert "fedflat: deploy.minimum=3, but only 2 clients take part" in shown, shown
    assert "deploy.minimum=3" in listed and "Traceback" not in shown


def test_the_example_of_a_strategy_runs(
    federation: RealFederation, runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decorated clients keep their state at real nodes as in one process, where unchanged clients run, too."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    expected, accuracy = run_example("decorated_client", "scaffold+ema", 2)
    _, unchanged_accuracy = run_example("client", "fedavgm+ema", 1)
    assert unchanged_accuracy[1] > 0.6
    federation.until(runs.strategy.exists, 90)
    saved = torch.load(runs.strategy, weights_only=True)
    assert saved["accuracy"] == pytest.approx(accuracy)
    torch.testing.assert_close(saved["model"], expected)
    assert saved["model"]["1.running_mean"].abs().max() > 0


def run_example(module: str, algorithm: str, rounds: int) -> tuple[dict[str, torch.Tensor], dict[int, float]]:
    """Run the example's ClientApp in this process; returns the model and the accuracy after each round."""
    app, network = import_module(f"example_app.{module}").app, import_module("example_app.client").network
    grid = AppGrid([node(Path(), {}, number) for number in range(SITES)], app)
    result = Strategy(algorithm).start(grid, ArrayRecord(network().state_dict()), rounds)
    accuracy = {round: metrics["accuracy"] for round, metrics in result.evaluate_metrics_clientapp.items()}
    return dict(result.arrays.to_torch_state_dict()), accuracy


def test_every_site_scores_the_model(resumed: Path) -> None:
    scores = json.loads((resumed / "sites.json").read_text())
    assert sorted(scores["sites"]) == ["0", "1", "2"]
    assert all(score["accuracy"] > 0.5 for score in scores["sites"].values())


def test_client_states_stay_at_their_nodes(federation: RealFederation, resumed: Path) -> None:
    out = resumed
    experiment = json.loads((out / "experiment.json").read_text())["experiment"]
    for number in range(SITES):
        kept: list[Path] = sorted((federation.folder / f"node-{number}" / experiment).rglob("*.safetensors"))
        stamps = [line["round"] + 1 for line in participation(out) if number in line["accepted"]]
        assert [path.parent.name for path in kept] == [f"client-{number}"] * len(kept)
        assert sorted(int(path.stem) for path in kept) == stamps[-2:]


def test_a_node_killed_during_a_round_returns_with_its_state(federation: RealFederation) -> None:
    """With secure aggregation, whose secrets are in Flower's context between messages; the round is repeated."""
    project, out = federation.folder.parent / "secured", federation.folder / "killed-node"
    write_project(project, "scaffold", SITES, secure_weighting="uniform")
    with (project / "pyproject.toml").open("a") as settings_file:
        settings_file.write("tries = 20\n")  # Flower accepts only keys that are in the file
    more = {
        "training.local_steps": 40,
        "federation.clients_per_round": SITES,
        "deploy.minimum": SITES,
        "deploy.score": False,
        "deploy.timeout": scaled(10.0),
    }
    settings = {**SETTINGS, **more, "deploy.out": str(out)}
    del settings["training.local_epochs"]
    federation.start_run(project, settings)
    federation.until(lambda: rounds_done(out) >= 1, 60)
    federation.kill("node-2")
    federation.start_node(2)
    federation.until(lambda: RunFolder(out).status()["status"] == "finished", 120)
    assert [(line["round"], line["accepted"]) for line in participation(out)] == [(0, [0, 1, 2]), (1, [0, 1, 2])]
    assert load_record(out).history[-1]["test"]["server"]["accuracy"] > 0.5
