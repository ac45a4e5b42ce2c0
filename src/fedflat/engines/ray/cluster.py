"""The Ray cluster that an experiment runs on: one started on this machine, or an existing one."""

from __future__ import annotations

import importlib
import math
import os
import socket
import time
from typing import Any, Literal

from fedflat.errors import MachineFailed, UserError, first_line
from fedflat.operating_system import KEEPS_FREED_MEMORY
from fedflat.processes import available_cores

OLDEST_VERSION = (2, 40)
"""Oldest supported version of Ray."""
CONNECT_TIMEOUT = 5.0
"""Seconds to wait for an address to answer."""
HEAD_TIMEOUT = 6.0
"""Seconds without an answer after which the head is considered lost; longer than one attempt to connect."""
INSTALL = 'pip install "fedflat[ray]"'
QUIET_VARIABLES = {
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # Ray's future default, set to silence its warning
    "RAY_IGNORE_UNHANDLED_ERRORS": "1",  # the first error is reported; the other workers repeat it
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",  # Ray reports lost nodes on stdout, which is for results
}
"""Environment variables that Ray reads when it is imported."""
LOCAL_CLUSTER_VARIABLES = {
    "RAY_worker_niceness": "0",  # Ray would otherwise give workers the lowest priority
    "RAY_max_direct_call_object_size": "4000000",  # bytes of an answer that may bypass the object store
    "RAY_enable_metrics_collection": "0",
    "RAY_task_events_report_interval_ms": "0",
    "RAY_enable_timeline": "0",
    "RAY_event_stats": "0",
    **KEEPS_FREED_MEMORY,
}
"""Environment variables of a Ray cluster that is started for one run: fast messages, and no unused metrics."""

Device = Literal["cpu", "cuda"]


def ray_module(purpose: str = "engine.name=ray") -> Any:
    """Import Ray; raises ``UserError`` if it is missing or too old.

    Args:
        purpose: the setting or command that needs Ray, for the error message.
    """
    _set_defaults(QUIET_VARIABLES)
    try:
        ray = importlib.import_module("ray")
    except ImportError:
        raise UserError(f"{purpose} needs Ray, which is not installed; install it with: {INSTALL}") from None
    if parse_version(ray.__version__) < OLDEST_VERSION:
        oldest = ".".join(map(str, OLDEST_VERSION))
        raise UserError(
            f"Ray {ray.__version__} is too old; expected {oldest} or newer; update it with: {INSTALL} --upgrade"
        )
    return ray


def _set_defaults(variables: dict[str, str]) -> None:
    for name, value in variables.items():
        os.environ.setdefault(name, value)


def parse_version(text: str) -> tuple[int, ...]:
    """Major and minor version as integers; later parts are ignored.

    >>> parse_version("2.40.1rc0"), parse_version("3.0.0.dev0")
    ((2, 40), (3, 0))
    """
    return tuple(int("".join(filter(str.isdigit, part)) or 0) for part in text.split(".")[:2])


def connect(address: str | None, workers: int | None, purpose: str = "engine.name=ray") -> Any:
    """Connect to a Ray cluster, or start one, and return the Ray module.

    Args:
        address: HOST:PORT of a cluster or ``auto``; None starts one on this machine for the lifetime of this process.
        workers: number of workers for which a new cluster must have room. It gets one CPU per worker, but at least one
            per core of this machine; None gives it one per core.
        purpose: the setting or command that needs Ray, for error messages.
    """
    if address is None:
        _set_defaults(LOCAL_CLUSTER_VARIABLES)
    ray = ray_module(purpose)
    if ray.is_initialized():
        current = str(ray.get_runtime_context().gcs_address)
        if address not in (None, "auto") and not is_same_cluster(str(address), current):
            raise UserError(
                f"this process is already connected to the Ray cluster at {current}; "
                f"start a new process for ray_address={address}"
            )
        return ray
    options: dict[str, Any] = {}
    if address is None:
        options = {"include_dashboard": False, "num_cpus": max(workers or 0, available_cores())}
    else:
        check_address(address)
    try:
        ray.init(address=address or "local", log_to_driver=False, logging_level="ERROR", **options)
    except (ConnectionError, RuntimeError, ValueError, TimeoutError, ray.exceptions.RayError) as error:
        if address is None:
            raise UserError(f"Ray cannot be started on this machine: {first_line(error)}") from None
        raise _rejected(address, error) from None
    return ray


