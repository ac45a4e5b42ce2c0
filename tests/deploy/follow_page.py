"""Follow the newcomer's path in docs/deploy.md word for word, in an empty home folder.

python tests/deploy/follow_page.py               with the fedflat and Flower of this Python
python tests/deploy/follow_page.py --install     from scratch: also the installation, with fedflat from this repository

Only ports differ from the page, so that it can be followed while others use those. Commands that the page runs in
separate terminals run in the background.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parents[2]
SECTION = "Quick start: three sites with TLS on one machine"
PORTS = ("8000", "8100", "8101", "8102")
OWN_TERMINAL = ("flower-superlink", "flower-supernode")
INSTALLING = ("python -m venv", ". ", "pip install")
LONG = 600


def commands() -> list[str]:
    """The commands of the section in order."""
    page = (ROOT / "docs" / "deploy.md").read_text()
    section = page.split(f"## {SECTION}\n")[1].split("\n## ")[0]
    blocks = re.findall(r"```console\n(.*?)```", section, re.S)
    return [line.removeprefix("$ ") for block in blocks for line in block.splitlines()]


class Newcomer:
    """A user with a shell in an empty folder."""

    def __init__(self, folder: Path, install: bool) -> None:
        self.folder, self.install = folder, install
        self.ports = {port: str(free_port()) for port in PORTS}
        kept = {
            name: value
            for name, value in os.environ.items()
            if name in ("PATH", "LANG", "PYTHONPATH") or name.startswith("PIP_")
        }
        self.environment = {**kept, "HOME": str(folder), "FLWR_TELEMETRY_ENABLED": "0", "COLUMNS": "140"}
        if not install:
            self.environment["PATH"] = f"{Path(sys.executable).parent}:{kept['PATH']}"
        self.terminals: list[subprocess.Popen[bytes]] = []

    def follow(self, command: str) -> None:
        """Execute a command of the page."""
        if command.startswith(INSTALLING) and not self.install:
            return
        for port, other in self.ports.items():
            command = re.sub(rf"\b{port}\b", other, command)
        command = command.replace("'fedflat[flower]'", f"-c {ROOT / 'constraints.txt'} '{ROOT}[flower]'")
        print(f"$ {command}", flush=True)
        if command.startswith(OWN_TERMINAL):
            self._start(command)
        else:
            subprocess.run(self._shell(command), check=True, cwd=self.folder, env=self.environment, timeout=LONG)

    def _shell(self, command: str) -> list[str]:
        activated = f". .venv/bin/activate; {command}" if (self.folder / ".venv").exists() else command
        return ["bash", "-c", activated]

    def _start(self, command: str) -> None:
        link = command.startswith("flower-superlink")
        command = f"exec {command} --port {self.ports['8000']}" if link else f"exec {command}"
        with (self.folder / f"terminal-{len(self.terminals)}.log").open("wb") as log:
            started = subprocess.Popen(
                self._shell(command),
                cwd=self.folder,
                env=self.environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.terminals.append(started)
        if link:
            until_open(int(self.ports["8000"]))

    def leave(self) -> None:
        """Close all terminals."""
        for terminal in self.terminals:
            with suppress(ProcessLookupError):
                os.killpg(terminal.pid, signal.SIGKILL)
            terminal.wait()


def free_port() -> int:
    """A free port."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def until_open(port: int) -> None:
    """Wait up to two minutes for a server to listen."""
    for _ in range(600):
        with suppress(OSError):
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        time.sleep(0.2)
    raise SystemExit(f"nobody listens on port {port}")


def main(install: bool) -> None:
    """Follow the page to its end and check that the run is finished."""
    with tempfile.TemporaryDirectory(prefix="newcomer-") as folder:
        newcomer = Newcomer(Path(folder), install)
        try:
            for command in commands():
                newcomer.follow(command)
        finally:
            newcomer.leave()
            for log in sorted(Path(folder).glob("terminal-*.log")):
                print(f"--- {log.name}\n{log.read_text()[-1500:]}")
        status = json.loads((Path(folder) / "runs" / "hospital" / "status.json").read_text())["status"]
        print(f"followed to the end; the run is {status}")
        if status != "finished":
            raise SystemExit(1)


if __name__ == "__main__":
    main("--install" in sys.argv[1:])
