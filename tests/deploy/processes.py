"""A real federation on this machine: SuperLink and SuperNodes as processes on free ports, always cleaned up."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from fedflat.deploy.trust.certificates import write_certificates
from fedflat.experiment.store.run_folder import RunFolder

from ..time_limits import scaled
from .proxy import Proxy

BIN = Path(sys.executable).parent
SUPERNODE = Path(__file__).parent / "fast_supernode.py"
STARTER = "supernodes"
"""Name of the process that starts the nodes."""


def free_port() -> int:
    """A free port below those of outgoing connections, which could take it before it is used."""
    while True:
        port = 20_000 + secrets.randbelow(12_000)
        with socket.socket() as found, suppress(OSError):
            found.bind(("127.0.0.1", port))
            return port


class SuperNode:
    """A node that ``fast_supernode.py`` has started, with the methods of ``subprocess.Popen`` that tests use."""

    def __init__(self, starter: subprocess.Popen[bytes], log: Path, arguments: list[str]) -> None:
        self._starter = starter
        self._code: int | None = None
        self.pid: int = self._ask([str(log), *arguments])

    def _ask(self, request: Any) -> Any:
        assert self._starter.stdin is not None and self._starter.stdout is not None
        self._starter.stdin.write(json.dumps(request).encode() + b"\n")
        self._starter.stdin.flush()
        return json.loads(self._starter.stdout.readline())

    def wait(self, timeout: float = 60) -> int:
        """Wait until the node has ended and return its exit code."""
        end = time.monotonic() + scaled(timeout)
        while self._code is None:
            assert time.monotonic() < end, "the node still runs"
            self._code = self._ask(self.pid)
            time.sleep(0.05)
        return self._code


class RealFederation:
    """The processes of a federation, each in its own session, so that its children end with it.

    Every site has a key and is in the list of sites. With ``tls``, the SuperLink has a certificate, admits only
    registered keys and is behind a gateway, to which each node connects through its own proxy. ``stranger`` is the
    public key of a further node, which is registered, but not in the list of sites.
    """

    def __init__(self, folder: Path, nodes: int, tls: bool = False, stranger: Path | None = None) -> None:
        self.stranger = stranger
        self.folder, self.port, self.tls, self.gateway_port = folder, free_port(), tls, free_port()
        self.certificates = folder / "certificates"
        write_certificates(self.certificates, ["127.0.0.1"], nodes, days=1)
        self.site_list = self.certificates / "sites.txt"
        self.proxies = [Proxy(self.gateway_port) for _ in range(nodes)] if tls else []
        self.node_ports = [free_port() for _ in range(nodes + (stranger is not None))]
        self.processes: dict[str, subprocess.Popen[bytes] | SuperNode] = {}
        source = Path(__file__).parents[2] / "src"
        self.environment = {
            **os.environ,
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "PYTHONPATH": str(source),
            "FLWR_HOME": str(folder / "flwr"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.5",
            "OMP_NUM_THREADS": "1",
        }
        (folder / "flwr").mkdir(parents=True)
        trust = f'root-certificates = "{self.certificates / "ca.crt"}"' if tls else "insecure = true"
        text = f'[superlink]\ndefault = "sites"\n\n[superlink.sites]\naddress = "127.0.0.1:{self.port}"\n{trust}\n'
        (folder / "flwr" / "config.toml").write_text(text)

    def start_link(self) -> None:
        """Start the SuperLink; with TLS, register the keys of all sites."""
        here = ["--disable-runtime-dependency-installation", "--isolation", "process", "--port", str(self.port)]
        here += ["--database", str(self.folder / "superlink.db")]
        self._start("superlink", ["flower-superlink", *here, *self._link_trust()])
        self._until_open(self.port)
        if self.tls:
            gateway = [sys.executable, "-m", "fedflat", "deploy", "gateway", str(self.certificates)]
            gateway += ["--superlink", f"127.0.0.1:{self.port}", "--listen", f"127.0.0.1:{self.gateway_port}"]
            self._start("gateway", gateway)
            for key in (*sorted(self.certificates.glob("*.pub")), *([self.stranger] if self.stranger else [])):
                assert self.flwr("supernode", "register", str(key), "sites").exit_code == 0
            self._until_open(self.gateway_port)

    def flwr(self, *command: str) -> Result:
        """Execute a command of Flower's CLI in this process: a new one would need seconds to start."""
        from flwr.cli.app import app  # takes a second, which few tests need

        return CliRunner().invoke(app, command, env=self.environment)

    def _link_trust(self) -> list[str]:
        if not self.tls:
            return ["--insecure"]
        files = {"ca-certfile": "ca.crt", "certfile": "server.pem", "keyfile": "server.key"}
        given = [part for flag, name in files.items() for part in (f"--ssl-{flag}", str(self.certificates / name))]
        return [*given, "--enable-supernode-auth"]

    def start_warm(self) -> None:
        """Start the preloaded SuperExec for the SuperLink and all nodes, also that of the stranger."""
        link, nodes = f"127.0.0.1:{self.port}", [f"127.0.0.1:{port}" for port in self.node_ports]
        link_too = ["--tls", link, str(self.certificates / "ca.crt")] if self.tls else [link]
        self._start("warm", [sys.executable, "-m", "fedflat.deploy.flower.warm", *nodes, *link_too])

    def start_node(
        self,
        number: int,
        name: str = "",
        trust: list[str] | None = None,
        port: int | None = None,
        key: Path | None = None,
    ) -> None:
        """Start a node for a client; another name, certificates or keys make it a stranger."""
        name, key = name or f"node-{number}", key or self.certificates / f"site-{number}.key"
        where = f'partition-id={number} state="{self.folder / name}" key="{key}"'
        link = self.proxies[number].port if self.proxies else self.port
        here = ["--port", str(port or self.node_ports[number]), "--isolation", "process", "--node-config", where]
        trust = self._node_trust(number) if trust is None else trust
        arguments = [*trust, "--superlink", f"127.0.0.1:{link}", *here]
        starter = self.processes.get(STARTER) or self._start(STARTER, [sys.executable, str(SUPERNODE)])
        assert isinstance(starter, subprocess.Popen)
        self.processes[name] = SuperNode(starter, self.folder / f"{name}.log", arguments)

    def _node_trust(self, number: int) -> list[str]:
        if not self.tls:
            return ["--insecure"]
        key = self.certificates / f"site-{number}.key"
        return ["--root-certificates", str(self.certificates / "ca.crt"), "--auth-supernode-private-key", str(key)]

    def _start(self, name: str, command: list[str]) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("ab") as log:
            pipe = subprocess.PIPE if name == STARTER else None
            pipes: dict[str, Any] = {"stdin": pipe, "stdout": pipe or log}
            self.processes[name] = process = subprocess.Popen(
                command, env=self.environment, cwd=self.folder, stderr=log, start_new_session=True, **pipes
            )
        return process

    def _until_open(self, port: int) -> None:
        def answers() -> bool:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
            except OSError:
                return False
            return True

        self.until(answers, 60)

    def start_run(self, project: Path, settings: dict[str, Any], sites: bool = True) -> str:
        """Submit a run with ``flwr run`` and return its output, without streaming logs, which takes a core.

        Args:
            project: folder of the app.
            settings: its run config.
            sites: whether to add the list of sites, which apps of others do not have.
        """
        settings = {"deploy.sites": str(self.site_list), **settings} if sites else settings
        printed = self.flwr("run", str(project), "sites", "--run-config", toml(settings)).output
        assert "started run" in printed, printed
        return printed

    def until(self, happened: Callable[[], bool], timeout: float) -> None:
        """Wait until a condition holds."""
        end = time.monotonic() + scaled(timeout)
        while not happened():
            if time.monotonic() > end or "\nfedflat: " in self.log("warm"):
                raise TimeoutError(self.log("warm") + self.log("superlink")[-2000:])
            time.sleep(0.2)

    def log(self, name: str) -> str:
        """The output of a process; empty if there is none of that name."""
        path = self.folder / f"{name}.log"
        return path.read_text() if path.exists() else ""

    def kill(self, name: str) -> None:
        """Kill a process and its children."""
        process = self.processes.pop(name)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def kill_server_of(self, out: Path) -> None:
        """Kill the ServerApp of a run: the process that holds its lock."""
        locks = {out / ".lock", out / "checkpoint" / ".lock"}
        for process in Path("/proc").glob("[0-9]*"):
            try:
                holds = any(link.readlink() in locks for link in (process / "fd").iterdir())
            except OSError:
                continue
            if holds:
                os.kill(int(process.name), signal.SIGKILL)
                return
        raise AssertionError(f"nobody works on {out}")

    def close(self) -> None:
        for name in reversed(list(self.processes)):  # the nodes before the process that has started them
            self.kill(name)
        for proxy in self.proxies:
            proxy.cut()


def run_number(printed: str) -> str:
    """The number of a run, given the output of ``flwr run``."""
    return printed.split("started run ")[1].split()[0]


def rounds_done(out: Path) -> int:
    """Rounds completed at the last checkpoint."""
    if not (out / "checkpoint" / "state.safetensors").exists():
        return 0
    return int(RunFolder(out).read_tensors("checkpoint/state.safetensors")[1]["rounds"])


def toml(settings: dict[str, Any]) -> str:
    def value(one: Any) -> str:
        return str(one).lower() if isinstance(one, bool) else f'"{one}"' if isinstance(one, str) else repr(one)

    return " ".join(f"{key}={value(one)}" for key, one in settings.items())


@contextmanager
def real_federation(
    folder: Path, nodes: int, tls: bool = False, stranger: Path | None = None
) -> Iterator[RealFederation]:
    federation = RealFederation(folder, nodes, tls, stranger)
    try:
        federation.start_warm()
        federation.start_link()
        for number in range(nodes):
            federation.start_node(number)
        yield federation
    finally:
        federation.close()
