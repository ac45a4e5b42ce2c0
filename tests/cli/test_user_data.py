"""Own data on the command line: natural clients, tables and regression on the original scale."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fedflat.data import load, standardise
from fedflat.errors import UserError
from fedflat.reporting.result import Result
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
    missing = fedflat("run", "fedavg", "--clients", "null", "--dry-run")
    assert missing.exit_code != 0 and "this partition needs a number of clients; set it: --clients N" in missing.stderr
    described = fedflat("data", "describe", sites_file, "--partition", "natural", "--clients", "4")
    assert described.exit_code != 0 and "has 3 clients, not 4" in described.stderr


def test_errors_name_the_option_that_helps(fedflat, sites_file):
    too_many = fedflat("run", "fedavg", "--dataset", sites_file, "--partition", "natural", "--dry-run")
    assert "--clients-per-round 3" in too_many.stderr
    flags = ("--dataset", sites_file, "--partition", "natural", "--quiet", "--out", "c")
    compared = fedflat("compare", "fedavg", "scaffold", "--seeds", "2", *flags)
    assert compared.exit_code == 2 and compared.stderr.count("--clients-per-round 3") == 1
    assert "failed" not in compared.stderr and not Path("c").exists()
    no_clients = fedflat("data", "describe", "digits", "--partition", "natural")
    assert "group=COLUMN" in no_clients.stderr and "train_groups" in no_clients.stderr


@pytest.fixture(scope="module")
def prices(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CSV file for regression on the original scale, with a text column of clients."""
    path = tmp_path_factory.mktemp("prices") / "prices.csv"
    table = pd.DataFrame({"area": 100 * INPUTS[:, 0] + 500, "old": INPUTS[:, 1] > 0, "site": SITES})
    table.assign(price=30.0 * table.area + 1000 * INPUTS[:, 2]).to_csv(path, index=False)
    return path


def test_every_column_of_a_table_has_a_use(fedflat, prices, tmp_path):
    with pytest.raises(UserError, match=r"'site' .*group=site.*drop=site"):
        load(f"arrays(path={prices},target=price)")
    with pytest.raises(UserError, match="no column 'place' for group="):
        load(f"arrays(path={prices},target=price,group=place,drop=site)")
    with pytest.raises(UserError, match=r"'sites'.*did you mean site"):
        load(f"arrays(path={prices},target=price,drop=sites)")
    assert load(f"arrays(path={prices},target=price,drop=site|old)").columns == ("area",)
    described = ("data", "describe", f"arrays(path={prices},target=price,group=site)")
    by_client = fedflat(*described, "--partition", "natural").stdout.split("Examples of every client")[1]
    assert [line.split()[0] for line in by_client.splitlines()[-3:]] == ["east", "north", "south"]
    shown = fedflat(*described).stdout
    assert "2: area, old" in shown and "3: east, north, south" in shown
    table = pd.read_csv(prices).drop(columns="site")
    for name, columns in (("train", ["area", "old", "price"]), ("test", ["old", "area", "price"])):
        table[columns].to_csv(tmp_path / f"{name}.csv", index=False)
    with pytest.raises(UserError, match="has the input columns old, area, but the training table has area, old"):
        load(f"arrays(path={tmp_path},target=price)")


def test_whole_numbers_are_classes_unless_the_task_is_regression(fedflat, prices, tmp_path):
    table = pd.read_csv(prices).drop(columns="site").astype({"price": int})
    path = tmp_path / "whole.csv"
    table.assign(price=100_000 + table["price"]).to_csv(path, index=False)
    described = ("data", "describe", f"arrays(path={path},target=price)")
    assert "--task mse" in fedflat(*described).stderr
    assert json.loads(fedflat(*described, "--task", "mse", "--json").stdout)["classes"] == []
    assert "did you mean mse" in fedflat(*described, "--task", "msee").stderr
    assert "bce needs" in fedflat("data", "describe", "digits", "--task", "bce").stderr


def test_large_numbers_are_standardised_and_reported_in_their_units(fedflat, prices):
    raw = f"arrays(path={prices},target=price,group=site)"
    advice = "standardise=true)"
    assert advice in "".join(fedflat("data", "describe", raw).stdout.split())
    diverged = fedflat("run", "fedavg", "--dataset", raw, *NATURAL, "--lr", "0.1", "--json")
    record = json.loads(diverged.stdout)
    assert record["status"] == "diverged" and advice in record["reason"]
    shown = fedflat("show", record["folder"]).stdout
    assert shown.index("diverged") < shown.index("time") and "best over test" not in shown
    scaled = f"{raw[:-1]},standardise=true)"
    assert advice not in fedflat("data", "describe", scaled).stdout.split("content")[1]
    data = load(scaled)
    assert data.train.targets.mean().abs() < 1e-6 and abs(data.train.inputs.std(0, correction=0) - 1).max() < 1e-6
    assert np.allclose(data.test.targets * data.target_std[0] + data.target_mean[0], load(raw).test.targets)
    document = json.loads(fedflat("run", "fedavg", "--dataset", scaled, *NATURAL, "--lr", "0.1", "--json").stdout)
    assert 500 < document["models"]["server"]["last"] < 2 * data.target_std[0]
    shown = fedflat("show", document["folder"]).stdout
    assert "test rmse, lower is better" in shown and "last mae" in shown and "last r2" in shown
    result = Result.load(document["folder"])
    assert result.lower_is_better and result.plot().axes[0].get_ylabel() == "test rmse (lower is better)"
    shown = fedflat("evaluate", document["folder"]).stdout
    assert "lower rmse is better" in shown and "corrupt" not in shown and "  mae" in shown and "  r2" in shown
    assert "clients (training data)" in shown and "3 natural clients" in shown and "domain" not in shown
    assert "The loss is computed on standardised targets" in shown
    assert "Not on corruptions" in fedflat("evaluate", document["folder"], "--on", "test,corruptions").stdout
    with pytest.raises(UserError, match="only vectors"):
        standardise(load("digits"))