def is_same_cluster(address: str, other_address: str) -> bool:
    """Whether two addresses HOST:PORT belong to one cluster: same port, and same host or one of them loopback.

    A loopback address (127.x.x.x) means this machine, which the other address may name by its network address.

    >>> is_same_cluster("127.0.0.1:6379", "10.0.0.1:6379"), is_same_cluster("10.0.0.2:6379", "10.0.0.1:6379")
    (True, False)
    >>> is_same_cluster("10.0.0.1:1", "10.0.0.1:2"), is_same_cluster("a..b:1", "10.0.0.1:1")
    (False, False)
    """
    host, _, port = address.rpartition(":")
    other_host, _, other_port = other_address.rpartition(":")
    try:
        ip, other_ip = socket.gethostbyname(host), socket.gethostbyname(other_host)
    except (OSError, UnicodeError):  # a name such as a..b is malformed
        return False
    return port == other_port and (ip == other_ip or ip.startswith("127.") or other_ip.startswith("127."))


def check_address(address: str) -> None:
    """Raise ``UserError`` at once if nothing listens at an address; Ray would take a minute to notice."""
    if address == "auto":
        return
    if "://" in address:
        raise UserError(
            f"ray_address={address} is for Ray's remote client; "
            "run fedflat on a node of the cluster, with its HOST:PORT or auto"
        )
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise UserError(f"ray_address={address} is invalid; expected HOST:PORT, for example 10.0.0.1:6379, or auto")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT).close()
    except (OSError, OverflowError, UnicodeError) as error:
        raise _unreachable(address, error) from None


def check_head(ray: Any, address: str, advice: str) -> None:
    """Raise ``MachineFailed`` if the head of the cluster is lost; Ray would abort this process after a minute.

    Args:
        ray: the Ray module, connected to the cluster; it is disconnected if the head is lost.
        address: HOST:PORT of the head, for which a disconnected Ray cannot be asked.
        advice: what the user can do, for the error message.
    """
    end = time.monotonic() + HEAD_TIMEOUT
    while True:
        try:
            return check_address(address)
        except UserError:
            if time.monotonic() > end:
                ray.shutdown()  # otherwise Ray tries for a minute to report the error to the head, and then aborts
                raise MachineFailed(f"the head of the Ray cluster, {address}, no longer answers; {advice}") from None
        time.sleep(HEAD_TIMEOUT / 10)


def _unreachable(address: str, error: Exception) -> MachineFailed:
    """The error for an address where no cluster answers."""
    if address == "auto":
        return MachineFailed("ray_address=auto finds no Ray cluster on this machine; start one with: ray start --head")
    return MachineFailed(
        f"no Ray cluster answers at {address} ({first_line(error)}); "
        "start one there with ray start --head, or correct ray_address"
    )


def _rejected(address: str, error: Exception) -> UserError:
    """The error for an address where a server answers but refuses this process."""
    if address == "auto":  # Ray tried an address that it had recorded, where the server is no longer a Ray cluster
        return _unreachable(address, error)
    return UserError(
        f"the server at {address} rejects the connection ({first_line(error)}); if it is a Ray cluster that requires a "
        "token, set RAY_AUTH_MODE=token and put its token into ~/.ray, otherwise correct ray_address"
    )


def choose_device(ray: Any, requested: str) -> Device:
    """The device that workers train on: GPUs if the cluster has some, unless ``requested`` is ``cpu``.

    Args:
        ray: the connected Ray module.
        requested: ``cpu``, ``cuda`` or ``auto``.
    """
    gpus = ray.cluster_resources().get("GPU", 0)
    if requested == "cuda" and gpus < 1:
        raise UserError(
            "engine.device=cuda, but no node of the Ray cluster has a GPU; use engine.device=cpu or add such a node"
        )
    return "cuda" if requested != "cpu" and gpus >= 1 else "cpu"


def choose_workers(ray: Any, requested: int | None, device: Device) -> int:
    """Number of workers: by default one per GPU or core. Several may share a GPU, but not a core.

    Args:
        ray: the connected Ray module.
        requested: the number that the user wants; None for the default.
        device: what the workers train on.
    """
    resources = ray.cluster_resources()
    cores = int(resources.get("CPU", 0))
    if requested is None:
        return max(1, int(resources.get("GPU", 0)) if device == "cuda" else cores)
    if requested > cores:
        raise UserError(
            f"engine.workers={requested} is more than the {cores} cores of the Ray cluster; lower it or add nodes"
        )
    return requested


def gpus_per_worker(ray: Any, workers: int) -> float:
    """Share of a GPU for each worker: a whole one unless there are more workers than GPUs."""
    return 1 / math.ceil(max(1.0, workers / int(ray.cluster_resources()["GPU"])))
