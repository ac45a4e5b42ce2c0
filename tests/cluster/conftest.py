"""Fixtures: one local Ray with four cores for all tests, and a cluster of several nodes in another process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from fedflat.engines.ray.cluster import LOCAL_CLUSTER_VARIABLES

from .nodes import Nodes, nodes

for name, value in LOCAL_CLUSTER_VARIABLES.items():  # before Ray is imported
    os.environ.setdefault(name, value)


@pytest.fixture(scope="session")
def ray() -> Iterator[Any]:
    ray = pytest.importorskip("ray", reason='Ray is not installed (pip install "fedflat[ray]")')
    from fedflat.engines.ray import worker_pool

    # Wait longer for workers: a busy machine starts them slowly, and the tests need all of them.
    worker_pool.EXTRA_TIMEOUT = worker_pool.START_TIMEOUT
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
    worker_pool.close_worker_pool()
    ray.shutdown()


@pytest.fixture(scope="session")
def cluster() -> Iterator[Nodes]:
    pytest.importorskip("ray", reason='Ray is not installed (pip install "fedflat[ray]")')
    with nodes() as several:
        yield several
