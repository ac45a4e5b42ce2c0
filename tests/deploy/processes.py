"""A real federation on this machine: a SuperLink and SuperNodes as processes, on free ports, all ended in every case."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flwr.app.user_config import UserConfig

BIN = Path(sys.executable).parent
HERE = Path(__file__).parent


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class RealFederation:
    """The processes of a federation; each in a session of its own, so that it ends with all that it started."""

    def __init__(self, folder: Path, nodes: int) -> None:
        self.folder, self.port = folder, free_port()
        self.node_ports = [free_port() for _ in range(nodes)]
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        source = Path(__file__).parents[2] / "src"
        self.environment = {
            **os.environ,
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "PYTHONPATH": str(source),
            "FLWR_HOME": str(folder / "flwr"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
            "OMP_NUM_THREADS": "1",
        }
        (folder / "flwr").mkdir(parents=True)
        text = f'[superlink]\ndefault = "sites"\n\n[superlink.sites]\naddress = "127.0.0.1:{self.port}"\ninsecure = true\n'
        (folder / "flwr" / "config.toml").write_text(text)

    def start_link(self) -> None:
        here = ["--insecure", "--disable-runtime-dependency-installation", "--isolation", "process", "--port", str(self.port)]
        self._start("superlink", ["flower-superlink", *here])
        self._until_open()

    def start_warm(self, name: str, ports: list[int]) -> None:
        """What works on messages, started once."""
        self._start(name, [sys.executable, "-m", "fedflat.deploy.warm", *(f"127.0.0.1:{port}" for port in ports)])

    def start_node(self, number: int) -> None:
        where = f'partition-id={number} state="{self.folder / f"node-{number}"}"'
        here = ["--port", str(self.node_ports[number]), "--isolation", "process", "--node-config", where]
        self._start(f"node-{number}", ["flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{self.port}", *here])

    def _start(self, name: str, command: list[str]) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                command, env=self.environment, cwd=self.folder, stdout=log, stderr=log, start_new_session=True
            )

    def _until_open(self) -> None:
        until = time.monotonic() + 30
        while time.monotonic() < until:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            except OSError:
                time.sleep(0.1)
        raise TimeoutError(self.log("superlink"))

    def run(self, project: Path, settings: dict[str, Any], timeout: float = 120) -> str:
        """``flwr run``, until the run is over; what it printed."""
        done = subprocess.run(
            ["flwr", "run", str(project), "sites", "--stream", "--run-config", toml(settings)],
            env=self.environment, cwd=self.folder, capture_output=True, text=True, timeout=timeout,
        )  # fmt: skip
        return done.stdout + done.stderr

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def kill(self, name: str) -> None:
        """SIGKILL for a process and all that it started."""
        process = self.processes.pop(name)
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()

    def close(self) -> None:
        for name in list(self.processes):
            self.kill(name)


def toml(settings: UserConfig | dict[str, Any]) -> str:
    def value(one: Any) -> str:
        return str(one).lower() if isinstance(one, bool) else f'"{one}"' if isinstance(one, str) else repr(one)

    return " ".join(f"{key}={value(one)}" for key, one in settings.items())


@contextmanager
def real_federation(folder: Path, nodes: int) -> Iterator[RealFederation]:
    federation = RealFederation(folder, nodes)
    try:
        federation.start_warm("warm", [federation.port, *federation.node_ports])
        federation.start_link()
        for number in range(nodes):
            federation.start_node(number)
        yield federation
    finally:
        federation.close()
