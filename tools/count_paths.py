"""Count the source files that five typical tasks execute, for the table in docs/architecture.md.

    python tools/count_paths.py

A file counts if one of its functions is called. Imports do not count, because they run once per process.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from typer.testing import CliRunner

import fedflat
from fedflat.algorithms import algorithm
from fedflat.cli.application import app
from fedflat.engines.round.client import StepGradient
from fedflat.experiment.config import Config
from fedflat.experiment.make_config import make_config
from fedflat.experiment.setup.engine import training_of
from fedflat.experiment.setup.problem import build_problem
from fedflat.flatness import Objective

SOURCE = str(Path(fedflat.__file__).resolve().parent)
SETTINGS: dict[str, Any] = {"rounds": 2, "clients": 6, "clients_per_round": 2, "local_steps": 1, "workers": 1}
FLAGS = [word for name, value in SETTINGS.items() for word in (f"--{name.replace('_', '-')}", str(value))]


class Reached(BaseException):
    """Raised at the end of a path."""


class FileCounter:
    """Collects the source files whose functions are called while it is active."""

    def __init__(self) -> None:
        self.files: set[str] = set()

    def __enter__(self) -> FileCounter:
        sys.setprofile(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _called(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(SOURCE) and code.co_name != "<module>":
            self.files.add(code.co_filename)


def count_until(owner: type, method: str, task: Callable[[], object]) -> int:
    """Files executed by a task until a method is called for the first time."""
    original = getattr(owner, method)

    def stop(*_: object, **__: object) -> None:
        raise Reached

    setattr(owner, method, stop)
    try:
        with FileCounter() as counter:
            task()
    except Reached:
        return len(counter.files)
    finally:
        setattr(owner, method, original)
    raise AssertionError(f"the task never called {owner.__name__}.{method}")


def draw_first_batch(config: Config) -> None:
    """Build a config's problem and partition, draw the first batch of client 0, and move it to the device."""
    problem, partition = build_problem(config)
    plan = training_of(config, algorithm(config.algorithm), len(partition.clients), problem).plan
    positions = plan.batches(config.seed, 0, 0, len(partition.clients[0]))[0]
    problem.batch(torch.from_numpy(partition.clients[0][positions]), {})


def command(*words: str) -> Callable[[], object]:
    """A task that runs a command."""
    return lambda: CliRunner().invoke(app, [*words], catch_exceptions=False)


def main() -> None:
    """Run each task once to fill caches, then count."""
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp())
    counts: dict[str, int] = {}
    try:
        rounds = fedflat.rounds("scaffold", out=folder / "rounds", engine__checkpoint_every=1, **SETTINGS)
        next(rounds)
        with FileCounter() as counter:
            next(rounds)
        rounds.close()
        counts["one client's update, from sampling to the checkpoint"] = len(counter.files)
        words = ("run", "fedmoswa+wima(window=20)", *FLAGS, "--quiet", "--out")
        command(*words, str(folder / "first"))()
        task = command(*words, str(folder / "second"))
        counts["`fedmoswa+wima(window=20)`, to the first training step"] = count_until(StepGradient, "__call__", task)
        with FileCounter() as counter:
            draw_first_batch(make_config(settings=SETTINGS))
        counts["a dataset's name, to the first batch"] = len(counter.files)
        with FileCounter() as counter:
            fedflat.run("fedavg", progress=False, **SETTINGS)
        counts["`fedflat.run`"] = len(counter.files)
        task = command("flatness", "spectrum", str(folder / "first"), "--eigenvalues", "1")
        task()
        counts["the first product of `fedflat flatness spectrum RUN`"] = count_until(
            Objective, "hessian_products", task
        )
    finally:
        shutil.rmtree(folder)
    for name, count in counts.items():
        print(f"| {name} | {count} |")


if __name__ == "__main__":
    main()
