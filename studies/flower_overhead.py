"""Compare the time per round of fedflat's FedAvg on Flower with that of a plain Flower app.

Examples:
    python studies/flower_overhead.py OUT                         # two sites, three turns each, six rounds per turn
    python studies/flower_overhead.py OUT --turns 1 --rounds 3    # quick

Both use the same SuperLink and SuperNodes, task, model and number of local steps. They take turns, so that other load
on the machine affects both. A round lasts from the end of the previous round to its own end, as the server sees it; the
first round of a turn is not counted. OUT/flower_overhead.json holds the numbers.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from fedflat.deploy.flower.project import write_project
from fedflat.deploy.flower.reach import reach
from fedflat.errors import UserError
from fedflat.experiment.store.files import create_folder, write_atomically

BIN = Path(sys.executable).parent
FEDFLAT, FLOWER = "fedflat on Flower", "plain Flower"
PLAIN = {
    "pyproject.toml": """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "plain"
version = "1.0.0"
description = "FedAvg as Flower's documentation writes it."
license = "Apache-2.0"
dependencies = []
[tool.hatch.build.targets.wheel]
packages = ["plain"]
[tool.flwr.app]
publisher = "plain"
[tool.flwr.app.components]
serverapp = "plain.server:app"
clientapp = "plain.client:app"
[tool.flwr.app.config]
rounds = 3
sites = 2
steps = 10
log = ""
""",
    "plain/__init__.py": "",
    "plain/task.py": """\
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import nn

BATCH_SIZE, LR = 10, 0.05


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 200), nn.ReLU(), nn.Linear(200, 10))


def data(site, sites):
    # As fedflat does: importing scikit-learn would take longer than everything else.
    file = Path(find_spec("sklearn").submodule_search_locations[0], "datasets", "data", "digits.csv.gz")
    digits = np.loadtxt(file, dtype=np.uint8, delimiter=",")
    inputs, targets = digits[:, :-1].astype(np.float32) / 16, digits[:, -1].astype(np.int64)
    rows = np.random.default_rng(0).permutation(len(targets))[site::sites]
    return torch.from_numpy(inputs[rows]), torch.from_numpy(targets[rows])


def train(network, inputs, targets, steps):
    torch.set_num_threads(1)
    optimiser = torch.optim.SGD(network.parameters(), lr=LR)
    for step in range(steps):
        batch = torch.randint(len(targets), (BATCH_SIZE,))
        optimiser.zero_grad()
        nn.functional.cross_entropy(network(inputs[batch]), targets[batch]).backward()
        optimiser.step()
""",
    "plain/client.py": """\
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from plain.task import data, model, train

app = ClientApp()


@app.train()
def fit(message: Message, context: Context) -> Message:
    network = model()
    network.load_state_dict(message.content["arrays"].to_torch_state_dict())
    inputs, targets = data(context.node_config["partition-id"], context.run_config["sites"])
    train(network, inputs, targets, context.run_config["steps"])
    content = {"arrays": ArrayRecord(network.state_dict()), "metrics": MetricRecord({"num-examples": len(targets)})}
    return Message(RecordDict(content), reply_to=message)
""",
    "plain/server.py": '''\
from pathlib import Path

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from plain.task import model

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    sites, log = context.run_config["sites"], Path(context.run_config["log"])

    class LoggedFedAvg(FedAvg):
        """FedAvg that writes a line after every round."""

        def aggregate_train(self, server_round, replies):
            combined = super().aggregate_train(server_round, replies)
            with log.open("a") as file:
                file.write(f"{server_round}\\n")
            return combined

    strategy = LoggedFedAvg(fraction_evaluate=0.0, min_train_nodes=sites, min_available_nodes=sites)
    strategy.start(grid=grid, initial_arrays=ArrayRecord(model().state_dict()), num_rounds=context.run_config["rounds"])
''',
}


def parse_arguments(words: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="directory of the numbers and logs")
    parser.add_argument("--sites", type=int, default=2)
    parser.add_argument("--turns", type=int, default=3, help="turns of each (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=6, help="rounds per turn (default: %(default)s)")
    parser.add_argument("--local-steps", type=int, default=10, help="local steps per client (default: %(default)s)")
    return parser.parse_args(words)


def free_port() -> int:
    """An unused TCP port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for_superlink(address: str) -> None:
    """Wait up to a minute until a SuperLink answers."""
    for _ in range(60):
        with suppress(UserError):
            reach(address, insecure=True)
            return
        time.sleep(1)
    raise SystemExit(f"the SuperLink at {address} did not start within a minute")


