"""Own data on the command line: natural clients, tables and regression on the original scale."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.cli.conftest import SMALL, call

RNG = np.random.default_rng(0)
INPUTS = RNG.normal(size=(60, 3)).astype(np.float32)
SITES = np.array(["north", "south", "east"])[np.arange(60) // 5 % 3]
NATURAL = ("--partition", "natural", "--clients-per-round", "2", "--model", "mlp(hidden=4)", *SMALL, "--quiet")


@pytest.fixture(scope="module")
def sites_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An .npz file with three natural clients."""
    path = tmp_path_factory.mktemp("data") / "sites.npz"
    np.savez(path, inputs=INPUTS, targets=(INPUTS[:, 0] > 0).astype(int), groups=SITES)
    return path


@pytest.fixture(scope="module")
def sites_run(sites_file: Path) -> Path:
    """The folder of a run with the natural clients of ``sites_file``."""
    folder = sites_file.parent / "run"
    assert call("run", "fedavg", "--dataset", sites_file, *NATURAL, "--out", folder).exit_code == 0
    return folder


def test_reports_state_the_clients_of_the_partition(fedflat, sites_run, tmp_path):
    assert fedflat("report", sites_run, "--no-figures").exit_code == 0
    for name in ("report.html", "results.md", "results.tex"):
        text = (tmp_path / "report" / name).read_text()
        assert "3 clients" in text and "50 clients" not in text


def test_natural_determines_the_number_of_clients(fedflat, sites_file, sites_run):
    assert "clients: null" in (sites_run / "config.yaml").read_text()
    check = ("run", "fedavg", "--dataset", sites_file, *NATURAL, "--dry-run")
    assert fedflat(*check, "--clients", "null").exit_code == fedflat(*check, "--clients", "3").exit_code == 0
    rejected = fedflat(*check, "--clients", "50")
    assert rejected.exit_code != 0 and "data.clients=50 contradicts the partition natural" in rejected.stderr
    assert "--clients null" in rejected.stderr
    assert "'x' is not a valid integer" in fedflat(*check, "--clients", "x").stderr
    described = fedflat("data", "describe", sites_file, "--partition", "natural", "--clients", "4")
    assert described.exit_code != 0 and "has 3 clients, not 4" in described.stderr


def test_errors_name_the_option_that_helps(fedflat, sites_file):
    too_many = fedflat("run", "fedavg", "--dataset", sites_file, "--partition", "natural", "--dry-run")
    assert "--clients-per-round 3" in too_many.stderr
    no_clients = fedflat("data", "describe", "digits", "--partition", "natural")
    assert "group=COLUMN" in no_clients.stderr and "train_groups" in no_clients.stderr
