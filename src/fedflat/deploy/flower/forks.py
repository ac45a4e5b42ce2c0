"""A SuperExec whose tasks are forks of one process that has imported everything they need."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Mapping
from typing import Any

from flwr.supercore.constant import TASK_TYPE_TO_APPIO_API_ADDRESS_ARG, TASK_TYPE_TO_COMMAND, TaskType
from flwr.supercore.superexec import run_superexec as superexec
from flwr.supercore.superexec.executor.subprocess_executor import SubprocessExecutor
from flwr.supercore.superexec.executor.types import ExecutionSpec, LaunchResult
from flwr.supercore.tls import get_client_tls_args

ENTRY_POINTS = {
    TaskType.CLIENT_APP: "flwr.supernode.cli:flwr_clientapp",
    TaskType.SERVER_APP: "flwr.superlink.cli:flwr_serverapp",
}
"""What Flower's commands call."""
PRELOADED = ("fedflat.deploy.site.app", "fedflat.deploy.server.app", "numpy.ma", "numpy.random")
"""numpy would import the last two lazily, and so again in every fork."""
POLL = 0.2
"""Seconds between attempts to reach a SuperNode or SuperLink that is not up yet."""
FORK = multiprocessing.get_context("fork")


class ForkExecutor(SubprocessExecutor):
    """Runs a task in a fork of this process instead of a new process."""

    def launch(self, spec: ExecutionSpec) -> LaunchResult:
        """Start a task."""
        task = TaskType(spec.task_type)
        if task not in ENTRY_POINTS:
            return super().launch(spec)
        command = [
            TASK_TYPE_TO_COMMAND[task],
            TASK_TYPE_TO_APPIO_API_ADDRESS_ARG[task],
            spec.runtime_api_address,
            "--token",
            spec.token,
        ]
        command += get_client_tls_args(spec.insecure, spec.root_certificates_path)
        if spec.parent_pid is not None:
            command += ["--parent-pid", str(spec.parent_pid)]
        FORK.Process(target=_run_task, args=(ENTRY_POINTS[task], command)).start()
        return LaunchResult.accepted()


def serve(addresses: Mapping[str, str | None]) -> None:
    """Handle the tasks of Runtime APIs: address -> certificate of its authority, or None without TLS."""
    for name in PRELOADED:
        importlib.import_module(name)
    for entry_point in ENTRY_POINTS.values():
        _load(entry_point)
    servers = [FORK.Process(target=_serve, args=(*pair, os.getpid())) for pair in addresses.items()]
    for server in servers:
        server.start()
    for server in servers:
        server.join()


def _serve(address: str, root_certificates: str | None, parent: int) -> None:
    """Handle the tasks of one SuperNode or SuperLink for as long as the parent process lives."""
    if not _wait_until_open(address, parent):
        return
    superexec.get_executor = lambda *args, **kwargs: ForkExecutor()
    superexec.run_superexec(address, root_certificates is None, root_certificates, parent_pid=parent)


def _wait_until_open(address: str, parent: int) -> bool:
    """Poll until the port accepts (Flower's retry backs off); False once the parent process is gone."""
    host, _, port = address.rpartition(":")
    while os.getppid() == parent:
        try:
            socket.create_connection((host, int(port)), 1).close()
            return True
        except OSError:
            time.sleep(POLL)
    return False


def _run_task(entry_point: str, command: list[str]) -> None:
    sys.argv = command
    _load(entry_point)()


def _load(entry_point: str) -> Any:
    module, name = entry_point.split(":")
    return getattr(importlib.import_module(module), name)
