"""A real federation on this machine: a SuperLink and SuperNodes as processes, on free ports, all ended in every case."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fedflat.experiment.folder import RunFolder
from fedflat.experiment.stopping import OVER

BIN = Path(sys.executable).parent


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
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.3",
            "OMP_NUM_THREADS": "1",
        }
        (folder / "flwr").mkdir(parents=True)
        text = f'[superlink]\ndefault = "sites"\n\n[superlink.sites]\naddress = "127.0.0.1:{self.port}"\ninsecure = true\n'
        (folder / "flwr" / "config.toml").write_text(text)

    def start_link(self) -> None:
        here = ["--insecure", "--disable-runtime-dependency-installation", "--isolation", "process", "--port", str(self.port)]
        self._start("superlink", ["flower-superlink", *here])
        self._until_open()

    def start_simulation(self) -> None:
        """A SuperLink that simulates its nodes itself."""
        here = ["--insecure", "--simulation", "--disable-runtime-dependency-installation", "--port", str(self.port)]
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
        def answers() -> bool:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
            except OSError:
                return False
            return True

        self.until(answers, 60)

    def start_run(self, project: Path, settings: dict[str, Any]) -> str:
        """``flwr run``, which hands the run over and returns; what it printed. To stream logs as well costs a core."""
        command = ["flwr", "run", str(project), "sites", "--run-config", toml(settings)]
        done = subprocess.run(command, check=False, env=self.environment, cwd=self.folder, capture_output=True, text=True, timeout=60)
        return done.stdout + done.stderr

    def run(self, project: Path, settings: dict[str, Any], timeout: float = 120) -> str:
        """``flwr run``, and wait until the run is over; what it printed."""
        printed = self.start_run(project, settings)
        out = RunFolder(Path(settings["deploy.out"]))
        last = "sites.json" if settings.get("deploy.score", True) else "status.json"
        self.until(lambda: out.exists and out.status()["status"] in OVER and (out.path / last).exists(), timeout)
        return printed

    def until(self, happened: Callable[[], bool], timeout: float) -> None:
        """Wait for something."""
        end = time.monotonic() + timeout
        while not happened():
            if time.monotonic() > end:
                raise TimeoutError(self.log("warm") + self.log("superlink")[-2000:])
            time.sleep(0.2)

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def kill(self, name: str) -> None:
        """SIGKILL for a process and all that it started."""
        process = self.processes.pop(name)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def kill_server_of(self, out: Path) -> None:
        """SIGKILL for the ServerApp that works on a run: the process which holds its config."""
        for process in Path("/proc").glob("[0-9]*"):
            try:
                holds = any(link.readlink() == out / "config.yaml" for link in (process / "fd").iterdir())
            except OSError:
                continue
            if holds:
                os.kill(int(process.name), signal.SIGKILL)
                return
        raise AssertionError(f"nobody works on {out}")

    def close(self) -> None:
        for name in list(self.processes):
            self.kill(name)


def toml(settings: dict[str, Any]) -> str:
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
