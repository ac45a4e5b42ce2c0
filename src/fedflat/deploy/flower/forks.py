"""A SuperExec whose tasks are forks of one process that has imported everything they need."""

from __future__ import annotations

import importlib
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

from fedflat.deploy.flower.address import host_and_port
from fedflat.operating_system import fork_context
from fedflat.processes import end_with_parent

ENTRY_POINTS = {
    TaskType.CLIENT_APP: "flwr.supernode.cli:flwr_clientapp",
    TaskType.SERVER_APP: "flwr.superlink.cli:flwr_serverapp",
}
"""The functions that Flower's commands call, as ``module:name``, by type of task."""
PRELOADED = ("fedflat.deploy.site.app", "fedflat.deploy.server.app", "numpy.ma", "numpy.random")
"""Modules imported before forking. numpy imports the last two lazily, so every fork would import them again."""
POLL = 0.2
"""Seconds between attempts to reach a SuperNode or SuperLink that is not up yet."""


class ForkExecutor(SubprocessExecutor):
    """Runs a task in a fork of this process instead of a new process."""

    def launch(self, spec: ExecutionSpec) -> LaunchResult:
        """Start a task (a ServerApp or ClientApp) with the command line that Flower would give to a new process."""
        task = TaskType(spec.task_type)
        if task not in ENTRY_POINTS:  # another kind of task: start a new process, as Flower does
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
        fork_context("ForkExecutor").Process(target=_run_task, args=(ENTRY_POINTS[task], command)).start()
        return LaunchResult.accepted()


def serve_addresses(addresses: Mapping[str, str | None]) -> None:
    """Handle the tasks of several SuperNodes or SuperLinks, each in a fork of this process, until they end.

    ``addresses`` maps the HOST:PORT of each one's Runtime API to the path of its authority's certificate, or to None
    without TLS.
    """
    fork = fork_context("fedflat.deploy.flower.warm")
    # Import everything before forking, so that no fork has to.
    for name in PRELOADED:
        importlib.import_module(name)
    for entry_point in ENTRY_POINTS.values():
        _load(entry_point)
    processes = [
        fork.Process(target=_serve_address, args=(address, root_certificates, os.getpid()))
        for address, root_certificates in addresses.items()
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


def _serve_address(address: str, root_certificates: str | None, parent: int) -> None:
    """Handle the tasks of one SuperNode or SuperLink; ends with the process ``parent``."""
    end_with_parent()
    _wait_until_open(address)
    print(f"Handling the tasks of {address}.", flush=True)
    # Flower has no option for the executor, so replace the function that returns it.
    superexec.get_executor = lambda *args, **kwargs: ForkExecutor()
    superexec.run_superexec(address, root_certificates is None, root_certificates, parent_pid=parent)


def _wait_until_open(address: str) -> None:
    """Poll until the port accepts connections: Flower would retry at growing intervals, and so notice the port late."""
    while True:
        try:
            socket.create_connection(host_and_port(address), 1).close()
            return
        except OSError:
            time.sleep(POLL)


def _run_task(entry_point: str, command: list[str]) -> None:
    """Call the entry point of a Flower command as if ``command`` had been typed."""
    end_with_parent()
    sys.argv = command
    _load(entry_point)()


def _load(entry_point: str) -> Any:
    """Import the object that "module:name" refers to."""
    module, name = entry_point.split(":")
    return getattr(importlib.import_module(module), name)
