"""What a round of fedflat's FedAvg on Flower costs beside one of plain Flower's: the same SuperLink and SuperNodes, task, model and steps.

python studies/flower_overhead.py OUT                          two sites, three turns of each, six rounds a turn
python studies/flower_overhead.py OUT --turns 1 --rounds 3     quickly

Both take turns, so that whatever else the machine does meets both; the first round of a turn does not count. A round is from the end of one
to the end of the next, as the server sees it. OUT/flower_overhead.json has the figures.
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
from fedflat.experiment.store.atomic_files import create_folder, write_whole

BIN = Path(sys.executable).parent
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
noted = ""
""",
    "plain/__init__.py": "",
    "plain/task.py": """\
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import nn

BATCH, RATE = 10, 0.05


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 200), nn.ReLU(), nn.Linear(200, 10))


def data(site, sites):
    # As fedflat does: to import scikit-learn for its digits would cost more than all the rest.
    file = Path(find_spec("sklearn").submodule_search_locations[0], "datasets", "data", "digits.csv.gz")
    digits = np.loadtxt(file, dtype=np.uint8, delimiter=",")
    inputs, targets = digits[:, :-1].astype(np.float32) / 16, digits[:, -1].astype(np.int64)
    mine = np.random.default_rng(0).permutation(len(targets))[site::sites]
    return torch.from_numpy(inputs[mine]), torch.from_numpy(targets[mine])


def train(network, inputs, targets, steps):
    torch.set_num_threads(1)
    descent = torch.optim.SGD(network.parameters(), lr=RATE)
    for step in range(steps):
        batch = torch.randint(len(targets), (BATCH,))
        descent.zero_grad()
        nn.functional.cross_entropy(network(inputs[batch]), targets[batch]).backward()
        descent.step()
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
    sent = {"arrays": ArrayRecord(network.state_dict()), "metrics": MetricRecord({"num-examples": len(targets)})}
    return Message(RecordDict(sent), reply_to=message)
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
    sites, noted = context.run_config["sites"], Path(context.run_config["noted"])

    class Noted(FedAvg):
        """FedAvg that writes a line after every round."""

        def aggregate_train(self, server_round, replies):
            combined = super().aggregate_train(server_round, replies)
            with noted.open("a") as file:
                file.write(f"{server_round}\\n")
            return combined

    strategy = Noted(fraction_evaluate=0.0, min_train_nodes=sites, min_available_nodes=sites)
    strategy.start(grid=grid, initial_arrays=ArrayRecord(model().state_dict()), num_rounds=context.run_config["rounds"])
''',
}


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="where the figures go")
    parser.add_argument("--sites", type=int, default=2)
    parser.add_argument("--turns", type=int, default=3, help="how often each is measured (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=6, help="rounds of a turn (default: %(default)s)")
    parser.add_argument("--local-steps", type=int, default=10, help="local steps of a client (default: %(default)s)")
    return parser.parse_args(given)


def free_port() -> int:
    """A port that nobody uses."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def until_open(address: str) -> None:
    """Wait for a SuperLink, for a minute."""
    for _ in range(60):
        with suppress(UserError):
            reach(address, insecure=True)
            return
        time.sleep(1)
    raise SystemExit(f"the SuperLink at {address} has not started")


