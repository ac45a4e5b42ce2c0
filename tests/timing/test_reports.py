"""Virtual time in tables, reports and figures; absent where runs have none."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import fedflat
from fedflat.cli.application import app
from fedflat.errors import UserError

SETTINGS = {"rounds": 4, "clients": 8, "clients_per_round": 2, "local_steps": 2, "workers": 1, "model": "mlp(hidden=8)"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for name, settings in {
        "timed": {"clock": "lognormal"},
        "async": {"clock": "lognormal", "policy": "fedbuff(2)"},
    }.items():
        fedflat.run("fedavg", out=folder / name, **SETTINGS, **settings)
    return folder


def test_show_and_compare_have_time_and_bytes_to_target(runs: Path) -> None:
    shown = CliRunner().invoke(app, ["show", str(runs), "--target", "0.01", "--target", "1"])
    assert "virtual" in shown.stdout and "rounds" in shown.stdout
    document = json.loads(CliRunner().invoke(app, ["show", str(runs), "--target", "0.01", "--json"]).stdout)
    reached = document["rows"][0]["rounds_to"][0]
    assert reached["virtual_seconds"] == 0 and reached["bytes"] == 0 and reached["median"] == 0
    one = CliRunner().invoke(app, ["show", str(runs / "timed")]).stdout
    assert "virtual time" in one and "federation.clock" in one
    values = json.loads(CliRunner().invoke(app, ["show", str(runs / "async"), "--json"]).stdout)
    assert values["virtual_seconds"] > 0 and values["staleness"] is not None


def test_a_report_has_curves_and_columns_over_virtual_time(runs: Path, tmp_path: Path) -> None:
    history = fedflat.load(runs / "timed").record.history
    scores = [line["test"]["server"]["accuracy"] for line in history]
    best = history[scores.index(max(scores))]
    fedflat.report(runs / "timed", out=tmp_path / "report", targets=[max(scores)])
    (row,) = csv.DictReader((tmp_path / "report" / "results.csv").open())
    cells = {name.partition(" to ")[0]: value for name, value in row.items()}
    assert cells["rounds"] == str(best["round"]) and cells["virtual seconds"] == f"{best['virtual_seconds']:.4g}"
    assert cells["MB"] == f"{(best['bytes_up'] + best['bytes_down']) / 1e6:.4g}"
    page = (tmp_path / "report" / "report.html").read_text()
    assert "virtual seconds" in page and "virtual time to" in page


def test_without_virtual_time_nothing_is_shown(tmp_path: Path) -> None:
    result = fedflat.run("fedavg", out=tmp_path / "run", **SETTINGS)
    assert "virtual" not in CliRunner().invoke(app, ["show", str(tmp_path), "--target", "0.5"]).stdout
    fedflat.report(tmp_path / "run", out=tmp_path / "report", targets=[0.5])
    page = (tmp_path / "report" / "report.html").read_text()
    assert "virtual seconds" not in page and "virtual time" not in page
    with pytest.raises(UserError, match="no virtual time; set a clock"):
        fedflat.Comparison([result.record]).plot(over="virtual_seconds")
