"""One Ray in this process for all tests of clusters, four workers' worth of it, and one cluster of several nodes beside it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from fedflat.engines.ray.cluster import LOCAL

from .nodes import Nodes, nodes

for name, value in LOCAL.items():  # before Ray is imported anywhere
    os.environ.setdefault(name, value)


@pytest.fixture(scope="session")
def ray() -> Iterator[Any]:
    ray = pytest.importorskip("ray", reason='Ray is not installed (pip install "fedflat[ray]")')
    from fedflat.engines.ray import worker_pool as ray_crew

    # A machine busy with other tests starts workers slowly, and these tests count on every one of them.
    ray_crew.ENOUGH = ray_crew.STARTING
    if not ray.is_initialized():
        ray.init(
            address="local",
            num_cpus=4,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            object_store_memory=200_000_000,
        )
    yield ray
    ray_crew.close_crew()
    ray.shutdown()


@pytest.fixture(scope="session")
def cluster() -> Iterator[Nodes]:
    pytest.importorskip("ray", reason='Ray is not installed (pip install "fedflat[ray]")')
    with nodes() as made:
        yield made