@contextmanager
def federation(folder: Path, sites: int) -> Iterator[dict[str, str]]:
    """A SuperLink and SuperNodes, started as anybody would; the environment in which ``flwr run`` finds them."""
    port, environment = free_port(), {**os.environ, "FLWR_HOME": str(folder / "flwr"), "FLWR_TELEMETRY_ENABLED": "0"}
    environment |= {
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "FEDFLAT_STATE": str(folder / "state"),
    }
    create_folder(folder / "flwr")
    write_whole(folder / "flwr" / "config.toml", f'[superlink.sites]\naddress = "127.0.0.1:{port}"\ninsecure = true\n')
    commands = [["flower-superlink", "--insecure", "--disable-runtime-dependency-installation", "--port", str(port)]]
    for site in range(sites):
        here = ["--superlink", f"127.0.0.1:{port}", "--port", str(free_port()), "--node-config", f"partition-id={site}"]
        commands.append(["flower-supernode", "--insecure", *here])
    started: list[subprocess.Popen[bytes]] = []
    try:
        for number, command in enumerate(commands):
            with (folder / f"{command[0]}-{number}.log").open("wb") as log:
                started.append(
                    subprocess.Popen(
                        command, env=environment, cwd=folder, stdout=log, stderr=log, start_new_session=True
                    )
                )
        until_open(f"127.0.0.1:{port}")
        yield environment
    finally:
        for process in started:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def turn(project: Path, noted: Path, rounds: int, settings: dict[str, Any], environment: dict[str, str]) -> list[float]:
    """The seconds of a run's rounds after its first, by the times at which lines come to be in a file."""
    config = " ".join(f"{key}={json.dumps(value)}" for key, value in settings.items())
    command = ["flwr", "run", str(project), "sites", "--run-config", config]
    subprocess.run(command, check=True, env=environment, cwd=project, stdout=subprocess.DEVNULL, timeout=120)
    ends: list[float] = []
    until = time.monotonic() + 60 + 60 * rounds
    while len(ends) < rounds:
        done = noted.read_text().count("\n") if noted.exists() else 0
        ends += [time.monotonic()] * (done - len(ends))
        if time.monotonic() > until:
            raise SystemExit(f"{project.name} has not done its rounds; look at the logs in {project.parent}")
        time.sleep(0.02)
    return [after - before for before, after in pairwise(ends)]


def measure(folder: Path, asked: argparse.Namespace) -> dict[str, list[float]]:
    """The seconds of rounds of both, in turns."""
    for name, text in PLAIN.items():
        create_folder((folder / "plain" / name).parent)
        write_whole(folder / "plain" / name, text)
    write_project(folder / "ours", "fedavg", asked.sites)
    settings = folder / "ours" / "pyproject.toml"
    text = (
        settings.read_text().replace("epochs = 1", f"steps = {asked.steps}").replace('"dirichlet(alpha=0.5)"', '"iid"')
    )
    write_whole(settings, f"{text}\n[tool.flwr.app.config.evaluation]\nevery = {asked.rounds}\n")
    seconds: dict[str, list[float]] = {"fedflat on Flower": [], "plain Flower": []}
    with federation(folder, asked.sites) as environment:
        for number in range(asked.turns):
            out, noted = folder / f"run-{number}", folder / f"plain-{number}.txt"
            ours = {
                "training.rounds": asked.rounds,
                "deploy.out": str(out),
                "deploy.score": False,
                "deploy.minimum": asked.sites,
            }
            plain = {"rounds": asked.rounds, "sites": asked.sites, "steps": asked.steps, "noted": str(noted)}
            seconds["fedflat on Flower"] += turn(
                folder / "ours", out / "participation.jsonl", asked.rounds, ours, environment
            )
            seconds["plain Flower"] += turn(folder / "plain", noted, asked.rounds, plain, environment)
    return seconds


def main(given: Sequence[str] | None = None) -> None:
    """Measure, print and keep the figures."""
    asked = arguments(given)
    folder = asked.out.absolute() / f"federation-{os.getpid()}"
    create_folder(folder)
    seconds = measure(folder, asked)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    ratio = medians["fedflat on Flower"] / medians["plain Flower"]
    write_whole(
        asked.out / "flower_overhead.json",
        json.dumps({"seconds": seconds, "medians": medians, "ratio": ratio}, indent=1) + "\n",
    )
    for name, values in seconds.items():
        print(
            f"{name}: {medians[name]:.2f} s a round (median of {len(values)}, {min(values):.2f} to {max(values):.2f})"
        )
    print(f"fedflat takes {ratio:.2f} times as long as plain Flower")


if __name__ == "__main__":
    main()
