"""Tests run torch on one thread: two on a busy machine are many times slower than one.

They run in one process unless they ask for more workers or jobs: a process that imports torch takes seconds to start.
"""

import functools
import gc
import os
import sys
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest
import torch
import typer.testing
from _pytest.doctest import DoctestModule
from hypothesis import settings

from fedflat import processes
from fedflat.engines.round.plan import Plan
from tests.registries import registries_restored

gc.disable()  # until all tests are collected: otherwise it would take a third of the collection's time
# Otherwise every process would compile fedflat and rewrite all assertions again.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
torch.set_num_threads(1)
os.fsync = lambda descriptor: None  # tests of power failures have their own
processes.use_cores(1)
# Without a GPU, manual_seed would record a stack trace for later, which is slow.
seed_torch = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed
# CliRunner would build all commands of fedflat for every call, which takes a tenth of a second.
typer.testing._get_command = functools.cache(typer.testing._get_command)
settings.register_profile("fedflat", deadline=None)  # a busy machine must not fail a test
settings.load_profile("fedflat")
# Tables and messages would fold at another width, or contain control characters.
for variable in ("COLUMNS", "FORCE_COLOR", "GITHUB_ACTIONS", "PY_COLORS"):
    os.environ.pop(variable, None)


@pytest.hookimpl(wrapper=True)
def pytest_collect_file() -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """Search for doctests only in ``src``; those of other directories would take a fifth of the collection's time."""
    collectors = yield
    return [collector for collector in collectors if not isinstance(collector, DoctestModule)]


def pytest_collection_finish() -> None:
    """Keep later garbage collections from traversing the modules and tests."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With ``pytest -n 2``, give a worker all tests of a file, which share processes and fixtures.

    All files that share a Ray cluster are one unit. Files keep their order: the last are the doctests, which are so
    short that the workers finish together.
    """
    if config.getoption("dist") != "load":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return "tests/cluster" if file.startswith("tests/cluster/") else file

    config.option.loadscopereorder = False  # by default, xdist starts with the files of most tests
    return Scheduling(config, log)


@pytest.fixture
def restore_registries() -> Iterator[Callable[[], None]]:
    """Forget the components and plugins that a test registers or loads."""
    with registries_restored() as forget:
        yield forget


@pytest.fixture
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let clients train for at most two steps a round, for tests of programs that must run, not learn."""

    def short_plan(batch_size: int, epochs: int, steps: int | None, *others: Any) -> Plan:
        return Plan(batch_size, epochs, min(steps or 2, 2), *others)

    monkeypatch.setattr("fedflat.experiment.setup.engine.Plan", short_plan)


@pytest.fixture(autouse=True)
def the_same_in_any_order() -> Iterator[None]:
    """Each test begins as if it were the only one.

    Fresh modules draw from torch's generator. And on a processor without bf16, torch's first product in it turns
    oneDNN off for the whole process, so that later sums end in other bits.
    """
    seed_torch(0)
    enabled = torch._C._get_mkldnn_enabled()
    yield
    torch._C._set_mkldnn_enabled(enabled)
