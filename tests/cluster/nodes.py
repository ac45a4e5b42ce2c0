"""A cluster of several nodes on this machine, each a raylet of its own, in a process of its own that does what it is told by lines."""

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

LOOKS = {"RAY_health_check_initial_delay_ms": "300", "RAY_health_check_period_ms": "300"}
"""How often a cluster looks whether its nodes are there; one that is gone says so at once, and a slow one has as much time as ever."""
NODE = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": 100_000_000}


@contextmanager
def python(*command: str) -> Iterator[subprocess.Popen[str]]:
    """A Python process that is ended, with all of its group, however a test ends."""
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


def said(process: subprocess.Popen[str], told: str = "") -> str:
    """The next line that a process says, after it was told something."""
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    process.stdin.write(told)
    process.stdin.flush()
    line = process.stdout.readline().strip()
    assert line, process.stderr.read()[-2000:]
    return line


class Nodes:
    """The cluster as a test sees it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.address = said(process)

    @contextmanager
    def another(self, **environment: str) -> Iterator[None]:
        """A further node with one core, with some environment variables of its own, for as long as a test lasts."""
        self._tell(json.dumps(environment))
        try:
            yield
        finally:
            self._tell("remove")

    def await_task(self, task: str) -> None:
        """Wait until the node that was added last works on a task of this name."""
        self._tell(f"await {task}")

    def kill(self, task: str) -> None:
        """Kill the node that was added last, with all of its processes, in the middle of a task of this name."""
        self._tell(f"kill {task}")

    def _tell(self, line: str) -> None:
        assert said(self._process, line + "\n") == "done"


@contextmanager
def nodes() -> Iterator[Nodes]:
    """A cluster with one node of one core, to which others can be added."""
    with python(__file__) as process:
        made = Nodes(process)
        try:
            yield made
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(60)


# --- the process that has them ----------------------------------------------------------------------------------------------------


def serve() -> None:
    os.environ.update(LOOKS)
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
            what, task = line.split()
            await_task(added[-1], task)
            if what == "kill":
                kill(cluster, added.pop())
        print("done", flush=True)
    cluster.shutdown()


def raylet_of(node: Any) -> int:
    return int(node.all_processes["raylet"][0].process.pid)


def await_task(node: Any, task: str) -> None:
    while not any(title.startswith(f"ray::{task}") for title in children(raylet_of(node)).values()):
        time.sleep(0.05)


def kill(cluster: Any, node: Any) -> None:
    """As if the machine were unplugged: Ray's own processes and the workers at once."""
    for process in (raylet_of(node), *children(raylet_of(node))):
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    cluster.remove_node(node, allow_graceful=False)
    cluster.wait_for_nodes()


def children(process: int) -> dict[int, str]:
    """The processes that a process has begun, and what they call themselves."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if int((path / "stat").read_text().rpartition(")")[2].split()[1]) == process:
                found[int(path.name)] = (path / "cmdline").read_text().replace("\0", " ").strip()
    return found


if __name__ == "__main__":
    serve()
