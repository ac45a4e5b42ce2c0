"""Fixture: one local Ray with four cores for all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from fedflat.engines.ray.cluster import LOCAL_CLUSTER_VARIABLES

from .nodes import FEW_PROCESSES

for name, value in LOCAL_CLUSTER_VARIABLES.items():  # before Ray is imported
    os.environ.setdefault(name, value)


FOUR_CORES = {"num_cpus": 4, "object_store_memory": 200_000_000, **FEW_PROCESSES}


@pytest.fixture(scope="session")
def ray() -> Iterator[Any]:
    ray = pytest.importorskip("ray", reason='Ray is not installed (pip install "fedflat[ray]")')
    from ray.cluster_utils import Cluster

    from fedflat.engines.ray import worker_pool

    # Wait longer for workers: a busy machine starts them slowly, and the tests need all of them.
    worker_pool.EXTRA_TIMEOUT = worker_pool.START_TIMEOUT
    cluster = Cluster(initialize_head=True, head_node_args=FOUR_CORES)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    yield ray
    worker_pool.close_worker_pool()
    ray.shutdown()
    cluster.shutdown()
