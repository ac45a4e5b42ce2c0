"""A run that is killed at any moment and resumed writes the same bytes as an uninterrupted one."""

from __future__ import annotations

import itertools
import os
import signal
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fedflat
from fedflat.experiment.store.run_folder import RunFolder

ALGORITHM = "scaffold+wima(window=4)+swa(start=0.3,every=2)+ema"
SETTINGS = {
    "rounds": 9,
    "clients": 12,
    "clients_per_round": 3,
    "local_steps": 1,
    "workers": 1,
    "model": "mlp(hidden=2)",
    "evaluation__examples": 20,
    "save_every": 3,
    "engine__checkpoint_every": 2,
}
TOUCHING_FILES = ("pwrite", "replace", "truncate", "ftruncate", "open", "mkdir")
"""Without fsync, which matters only in a power failure."""


def start(folder: Path) -> None:
    fedflat.run(ALGORITHM, out=folder, **SETTINGS)


def go_on(folder: Path) -> None:
    """Resume a run after a crash, or start it if nothing was written."""
    if RunFolder(folder).exists:
        fedflat.resume(folder)
    else:
        start(folder)


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != "timing.jsonl")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def in_a_process_to_be_killed(work, prepare=lambda: None, after: float | None = None) -> bool:
    """Run ``work`` in a forked process that kills itself or is killed after some seconds; return whether it was."""
    child = os.fork()
    if child == 0:
        try:
            prepare()
            work()
            os._exit(0)
        except BaseException:
            os._exit(1)
    if after is not None:
        time.sleep(after)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


def die_at(number: int):
    """Make the process kill itself during its n-th file operation, so that a write is incomplete."""
    counter = itertools.count()

    def deadly(name: str):
        real = getattr(os, name)

        def call(*arguments, **keywords):
            if next(counter) != number:
                return real(*arguments, **keywords)
            if name == "pwrite":
                descriptor, data, offset = arguments
                real(descriptor, bytes(data)[: len(data) // 2], offset)
            return os.kill(os.getpid(), signal.SIGKILL)

        return call

    def prepare() -> None:
        for name in TOUCHING_FILES:
            setattr(os, name, deadly(name))

    return prepare


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    start(folder)
    return contents(folder)


def test_a_run_is_the_same_twice(undisturbed: dict[str, bytes], tmp_path: Path) -> None:
    start(tmp_path / "run")
    assert contents(tmp_path / "run") == undisturbed
    assert {"metrics.jsonl", "model.safetensors", "state/clients/rows.bin"} <= set(undisturbed)


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(first=st.integers(0, 200), second=st.integers(0, 200))
def test_killed_in_the_middle_of_an_operation(
    undisturbed: dict[str, bytes], tmp_path_factory: pytest.TempPathFactory, first: int, second: int
) -> None:
    folder = tmp_path_factory.mktemp("killed") / "run"
    in_a_process_to_be_killed(lambda: start(folder), die_at(first))
    in_a_process_to_be_killed(lambda: go_on(folder), die_at(second))
    go_on(folder)
    assert contents(folder) == undisturbed


@settings(max_examples=5, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(after=st.floats(0.0, 1.0))
def test_killed_from_outside(
    undisturbed: dict[str, bytes], tmp_path_factory: pytest.TempPathFactory, after: float
) -> None:
    folder = tmp_path_factory.mktemp("killed") / "run"
    in_a_process_to_be_killed(lambda: start(folder), after=after)
    go_on(folder)
    assert contents(folder) == undisturbed


def test_runs_are_really_killed(tmp_path: Path) -> None:
    assert in_a_process_to_be_killed(lambda: start(tmp_path / "run"), die_at(60))
    assert RunFolder(tmp_path / "run").exists
