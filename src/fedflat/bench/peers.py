"""Other simulators: what to install, with which Python, and how their processes are started and measured."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import socket
import subprocess
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import ClassVar

import fedflat
from fedflat.bench.contender_process import PATIENCE, Contender, ContenderProcess, Failed, RoundTimes
from fedflat.bench.machine import cpu_seconds, kill_group
from fedflat.bench.setting import BenchmarkSetting
from fedflat.operating_system import descendants, kill_processes

FOLDER_VARIABLE = "FEDFLAT_BENCH_FOLDER"
"""Environment variable of a simulator's processes: the folder with its description and the socket to report to."""
SIMULATOR_FILE = "simulator.json"
POLLING_SECONDS = 0.2
MAX_LOG_CHARACTERS = 300
HANG_SECONDS = 120.0
"""A simulator whose processes are idle for this many seconds counts as hung."""
MIN_CPU_SHARE = 0.05
"""Processes that together use a smaller share of one core are idle, unless one of them starts or ends."""


@dataclass(frozen=True)
class Simulator(Contender):
    """Another simulator in its own environment, used as its documentation recommends.

    The module ``fedflat.bench.drivers.<key>`` has a function ``run(simulator)``, which trains with it.
    """

    environment: Path = Path()
    """Virtual environment with the simulator."""
    key: ClassVar[str]
    """Name on the command line, and of the driver's module."""
    requirements: ClassVar[tuple[str, ...]]
    packages: ClassVar[tuple[str, ...]]
    """Packages whose versions are reported."""
    pythons: ClassVar[tuple[int, int]] = (11, 13)
    """First and last minor version of Python 3 that the simulator supports."""
    pausable: ClassVar[bool] = True
    """Whether its processes can be suspended between turns; False if they expect heartbeats of each other."""
    threads: ClassVar[int | None] = None
    """OpenMP threads of each of its processes; None: one per core."""


class Flower(Simulator):
    """Flower's simulation runtime, started by ``flwr run``, with one Ray worker per core."""

    name = key = "flower"
    requirements = ("flwr[simulation]",)
    packages = ("flwr", "ray")
    pausable = False


class Pfl(Simulator):
    """pfl-research's FederatedAveraging on a SimulatedBackend, with one ``torchrun`` process per core or GPU."""

    name, key = "pfl-research", "pfl"
    requirements = ("pfl[pytorch]",)
    packages = ("pfl",)
    pythons = (10, 12)


class FedJax(Simulator):
    """FedJAX's federated_averaging, compiled by XLA, which uses all cores."""

    name = key = "fedjax"
    requirements = ("fedjax", "jax<0.6")  # the last release, 0.0.17, calls jax.tree_map, which later versions lack
    packages = ("fedjax", "jax")


class BlazeFL(Simulator):
    """BlazeFL's FedAvg with a pool of one process per core and shared memory."""

    name = key = "blazefl"
    requirements = ("blazefl[contrib,reproducibility]",)
    packages = ("blazefl",)
    pythons = (12, 14)
    threads = 1  # with more, its workers hang on ARM: they are forked and lack the threads of their parent


class NVFlare(Simulator):
    """NVFlare's FedAvgRecipe in its simulator, SimEnv, with all clients in every round."""

    name = key = "nvflare"
    requirements = ("nvflare",)
    packages = ("nvflare",)
    pausable = False


class Fluke(Simulator):
    """fluke's FedAVG, one client after another in one process."""

    name = key = "fluke"
    requirements = ("fluke-fl",)
    packages = ("fluke-fl",)


SIMULATORS: dict[str, type[Simulator]] = {
    simulator.key: simulator for simulator in (Flower, Pfl, FedJax, BlazeFL, NVFlare, Fluke)
}


