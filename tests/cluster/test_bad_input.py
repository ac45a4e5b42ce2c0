"""Errors of the Ray engine say what is wrong and what to do."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fedflat
from fedflat.engines.ray import cluster as ray_cluster
from fedflat.engines.ray.cluster import (
    check_address,
    choose_device,
    choose_workers,
    connect,
    gpus_per_worker,
    ray_module,
)
from fedflat.engines.ray.worker import check_facts, problem_facts
from fedflat.engines.ray.worker_pool import WorkerPool
from fedflat.errors import UserError
from fedflat.experiment.campaign.ray_sweep import UnfitNode, run_on_node
from fedflat.experiment.setup.problem import build_problem

from .federations import engine_of, small


def test_ray_is_not_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The import of fedflat without Ray is tested in tests/test_import.py."""
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=r'engine\.name=ray.*pip install "fedflat\[ray\]"'):
        fedflat.run("fedavg", rounds=1, engine="ray")
    with pytest.raises(UserError, match=r'ray_address.*pip install "fedflat\[ray\]"'):
        fedflat.sweep({"grid": {"seed": [0, 1]}, "ray_address": "auto"}, out=tmp_path)


def test_ray_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    old = SimpleNamespace(__version__="2.9.3")
    monkeypatch.setattr(importlib, "import_module", lambda name: old)
    with pytest.raises(UserError, match=r"2\.9\.3.*2\.40.*pip install .* --upgrade"):
        ray_module()


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("127.0.0.1:1", r"127\.0\.0\.1:1 \(.*refused\).*ray start"),
        ("nowhere.invalid:6379", "nowhere.invalid:6379"),
        ("127.0.0.1:99999", "127.0.0.1:99999"),
        ("10.0.0..1:6379", r"10\.0\.0\.\.1:6379 \(.*correct ray_address"),
        ("10.0.0.1:²", "10.0.0.1:².*HOST:PORT"),
        ("elsewhere", "elsewhere.*HOST:PORT"),
        ("ray://10.0.0.1:10001", "remote client"),
    ],
)
def test_unreachable_ray_addresses_are_reported(address: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_address(address)


class NoToken(Exception):
    """Stands in for Ray's error."""


@pytest.mark.parametrize(
    "error", [ConnectionError("Failed to connect to Ray cluster at 10.0.0.1:6379"), NoToken("no token was found")]
)
def test_a_cluster_that_asks_for_a_token(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray sends its token to a named address only if told to."""

    def init(**settings: Any) -> None:
        raise error

    strict = SimpleNamespace(is_initialized=lambda: False, init=init, exceptions=SimpleNamespace(RayError=NoToken))
    monkeypatch.setattr(ray_cluster, "ray_module", lambda purpose: strict)
    monkeypatch.setattr(ray_cluster, "check_address", lambda address: None)
    with pytest.raises(UserError, match=r"10\.0\.0\.1:6379.*RAY_AUTH_MODE=token"):
        connect("10.0.0.1:6379", 2)


def test_a_cluster_without_what_is_asked_for(ray: Any) -> None:
    connected = connect(None, 2)
    assert connected is ray
    with pytest.raises(UserError, match="no node of the Ray cluster has a GPU"):
        choose_device(ray, "cuda")
    assert choose_device(ray, "auto") == "cpu"
    assert choose_workers(ray, None, "cpu") == 4
    with pytest.raises(UserError, match=r"engine\.workers=64.* 4 cores"):
        choose_workers(ray, 64, "cpu")


def test_a_node_with_another_version_refuses_a_run_of_a_sweep() -> None:
    with pytest.raises(UnfitNode, match=r"fedflat 0\.\d+\.\d+, not 9\.9\.9.*every node"):
        run_on_node("9.9.9", b"cannot be unpickled")


def test_workers_that_never_start_end_the_run() -> None:
    def lost(_: object) -> None:
        raise ActorLost("The actor died because its class cannot be imported")

    errors = SimpleNamespace(
        RayTaskError=NoToken,
        **dict.fromkeys(
            ("RayActorError", "ObjectLostError", "WorkerCrashedError", "NodeDiedError", "OutOfMemoryError"), ActorLost
        ),
    )
    actor = SimpleNamespace(identify=SimpleNamespace(remote=object))
    empty: Any = SimpleNamespace(
        exceptions=errors,
        get_runtime_context=lambda: SimpleNamespace(get_job_id=lambda: "job", gcs_address=""),
        remote=lambda **_: lambda _: SimpleNamespace(remote=lambda: actor),
        wait=lambda refs, **_: (refs[:1], refs[1:]),
        get=lost,
        kill=lambda _: None,
    )
    with pytest.raises(UserError, match=r"do not start \(The actor died.*every node"):
        WorkerPool(empty, 2, "cpu").wait_for_all()


class ActorLost(Exception):
    """Stands in for Ray's error."""


def test_a_node_with_other_data() -> None:
    known = problem_facts(build_problem(small())[0])
    check_facts(known, known)
    with pytest.raises(UserError, match=r"training examples.*\(\d+ instead of 3\)"):
        check_facts(known, {**known, "training examples": 3})


def test_an_error_in_a_worker_is_raised_in_the_driver(ray: Any) -> None:
    engine = engine_of(small(), 2)
    with pytest.raises(KeyError, match="no such set"):
        engine.pool.map("evaluate", [([model_arrays(engine)], [(0, "no such set", [0])])], engine._source)
    assert engine.pool.lost == 0 or engine.pool.process_ids


def model_arrays(engine: Any) -> Any:
    weights, buffers, integer_buffers = engine.problem.initial_state()
    return torch.cat([weights, buffers]).numpy(), {name: value.numpy() for name, value in integer_buffers.items()}


@pytest.mark.parametrize(
    ("wanted", "workers", "each"), [(None, 2, 1.0), (1, 1, 1.0), (2, 2, 1.0), (3, 3, 0.5), (5, 5, 1 / 3)]
)
def test_more_workers_than_gpus_share_them(wanted: int | None, workers: int, each: float) -> None:
    two: Any = SimpleNamespace(cluster_resources=lambda: {"CPU": 8.0, "GPU": 2.0})
    assert choose_workers(two, wanted, choose_device(two, "auto")) == workers
    assert gpus_per_worker(two, workers) == each
    with pytest.raises(UserError, match=r"engine\.workers=9.* 8 cores"):
        choose_workers(two, 9, "cuda")


def test_a_process_keeps_its_connection_to_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    context = SimpleNamespace(gcs_address="10.0.0.1:6379")
    connected = SimpleNamespace(is_initialized=lambda: True, get_runtime_context=lambda: context)
    monkeypatch.setattr(ray_cluster, "ray_module", lambda purpose: connected)
    assert all(ray_cluster.connect(address, None) is connected for address in (None, "auto", "10.0.0.1:6379"))
    with pytest.raises(UserError, match=r"10\.0\.0\.1:6379.*ray_address=10\.0\.0\.2:6379"):
        ray_cluster.connect("10.0.0.2:6379", None)
