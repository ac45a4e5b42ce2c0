"""The Ray cluster that an experiment runs on: this machine, or one that is there already."""

from __future__ import annotations

import importlib
import math
import os
import socket
from typing import Any, Literal

from fedflat.engines.cpu.worker_pool import available_cores
from fedflat.errors import UserError

OLDEST = (2, 40)
"""The oldest version of Ray that is used."""
PATIENCE = 5.0
"""Seconds after which an address that does not answer is given up."""
INSTALL = 'pip install "fedflat[ray]"'
SILENCE = {
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # what Ray means to do, said so that it does not warn
    "RAY_IGNORE_UNHANDLED_ERRORS": "1",  # what one worker says of a mistake is told, and the others say the same
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",  # what Ray says of lost nodes goes to stdout, where documents go
}
"""Ray's own settings, read when it is imported."""
LOCAL = {
    "RAY_worker_niceness": "0",  # workers are what the machine is for, and Ray would let everything else go first
    "RAY_max_direct_call_object_size": "4000000",  # bytes of an answer that comes by itself, and not by way of the object store
    "RAY_enable_metrics_collection": "0",
    "RAY_task_events_report_interval_ms": "0",
    "RAY_enable_timeline": "0",
    "RAY_event_stats": "0",
}
"""Settings of a Ray that is started for one run: on one machine the shortest way is best, and nobody looks at what it would note down."""

Device = Literal["cpu", "cuda"]


def ray_module(what: str = "engine.name=ray") -> Any:
    """Ray itself, where it is installed and new enough for ``what`` needs it."""
    _set(SILENCE)
    try:
        ray = importlib.import_module("ray")
    except ImportError:
        raise UserError(f"{what} needs Ray, which is not installed; install it with: {INSTALL}") from None
    if version_of(ray.__version__) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise UserError(
            f"Ray {ray.__version__} is too old, and {oldest} or newer is needed; update it with: {INSTALL} --upgrade"
        )
    return ray


def _set(settings: dict[str, str]) -> None:
    for name, value in settings.items():
        os.environ.setdefault(name, value)


def version_of(text: str) -> tuple[int, ...]:
    """The first two numbers of a version.

    >>> version_of("2.40.1rc0"), version_of("3.0.0.dev0")
    ((2, 40), (3, 0))
    """
    return tuple(int("".join(filter(str.isdigit, part)) or 0) for part in text.split(".")[:2])


def connect(address: str | None, workers: int | None, what: str = "engine.name=ray") -> Any:
    """Ray, connected to the cluster at an address, or to one started on this machine for as long as this process lives."""
    if address is None:
        _set(LOCAL)
    ray = ray_module(what)
    if ray.is_initialized():
        there = str(ray.get_runtime_context().gcs_address)
        if address not in (None, "auto") and not same_place(str(address), there):
            raise UserError(
                f"this process is connected to the Ray cluster at {there} already; for ray_address={address} start a new process"
            )
        return ray
    quiet = {"include_dashboard": False} if address is None else {}
    cpus = {"num_cpus": max(workers or 0, available_cores())} if address is None else {}
    if address is not None:
        check_address(address)
    try:
        ray.init(address=address or "local", log_to_driver=False, logging_level="ERROR", **quiet, **cpus)
    except (ConnectionError, RuntimeError, ValueError, TimeoutError, ray.exceptions.RayError) as error:
        raise (
            not_let_in(address, error) if address else UserError(f"Ray cannot be started here: {first_line(error)}")
        ) from None
    return ray


def same_place(one: str, other: str) -> bool:
    """Whether two addresses are of one cluster, as far as names and loopback can tell.

    >>> same_place("127.0.0.1:6379", "10.0.0.1:6379"), same_place("10.0.0.2:6379", "10.0.0.1:6379"), same_place("10.0.0.1:1", "10.0.0.1:2")
    (True, False, False)
    """
    (host, _, port), (other_host, _, other_port) = one.rpartition(":"), other.rpartition(":")
    try:
        numbers = {socket.gethostbyname(host), socket.gethostbyname(other_host)}
    except OSError:
        return False
    return port == other_port and (len(numbers) == 1 or any(number.startswith("127.") for number in numbers))


def check_address(address: str) -> None:
    """Refuse an address at which nothing listens, at once instead of after Ray's own minute."""
    if address == "auto":
        return
    if "://" in address:
        raise UserError(
            f"ray_address={address} is for Ray's remote client; run fedflat on a node of the cluster, with its HOST:PORT or auto"
        )
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise UserError(f"ray_address={address} is no address; expected HOST:PORT, for example 10.0.0.1:6379, or auto")
    try:
        socket.create_connection((host, int(port)), timeout=PATIENCE).close()
    except (OSError, OverflowError) as error:
        raise unreachable(address, error) from None


def unreachable(address: str, error: Exception) -> UserError:
    """No cluster answers."""
    if address == "auto":
        return UserError("ray_address=auto finds no Ray cluster on this machine; start one with: ray start --head")
    return UserError(
        f"no Ray cluster answers at {address} ({first_line(error)}); start one there with ray start --head, or mend ray_address"
    )


def not_let_in(address: str, error: Exception) -> UserError:
    """Something listens, and does not take this process in."""
    if address == "auto":
        return unreachable(address, error)
    return UserError(
        f"what listens at {address} does not take this process in ({first_line(error)}); where it is a Ray cluster that asks for a token, "
        "set RAY_AUTH_MODE=token here and have its token in ~/.ray, otherwise mend ray_address"
    )


def first_line(error: BaseException) -> str:
    """An error in a few words."""
    return (str(error) or type(error).__name__).splitlines()[0].rstrip(".")


def device_for(ray: Any, wanted: str) -> Device:
    """Where workers train: on GPUs where the cluster has some, unless the CPU is asked for."""
    gpus = ray.cluster_resources().get("GPU", 0)
    if wanted == "cuda" and gpus < 1:
        raise UserError(
            "engine.device=cuda was asked for, but no node of the Ray cluster has a GPU; use engine.device=cpu, or add a node that has one"
        )
    return "cuda" if wanted != "cpu" and gpus >= 1 else "cpu"


def workers_for(ray: Any, wanted: int | None, device: Device) -> int:
    """How many workers there are to be: one per GPU or core, unless others are asked for; several can share a GPU, and none a core."""
    there = ray.cluster_resources()
    cores = int(there.get("CPU", 0))
    if wanted is None:
        return max(1, int(there.get("GPU", 0)) if device == "cuda" else cores)
    if wanted > cores:
        raise UserError(
            f"engine.workers={wanted} is more than the {cores} cores of the Ray cluster; lower it or add nodes"
        )
    return wanted


def gpus_each(ray: Any, workers: int) -> float:
    """What a worker gets of a GPU: all, unless there are more workers than GPUs."""
    return 1 / math.ceil(max(1.0, workers / int(ray.cluster_resources()["GPU"])))
