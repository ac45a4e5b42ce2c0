"""fedflat.report: the report of the command line, from Python."""

from __future__ import annotations

from pathlib import Path

import pytest

import fedflat
from fedflat.errors import UserError

SMALL = {"rounds": 2, "clients": 6, "clients_per_round": 2, "local_steps": 1, "workers": 1, "model": "mlp(hidden=4)"}


def test_a_report_contains_page_and_tables(tmp_path: Path) -> None:
    fedflat.compare(["fedavg", "fedsam"], seeds=1, out=tmp_path / "runs", jobs=1, **SMALL)
    page = fedflat.report(
        tmp_path / "runs",
        tmp_path / "report",
        title="Two algorithms",
        targets=0.5,
        columns="last, rounds_to_0.5",
        figures=False,
    )
    assert page == tmp_path / "report" / "report.html"
    assert "<h1>Two algorithms</h1>" in page.read_text()
    assert "row,last value,rounds to 50 %" in (page.parent / "results.csv").read_text()
    assert {"FedAvg", "FedSAM"} <= set((page.parent / "results.csv").read_text().replace("\n", ",").split(","))
    runs = [tmp_path / "runs" / name for name in ("fedavg", "fedsam")]
    again = fedflat.report(runs, tmp_path / "again", figures=False)
    assert (again.parent / "values.csv").read_text() == (page.parent / "values.csv").read_text()


def test_a_report_needs_runs(tmp_path: Path) -> None:
    for runs, message in (
        (tmp_path, "no run"),
        (tmp_path / "nowhere", "nowhere"),
        ([5], "runs is 5"),
        (5, "runs is 5"),
    ):
        with pytest.raises(UserError, match=message):
            fedflat.report(runs, tmp_path / "report")  # type: ignore[arg-type]
    assert not (tmp_path / "report").exists()
