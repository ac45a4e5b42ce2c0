"""A SuperExec that is warm: torch, fedflat and Flower are imported once, and each message is worked on by a fork of it.

Flower starts a new Python process for every message, which costs some seconds of computing each time. With
``flower-supernode --isolation process`` (or ``flower-superlink --isolation process``) something else may start these processes, and
``python -m fedflat.deploy.warm HOST:PORT ...`` does, for one or several nodes of one machine, at the addresses of their Runtime API.
For a SuperLink with TLS it is ``--tls HOST:PORT ca.crt``.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import re
import socket
import sys
import time
from typing import Any

from flwr.supercore.constant import TASK_TYPE_TO_APPIO_API_ADDRESS_ARG, TASK_TYPE_TO_COMMAND, TaskType
from flwr.supercore.superexec import run_superexec as superexec
from flwr.supercore.superexec.executor.subprocess_executor import SubprocessExecutor
from flwr.supercore.superexec.executor.types import ExecutionSpec, LaunchResult
from flwr.supercore.tls import get_client_tls_args

from fedflat.deploy.flower import require_flower
from fedflat.errors import UserError

ENTRIES = {TaskType.CLIENT_APP: "flwr.supernode.cli:flwr_clientapp", TaskType.SERVER_APP: "flwr.superlink.cli:flwr_serverapp"}
"""What Flower's own commands call."""
PRELOADED = ("fedflat.deploy.client", "fedflat.deploy.server", "sklearn.datasets")
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
        command = [TASK_TYPE_TO_COMMAND[task], TASK_TYPE_TO_APPIO_API_ADDRESS_ARG[task], spec.runtime_api_address, "--token", spec.token]
        command += get_client_tls_args(spec.insecure, spec.root_certificates_path)
        if spec.parent_pid is not None:
            command += ["--parent-pid", str(spec.parent_pid)]
        FORK.Process(target=_work, args=(ENTRIES[task], command)).start()
        return LaunchResult.accepted()


def _work(entry: str, command: list[str]) -> None:
    sys.argv = command
    _found(entry)()


def _found(entry: str) -> Any:
    module, name = entry.split(":")
    return getattr(importlib.import_module(module), name)


def _serve(address: str, root_certificates: str | None) -> None:
    """Wait for the tasks of one SuperNode or SuperLink on this machine."""
    _until_open(address)
    superexec.get_executor = lambda *some, **more: Forks()
    superexec.run_superexec(address, root_certificates is None, root_certificates, parent_pid=os.getppid())


def _until_open(address: str) -> None:
    """Wait until somebody listens: Flower's own tries to connect lie further and further apart."""
    host, _, port = address.rpartition(":")
    while True:
        try:
            socket.create_connection((host, int(port)), 1).close()
            return
        except OSError:
            time.sleep(POLL)


def main(arguments: list[str]) -> None:
    """Serve the Runtime APIs at some addresses, until the process ends."""
    require_flower()
    asked = _parser().parse_args(arguments)
    addresses: dict[str, str | None] = {**dict.fromkeys(asked.addresses), **dict(asked.tls)}
    if not addresses or not all(re.fullmatch(r".+:\d+", address) for address in addresses):
        raise UserError("expected the addresses of Runtime APIs, as in: python -m fedflat.deploy.warm 127.0.0.1:8100 127.0.0.1:8101")
    for name in PRELOADED:
        importlib.import_module(name)
    for entry in ENTRIES.values():
        _found(entry)
    servers = [FORK.Process(target=_serve, args=pair) for pair in addresses.items()]
    for server in servers:
        server.start()
    for server in servers:
        server.join()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m fedflat.deploy.warm", description="Works on the tasks of SuperNodes and of a SuperLink.")
    parser.add_argument("addresses", nargs="*", metavar="HOST:PORT", help="a Runtime API of this machine")
    parser.add_argument("--tls", nargs=2, action="append", default=[], metavar=("HOST:PORT", "CA"), help="one with TLS, and who signed it")
    return parser


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as mistake:
        sys.exit(f"fedflat: {mistake}")