@contextmanager
def federation(folder: Path, sites: int) -> Iterator[dict[str, str]]:
    """Start a SuperLink and SuperNodes; yields the environment in which ``flwr run`` finds them."""
    port = free_port()
    environment = {
        **os.environ,
        "FLWR_HOME": str(folder / "flwr"),
        "FLWR_TELEMETRY_ENABLED": "0",
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "FEDFLAT_STATE": str(folder / "state"),
    }
    create_folder(folder / "flwr")
    write_atomically(
        folder / "flwr" / "config.toml", f'[superlink.sites]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
    )
    commands = [["flower-superlink", "--insecure", "--disable-runtime-dependency-installation", "--port", str(port)]]
    for site in range(sites):
        address = ["--superlink", f"127.0.0.1:{port}", "--port", str(free_port())]
        commands.append(["flower-supernode", "--insecure", *address, "--node-config", f"partition-id={site}"])
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for number, command in enumerate(commands):
            with (folder / f"{command[0]}-{number}.log").open("wb") as log:
                options: dict[str, Any] = {"env": environment, "cwd": folder, "start_new_session": True}
                processes.append(subprocess.Popen(command, stdout=log, stderr=log, **options))
        wait_for_superlink(f"127.0.0.1:{port}")
        yield environment
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def time_rounds(
    project: Path, log: Path, rounds: int, config: dict[str, Any], environment: dict[str, str]
) -> list[float]:
    """Run an app, and return the seconds of its rounds after the first, from when lines appear in ``log``."""
    text = " ".join(f"{key}={json.dumps(value)}" for key, value in config.items())
    command = ["flwr", "run", str(project), "sites", "--run-config", text]
    subprocess.run(command, check=True, env=environment, cwd=project, stdout=subprocess.DEVNULL, timeout=120)
    ends: list[float] = []
    deadline = time.monotonic() + 60 + 60 * rounds
    while len(ends) < rounds:
        done = log.read_text().count("\n") if log.exists() else 0
        ends += [time.monotonic()] * (done - len(ends))
        if time.monotonic() > deadline:
            raise SystemExit(f"{project.name} did not finish its rounds; see the logs in {project.parent}")
        time.sleep(0.02)
    return [after - before for before, after in pairwise(ends)]


def write_apps(folder: Path, options: argparse.Namespace) -> None:
    """Write the plain app and fedflat's, with the same task."""
    for name, text in PLAIN.items():
        create_folder((folder / "plain" / name).parent)
        write_atomically(folder / "plain" / name, text)
    write_project(folder / "fedflat", "fedavg", options.sites)
    settings = folder / "fedflat" / "pyproject.toml"
    text = settings.read_text()
    for old, new in (("local_epochs = 1", f"local_steps = {options.local_steps}"), ('"dirichlet(alpha=0.5)"', '"iid"')):
        assert old in text
        text = text.replace(old, new)
    write_atomically(settings, f"{text}\n[tool.flwr.app.config.evaluation]\nevery = {options.rounds}\n")


def measure(folder: Path, options: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds per round of both apps, which take turns."""
    write_apps(folder, options)
    rounds, sites = options.rounds, options.sites
    seconds: dict[str, list[float]] = {FEDFLAT: [], FLOWER: []}
    with federation(folder, sites) as environment:
        for number in range(options.turns):
            out, log = folder / f"run-{number}", folder / f"plain-{number}.txt"
            config = {"training.rounds": rounds, "deploy.out": str(out), "deploy.score": False, "deploy.minimum": sites}
            seconds[FEDFLAT] += time_rounds(
                folder / "fedflat", out / "participation.jsonl", rounds, config, environment
            )
            config = {"rounds": rounds, "sites": sites, "steps": options.local_steps, "log": str(log)}
            seconds[FLOWER] += time_rounds(folder / "plain", log, rounds, config, environment)
    return seconds


def main(words: Sequence[str] | None = None) -> None:
    """Measure, print and save the numbers."""
    options = parse_arguments(words)
    folder = options.out.absolute() / f"federation-{os.getpid()}"
    create_folder(folder)
    seconds = measure(folder, options)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    ratio = medians[FEDFLAT] / medians[FLOWER]
    document = json.dumps({"seconds": seconds, "medians": medians, "ratio": ratio}, indent=1)
    write_atomically(options.out / "flower_overhead.json", document + "\n")
    for name, values in seconds.items():
        spread = f"median of {len(values)}, {min(values):.2f} to {max(values):.2f}"
        print(f"{name}: {medians[name]:.2f} s per round ({spread})")
    print(f"fedflat takes {ratio:.2f} times as long as plain Flower")


if __name__ == "__main__":
    main()
