"""Tests run torch on one thread: two on a busy machine are many times slower than one."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import settings

from tests.registries import registries_restored

torch.set_num_threads(1)
settings.register_profile("fedflat", deadline=None)  # a busy machine must not fail a test
settings.load_profile("fedflat")
os.environ.pop("COLUMNS", None)  # parallel test workers are told a width, and tables would fold
SLOWEST_FIRST = (
    "tests/cluster",
    "tests/deploy/test_real_federation.py",
    "tests/testing/test_testing.py",
)
"""Files and folders that take longest, so that with ``pytest -n 2`` both workers finish at about the same time."""


def group_of(nodeid: str) -> str:
    """The tests that one worker runs together: those of a file, or of all files that share a Ray cluster."""
    file = nodeid.partition("::")[0]
    return "tests/cluster" if file.startswith("tests/cluster/") else file


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the slowest groups first."""
    order = {group: place for place, group in enumerate(SLOWEST_FIRST)}
    items.sort(key=lambda item: order.get(group_of(item.nodeid), len(order)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each worker one group after the other, so that processes and fixtures of a file start once."""
    if config.getoption("dist") != "load":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    config.option.loadscopereorder = False  # keep the order above instead of sorting by the number of tests
    return Scheduling(config, log)


@pytest.fixture
def restore_registries() -> Iterator[Callable[[], None]]:
    """Forget the components and plugins that a test registers or loads."""
    with registries_restored() as forget:
        yield forget


@pytest.fixture(autouse=True)
def the_same_in_any_order() -> Iterator[None]:
    """Each test begins as if it were the only one.

    Fresh modules draw from torch's generator. And on a processor without bf16, torch's first product in it turns
    oneDNN off for the whole process, so that later sums end in other bits.
    """
    torch.manual_seed(0)
    enabled = torch._C._get_mkldnn_enabled()
    yield
    torch._C._set_mkldnn_enabled(enabled)