class SimulatorProcess(ContenderProcess):
    """A simulator's driver in its own environment.

    The process of the simulator that knows when a round ends connects to this object's socket and reports it.
    """

    contender: Simulator

    def __init__(self, contender: Simulator) -> None:
        self.contender = contender
        self._folder = Path(tempfile.mkdtemp(prefix="fedflat-bench-"))
        write_simulator(contender, self._folder)
        # The environment has the simulator, but not fedflat: the driver uses the package of this process.
        (self._folder / "fedflat").symlink_to(Path(fedflat.__file__).parent)
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(self._folder / "socket"))
        self._socket.listen()
        self._socket.settimeout(POLLING_SECONDS)
        self._connection: Connection | None = None
        self._process: subprocess.Popen[bytes] | None = None  # started with its first round, as part of its set-up
        self._started: dict[int, str] = {}  # known descendants of the driver, which cannot be listed after its end

    @property
    def pid(self) -> int:
        """The process id of the driver, which starts with the first round."""
        if self._process is None:
            raise RuntimeError("the driver has not been started")
        return self._process.pid

    def _start(self) -> subprocess.Popen[bytes]:
        """Start the driver."""
        variables = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
        variables |= {FOLDER_VARIABLE: str(self._folder), "PYTHONPATH": str(self._folder)}
        commands = self.contender.environment / "bin"
        variables["PATH"] = f"{commands}{os.pathsep}{os.environ.get('PATH', '')}"
        if self.contender.threads is not None:
            variables["OMP_NUM_THREADS"] = str(self.contender.threads)
        self._start_time = time.perf_counter()
        with (self._folder / "log").open("wb") as log:
            return subprocess.Popen(
                [commands / "python", "-m", "fedflat.bench.drivers", str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=variables,
                cwd=self._folder,
                start_new_session=True,
            )

    def pause(self) -> None:
        if self.contender.pausable:
            super().pause()

    def start_rounds(self, count: int) -> None:
        self._requested = count
        if self._process is None:
            self._process = self._start()

    def wait_for_rounds(self) -> RoundTimes | Failed:
        """Wait for the rounds that were started; the first round includes the start of the simulator's processes."""
        is_first = self._connection is None
        self._checked, self._activity = time.perf_counter(), self._current_activity()
        try:
            if self._connection is None:
                self._connection = self._accept()
            self._connection.send(self._requested)
            while not self._connection.poll(POLLING_SECONDS):
                self._check_running()
            times: RoundTimes = self._connection.recv()
        except (ConnectionError, EOFError):
            failure = Failed(self._reason())
        except TimeoutError:
            failure = Failed(
                f"its processes used almost no CPU time for {HANG_SECONDS:.0f} seconds, so it seems to hang; measure "
                "again, or leave it out of --against"
            )
        else:
            return times._replace(seconds=[time.perf_counter() - self._start_time]) if is_first else times
        self._kill()  # its processes would disturb the other contenders
        return failure

    def _accept(self) -> Connection:
        """Wait for the simulator's process that reports rounds; raises as :meth:`_check_running` does."""
        while True:
            try:
                accepted, _ = self._socket.accept()
            except TimeoutError:
                self._check_running()
            else:
                accepted.setblocking(True)
                return Connection(accepted.detach())

    def _check_running(self) -> None:
        """Raise a ``ConnectionError`` if the driver has exited, and a ``TimeoutError`` if its processes hang."""
        if self._process is None or self._process.poll() is not None:
            raise ConnectionError
        elapsed = time.perf_counter() - self._checked
        if elapsed >= HANG_SECONDS:
            before, self._activity = self._activity, self._current_activity()
            self._checked += elapsed
            used_seconds = self._activity[0] - before[0]
            if self._activity[1] == before[1] and used_seconds < MIN_CPU_SHARE * elapsed:
                raise TimeoutError

    def _current_activity(self) -> tuple[float, dict[int, str]]:
        """The CPU time of all processes so far, infinite if unknown, and the processes that the driver has started."""
        seconds, running = cpu_seconds(self.pid), descendants(self.pid)
        self._started |= running
        return math.inf if seconds is None else seconds, running

    def _reason(self) -> str:
        """Return why the simulator stopped: its last exception, else logged error, else line of output.

        The process that reported rounds may have ended before the driver, which then writes the error.
        """
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(PATIENCE)
        text = re.sub(r"\x1b\[[0-9;]*m", "", (self._folder / "log").read_text(errors="replace"))  # without colours
        lines = [line.strip() for line in text.splitlines()]
        lines = [line for line in lines if re.search("[a-z]", line)] or ["stopped early"]
        exceptions = [line for line in lines if re.match(r"[\w.]*(Error|Exception): ", line)]
        logged = [line.partition(" - ERROR - ")[2] for line in lines if " - ERROR - " in line]
        return (exceptions or logged or lines)[-1][:MAX_LOG_CHARACTERS]

    def end(self) -> None:
        """End the simulator, kill what is left of its processes, and delete its folder."""
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            self._started |= descendants(self._process.pid)
            self._process.terminate()  # the end of a round, or of the simulator, could take long
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(PATIENCE)
            self._kill()
        self._socket.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _kill(self) -> None:
        """Kill the driver and the processes that it has started."""
        if self._process is not None:
            self._started |= descendants(self._process.pid)
            self._process.kill()  # first, so that it does not start more
            self._process.wait()
            kill_processes(self._started)
            kill_group(self._process.pid)


def write_simulator(simulator: Simulator, folder: Path) -> None:
    """Write what a driver needs to know into ``folder``; as JSON, because the driver's version of Python may differ."""
    setting = asdict(simulator.setting)
    setting["device"] = "cuda" if simulator.setting.on_gpu else "cpu"  # the simulator's torch may support other devices
    setting["data_dir"] = None if simulator.setting.data_dir is None else str(simulator.setting.data_dir.absolute())
    (folder / SIMULATOR_FILE).write_text(
        json.dumps({"key": simulator.key, "clients": simulator.clients, "setting": setting})
    )


def read_simulator(folder: Path) -> Simulator:
    """Read the simulator that ``write_simulator`` wrote into ``folder``."""
    content = json.loads((folder / SIMULATOR_FILE).read_text())
    setting = content["setting"]
    if setting["data_dir"] is not None:
        setting["data_dir"] = Path(setting["data_dir"])
    return SIMULATORS[content["key"]](BenchmarkSetting(**setting), clients=content["clients"])
