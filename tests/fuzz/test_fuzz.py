"""A seeded sample of the fuzzer's cases; ``make fuzz`` tries all of them."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

from tests.fuzz.cases import VALID, Case, all_cases, command_line, commands
from tests.fuzz.harness import problem_of
from tests.fuzz.workspace import build

SAMPLE = 10


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which cases run."""
    folder = tmp_path_factory.mktemp("workspace")
    build(folder)
    return folder


def test_every_command_has_a_valid_call() -> None:
    assert commands().keys() == VALID.keys()
    assert len(all_cases()) > 5000


@pytest.mark.skipif(sys.platform != "linux", reason="memory is limited and counted as on Linux")
def test_no_hostile_value_gets_through(workspace: Path) -> None:
    sample = random.Random(0).sample(all_cases(), SAMPLE)
    problems = {str(case): problem_of(case, workspace) for case in sample}
    assert not {case: problem for case, problem in problems.items() if problem is not None}


@pytest.mark.skipif(sys.platform != "linux", reason="memory is limited and counted as on Linux")
def test_the_fuzzer_notices_what_it_looks_for(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accepted = problem_of(Case(command_line("show"), is_nonsense=True), workspace)
    assert accepted is not None and accepted.startswith("was accepted")
    monkeypatch.setattr("tests.fuzz.harness.COMMAND", lambda *_, **__: 1 / 0)
    raised = problem_of(Case(("settings",)), workspace)
    assert raised is not None and "ZeroDivisionError" in raised
    monkeypatch.setattr("tests.fuzz.harness.COMMAND", lambda *_, **__: bytearray(3 << 30))
    large = problem_of(Case(("settings",)), workspace)
    assert large is not None and "MemoryError" in large
