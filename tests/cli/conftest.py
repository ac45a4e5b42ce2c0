"""The command line, called in this process, and a finished run and comparison that several tests share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from fedflat.cli.application import app

Fedflat = Callable[..., Result]
SMALL = ("--rounds", "3", "--local-steps", "2", "--workers", "1", "--device", "cpu")


def call(*arguments: object) -> Result:
    """Call ``fedflat`` with these arguments; unexpected exceptions are raised."""
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def assert_error(result: Result, message: str) -> None:
    """Check that a command prints only one line, on stderr; `` ... `` in the message stands for any text."""
    assert result.exit_code == 2, result.output
    assert all(part in result.stderr for part in message.split(" ... ")), result.stderr
    assert result.stderr.startswith("fedflat: ") and result.stderr.count("\n") == 1
    assert result.stdout == ""


@pytest.fixture
def fedflat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fedflat:
    """``fedflat`` in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return call


@pytest.fixture(scope="session")
def small() -> tuple[str, ...]:
    """Flags that make an experiment tiny."""
    return SMALL


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    assert call("run", "fedmoswa+wima", *SMALL, "--quiet", "--out", folder).exit_code == 0
    return folder


@pytest.fixture(scope="session")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished comparison."""
    folder = tmp_path_factory.mktemp("compared") / "runs"
    assert call("compare", "fedavg", "fedsam", *SMALL, "--seeds", "2", "--quiet", "--out", folder).exit_code == 0
    return folder
