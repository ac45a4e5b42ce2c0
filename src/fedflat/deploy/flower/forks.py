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

ENTRIES = {
    TaskType.CLIENT_APP: "flwr.supernode.cli:flwr_clientapp",
    TaskType.SERVER_APP: "flwr.superlink.cli:flwr_serverapp",
}
"""What Flower's own commands call."""
PRELOADED = ("fedflat.deploy.site.app", "fedflat.deploy.server.app", "numpy.ma", "numpy.random")
"""The last two numpy would import at their first use, and so anew in every fork."""
POLL = 0.2
"""Seconds between looks for a SuperNode or SuperLink that is not there yet."""
FORK = multiprocessing.get_context("fork")


class Forks(SubprocessExecutor):
    """Works on a task in a fork of this process instead of a new one."""

    def launch(self, spec: ExecutionSpec) -> LaunchResult:
        """Start on a task."""
        task = TaskType(spec.task_type)
        if task not in ENTRIES:
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
        FORK.Process(target=_work, args=(ENTRIES[task], command)).start()
        return LaunchResult.accepted()


def serve(addresses: Mapping[str, str | None]) -> None:
    """Work on the tasks of the Runtime APIs at these addresses, each with the authority that signed it or without TLS."""
    for name in PRELOADED:
        importlib.import_module(name)
    for entry in ENTRIES.values():
        _found(entry)
    servers = [FORK.Process(target=_serve, args=(*pair, os.getpid())) for pair in addresses.items()]
    for server in servers:
        server.start()
    for server in servers:
        server.join()


def _serve(address: str, root_certificates: str | None, parent: int) -> None:
    """Wait for the tasks of one SuperNode or SuperLink on this machine, as long as the process that began it lives."""
    if not _opened(address, parent):
        return
    superexec.get_executor = lambda *some, **more: Forks()
    superexec.run_superexec(address, root_certificates is None, root_certificates, parent_pid=parent)


def _opened(address: str, parent: int) -> bool:
    """Wait until somebody listens, since Flower's own tries to connect lie further and further apart; false once nobody waits any more."""
    host, _, port = address.rpartition(":")
    while os.getppid() == parent:
        try:
            socket.create_connection((host, int(port)), 1).close()
            return True
        except OSError:
            time.sleep(POLL)
    return False


def _work(entry: str, command: list[str]) -> None:
    sys.argv = command
    _found(entry)()


def _found(entry: str) -> Any:
    module, name = entry.split(":")
    return getattr(importlib.import_module(module), name)
