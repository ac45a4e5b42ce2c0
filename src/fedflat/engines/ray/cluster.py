"""The Ray cluster that an experiment runs on: one started on this machine, or an existing one."""

from __future__ import annotations

import importlib
import math
import os
import socket
from typing import Any, Literal

from fedflat.errors import UserError
from fedflat.processes import available_cores

OLDEST = (2, 40)
"""Oldest supported version of Ray."""
PATIENCE = 5.0
"""Seconds after which an address that does not answer is given up."""
INSTALL = 'pip install "fedflat[ray]"'
SILENCE = {
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # Ray's future default, set to silence its warning
    "RAY_IGNORE_UNHANDLED_ERRORS": "1",  # the first error is reported; the other workers repeat it
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",  # Ray reports lost nodes on stdout, which is for results
}
"""Environment variables that Ray reads when it is imported."""
LOCAL = {
    "RAY_worker_niceness": "0",  # Ray would otherwise give workers the lowest priority
    "RAY_max_direct_call_object_size": "4000000",  # bytes of an answer that may bypass the object store
    "RAY_enable_metrics_collection": "0",
    "RAY_task_events_report_interval_ms": "0",
    "RAY_enable_timeline": "0",
    "RAY_event_stats": "0",
}
"""Environment variables of a Ray that is started for one run: shortest paths, and no metrics that nobody reads."""

Device = Literal["cpu", "cuda"]


def ray_module(purpose: str = "engine.name=ray") -> Any:
    """The Ray module; raises ``UserError`` if it is missing or too old. ``purpose`` names what needs it."""
    _set_defaults(SILENCE)
    try:
        ray = importlib.import_module("ray")
    except ImportError:
        raise UserError(f"{purpose} needs Ray, which is not installed; install it with: {INSTALL}") from None
    if version_of(ray.__version__) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise UserError(
            f"Ray {ray.__version__} is too old; expected {oldest} or newer; update it with: {INSTALL} --upgrade"
        )
    return ray


def _set_defaults(variables: dict[str, str]) -> None:
    for name, value in variables.items():
        os.environ.setdefault(name, value)


def version_of(text: str) -> tuple[int, ...]:
    """Major and minor version.

    >>> version_of("2.40.1rc0"), version_of("3.0.0.dev0")
    ((2, 40), (3, 0))
    """
    return tuple(int("".join(filter(str.isdigit, part)) or 0) for part in text.split(".")[:2])


def connect(address: str | None, workers: int | None, purpose: str = "engine.name=ray") -> Any:
    """The Ray module, connected to a cluster.

    Args:
        address: HOST:PORT of a cluster or ``auto``; None starts one on this machine for the lifetime of this process.
        workers: workers that a new cluster must have cores for.
        purpose: what needs Ray, for error messages.
    """
    if address is None:
        _set_defaults(LOCAL)
    ray = ray_module(purpose)
    if ray.is_initialized():
        current = str(ray.get_runtime_context().gcs_address)
        if address not in (None, "auto") and not same_place(str(address), current):
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
        raise rejected(address, error) from None
    return ray


def same_place(one: str, other: str) -> bool:
    """Whether two addresses belong to one cluster, as far as host names and loopback tell.

    >>> same_place("127.0.0.1:6379", "10.0.0.1:6379"), same_place("10.0.0.2:6379", "10.0.0.1:6379")
    (True, False)
    >>> same_place("10.0.0.1:1", "10.0.0.1:2")
    False
    """
    (host, _, port), (other_host, _, other_port) = one.rpartition(":"), other.rpartition(":")
    try:
        numbers = {socket.gethostbyname(host), socket.gethostbyname(other_host)}
    except OSError:
        return False
    return port == other_port and (len(numbers) == 1 or any(number.startswith("127.") for number in numbers))


def check_address(address: str) -> None:
    """Reject an address where nothing listens at once; Ray would take a minute."""
    if address == "auto":
        return
    if "://" in address:
        raise UserError(
            f"ray_address={address} is for Ray's remote client; "
            "run fedflat on a node of the cluster, with its HOST:PORT or auto"
        )
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise UserError(f"ray_address={address} is invalid; expected HOST:PORT, for example 10.0.0.1:6379, or auto")
    try:
        socket.create_connection((host, int(port)), timeout=PATIENCE).close()
    except (OSError, OverflowError) as error:
        raise unreachable(address, error) from None


def unreachable(address: str, error: Exception) -> UserError:
    """The error for an address where no cluster answers."""
    if address == "auto":
        return UserError("ray_address=auto finds no Ray cluster on this machine; start one with: ray start --head")
    return UserError(
        f"no Ray cluster answers at {address} ({first_line(error)}); "
        "start one there with ray start --head, or correct ray_address"
    )


def rejected(address: str, error: Exception) -> UserError:
    """The error for an address where something listens that does not accept this process."""
    if address == "auto":
        return unreachable(address, error)
    return UserError(
        f"the server at {address} rejects the connection ({first_line(error)}); if it is a Ray cluster that requires a "
        "token, set RAY_AUTH_MODE=token and put its token into ~/.ray, otherwise correct ray_address"
    )


def first_line(error: BaseException) -> str:
    """First line of an error's message, or the name of its class."""
    return (str(error) or type(error).__name__).splitlines()[0].rstrip(".")


def device_for(ray: Any, wanted: str) -> Device:
    """Where workers train: on GPUs if the cluster has some, unless ``wanted`` is ``cpu``."""
    gpus = ray.cluster_resources().get("GPU", 0)
    if wanted == "cuda" and gpus < 1:
        raise UserError(
            "engine.device=cuda, but no node of the Ray cluster has a GPU; use engine.device=cpu or add such a node"
        )
    return "cuda" if wanted != "cpu" and gpus >= 1 else "cpu"


def workers_for(ray: Any, wanted: int | None, device: Device) -> int:
    """Number of workers: by default one per GPU or core. Several may share a GPU, but not a core."""
    resources = ray.cluster_resources()
    cores = int(resources.get("CPU", 0))
    if wanted is None:
        return max(1, int(resources.get("GPU", 0)) if device == "cuda" else cores)
    if wanted > cores:
        raise UserError(
            f"engine.workers={wanted} is more than the {cores} cores of the Ray cluster; lower it or add nodes"
        )
    return wanted


def gpus_each(ray: Any, workers: int) -> float:
    """Share of a GPU for each worker: a whole one unless there are more workers than GPUs."""
    return 1 / math.ceil(max(1.0, workers / int(ray.cluster_resources()["GPU"])))
