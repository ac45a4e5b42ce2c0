"""fedflat doctor: the report, and failed checks."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedflat.cli.application import app
from fedflat.cli.lookup import doctor


def test_all_checks_pass(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["doctor", "--data-dir", str(tmp_path)])
    assert result.exit_code == 0, result.output
    for what in doctor.CHECKS:
        assert f"{what}: works" in result.output or "GPU" in what
    assert "digits: needs no download" in result.output
    assert "cifar10" in result.output


def test_json_without_self_test() -> None:
    result = CliRunner().invoke(app, ["doctor", "--no-self-test", "--json"])
    found = json.loads(result.output)
    assert set(found) == {"environment", "data", "extras", "self-test"}
    assert found["self-test"] == []
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert {*found["extras"], "dev"} == set(project["optional-dependencies"])
    assert {"python", "torch", "GPUs"} <= set(found["environment"])


def test_failed_checks_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(folder: Path) -> str:
        raise RuntimeError("no room\non the disk")

    monkeypatch.setattr(doctor, "CHECKS", {"writing": broken, "reading": lambda folder: "nothing came back"})
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 2
    assert "writing: RuntimeError: no room on the disk" in result.output
    assert "reading: nothing came back" in result.output
    assert "the self-test failed (writing, reading)" in result.output
