"""A cluster of several raylets on this machine, in a separate process that reads commands from stdin."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

HEALTH_CHECKS = {"RAY_health_check_initial_delay_ms": "300", "RAY_health_check_period_ms": "300"}
"""Check nodes often, so that tests need not wait; a slow node has as much time to answer as ever."""
FEW_PROCESSES = {"include_dashboard": False, "no_monitor": True, "include_log_monitor": False}
"""Options of a node without the processes that tests do not need, which take seconds to start."""
NODE = {"num_cpus": 1, "object_store_memory": 100_000_000, **FEW_PROCESSES}

PATIENCE = 300
"""Seconds until a task must have begun or ended."""


@contextmanager
def python(*command: str) -> Iterator[subprocess.Popen[str]]:
    """A Python process; its whole process group is killed at the end of the test."""
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, *command], text=True, start_new_session=True, **pipes)
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


def said(process: subprocess.Popen[str], message: str = "") -> str:
    """Send a message to a process and read its next line."""
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    process.stdin.write(message)
    process.stdin.flush()
    line = process.stdout.readline().strip()
    assert line, process.stderr.read()[-2000:]
    return line


class Nodes:
    """Handle on the cluster's process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.address = said(process)

    @contextmanager
    def another(self, **environment: str) -> Iterator[None]:
        """Add a node with one core and some environment variables, for the duration of the context."""
        self._tell(json.dumps(environment))
        try:
            yield
        finally:
            self._tell("remove")

    def kill(self, task: str) -> None:
        """Kill the last node and all of its processes while it runs a task of this name."""
        self._tell(f"kill {task}")

    def await_end(self, task: str) -> None:
        """Wait until the newest node runs no task of this name; those of a killed driver end a little later."""
        self._tell(f"await_end {task}")

    def kill_head(self, task: str) -> None:
        """Kill the first node and Ray's head on it while it runs a task of this name; the cluster is then lost."""
        self._tell(f"kill_head {task}")

    def _tell(self, line: str) -> None:
        assert said(self._process, line + "\n") == "done"


@contextmanager
def nodes() -> Iterator[Nodes]:
    """A cluster with one node of one core."""
    with python(__file__) as process:
        cluster = Nodes(process)
        try:
            yield cluster
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(60)


def serve() -> None:
    os.environ.update(HEALTH_CHECKS)
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args=NODE)
    print(cluster.address, flush=True)
    added: list[Any] = []
    for line in sys.stdin:
        if line.startswith("{"):
            added.append(cluster.add_node(**NODE, env_vars=json.loads(line)))
        elif line.startswith("remove"):
            while added:
                kill(cluster, added.pop())
        else:
            command, task = line.split()
            await_task((added or [cluster.head_node])[-1], task, runs=command != "await_end")
            if command == "kill":
                kill(cluster, added.pop())
            elif command == "kill_head":
                kill_processes(cluster.head_node)
        print("done", flush=True)
    if cluster.head_node.any_processes_alive():
        cluster.shutdown()


def raylet_of(node: Any) -> int:
    return int(node.all_processes["raylet"][0].process.pid)


def await_task(node: Any, task: str, runs: bool) -> None:
    deadline = time.monotonic() + PATIENCE
    while runs != any(title.startswith(f"ray::{task}") for title in children(raylet_of(node)).values()):
        assert time.monotonic() < deadline, children(raylet_of(node))
        time.sleep(0.05)


def kill(cluster: Any, node: Any) -> None:
    """Kill a node as a power failure would, and wait until the head has noticed."""
    kill_processes(node)
    cluster.remove_node(node, allow_graceful=False)
    cluster.wait_for_nodes()


def kill_processes(node: Any) -> None:
    """Kill Ray's processes and the workers of a node at once."""
    started = [each.process.pid for several in node.all_processes.values() for each in several]
    for process in (*started, *children(raylet_of(node))):
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def children(process: int) -> dict[int, str]:
    """Child processes of a process: process id -> title."""
    titles = {}
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if int((path / "stat").read_text().rpartition(")")[2].split()[1]) == process:
                titles[int(path.name)] = (path / "cmdline").read_text().replace("\0", " ").strip()
    return titles


if __name__ == "__main__":
    serve()
