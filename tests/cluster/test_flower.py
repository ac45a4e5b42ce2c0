"""The simulated clients of a Flower run are hosted on a Ray cluster that is there already."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'fedflat[flower]'")
pytest.importorskip("ray", reason='Ray is not installed (pip install "fedflat[ray]")')

from fedflat.deploy.flower.project import write_project
from fedflat.deploy.settings import experiment_of
from fedflat.experiment.run import Run
from fedflat.experiment.store.run_folder import RunFolder, load_record
from tests.deploy.processes import RealFederation, toml

from ..time_limits import scaled
from .nodes import Nodes

pytestmark = pytest.mark.slow
SETTINGS: dict[str, Any] = {
    "algorithm": "scaffold",
    "data.clients": 3,
    "federation.clients_per_round": 3,
    "training.rounds": 2,
    "seed": 0,
}
FIXED = {
    "data.partition": "dirichlet(alpha=0.5)",
    "training.local_epochs": 1,
    "training.batch_size": 10,
    "training.lr": 0.05,
    "model": "mlp",
}


def test_flowers_simulation_on_an_existing_cluster(cluster: Nodes, tmp_path: Path) -> None:
    write_project(tmp_path / "sites", "scaffold", 3)
    out = tmp_path / "run"
    federation = RealFederation(tmp_path / "flower", 0)
    federation.environment |= {"RAY_ADDRESS": cluster.address, "FEDFLAT_STATE": str(tmp_path / "state")}
    try:
        federation.start_simulation()
        settings = toml({**SETTINGS, "deploy.sites": "any", "deploy.out": str(out), "deploy.score": False})
        flags = ["--federation-config", "num-supernodes=3 client-resources-num-cpus=1", "--run-config", settings]
        command = ["flwr", "run", str(tmp_path / "sites"), "sites", *flags]
        subprocess.run(command, check=True, env=federation.environment, capture_output=True, timeout=scaled(120))
        cluster.await_task("ClientAppActor")
        federation.until(lambda: RunFolder(out).is_over, 240)
    finally:
        federation.close()
    expected = Run(experiment_of({**SETTINGS, **FIXED})).execute()
    assert load_record(out).history == expected.history
    assert RunFolder(out).status()["status"] == "finished"
