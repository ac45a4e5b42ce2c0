"""Driver of Flower: a ClientApp that trains like the plain loop, and a ServerApp with Flower's FedAvg."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from fedflat.bench.contender_process import NoMoreRounds
from fedflat.bench.drivers import benchmark_folder, connected_timer, plain_loop
from fedflat.bench.peers import POLLING_SECONDS, Simulator, read_simulator
from fedflat.bench.plain import training_loss
from fedflat.bench.setting import ROUNDS
from fedflat.processes import available_cores

APP = """
[project]
name = "fedflat-bench"
version = "1.0.0"
dependencies = []
[tool.hatch.build.targets.wheel]
packages = ["."]
[tool.flwr.app]
publisher = "fedflat"
[tool.flwr.app.components]
serverapp = "bench_app:server"
clientapp = "bench_app:client"
[tool.flwr.app.config]
"""
APP_MODULE = """
from fedflat.bench.drivers import flower
client = flower.client
server = flower.server
"""
FEDERATION = """
[superlink]
default = "local"
[superlink.local]
address = ":local:"
options.num-supernodes = {clients}
options.backend.client-resources.num-cpus = 1
options.backend.client-resources.num-gpus = {gpus}
options.backend.init-args.num-cpus = {cores}
"""
client, server = ClientApp(), ServerApp()


def run(simulator: Simulator) -> None:
    """Write the app and Flower's configuration, and run the app as ``flwr run`` does by default."""
    home, app, cores = benchmark_folder() / "flwr", benchmark_folder() / "app", available_cores()
    app.mkdir()
    (app / "pyproject.toml").write_text(APP)
    (app / "bench_app.py").write_text(APP_MODULE)
    home.mkdir()
    gpus = 1 / min(cores, simulator.setting.clients_per_round) if simulator.setting.on_gpu else 0.0
    (home / "config.toml").write_text(FEDERATION.format(clients=simulator.clients, gpus=gpus, cores=cores))
    http_port, control_port = free_port(), free_port()
    os.environ |= {"FLWR_HOME": str(home), "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
    os.environ |= {"FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": http_port, "FLWR_LOCAL_CONTROL_API_PORT": control_port}
    os.environ |= {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    os.environ |= {"RAY_worker_niceness": "0"}  # the same priority as the other contenders
    # ``flwr run`` would start the same SuperLink, but wait for it only 15 s.
    superlink = ["flower-superlink", "--insecure", "--simulation", "--isolation", "subprocess", "--host", "127.0.0.1"]
    with (home / "superlink.log").open("wb") as log:
        process = subprocess.Popen(
            [*superlink, "--port", http_port, "--control-api-address", f"127.0.0.1:{control_port}"],
            stdout=log,
            stderr=log,
        )
    while not is_listening(http_port):
        if process.poll() is not None:
            sys.exit(f"flower-superlink ended: {(home / 'superlink.log').read_text()[-500:]}")
        time.sleep(POLLING_SECONDS)
    sys.exit(subprocess.run(["flwr", "run", app, "--stream"], check=False).returncode)


def free_port() -> str:
    """Return a TCP port that no process uses."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return str(unused.getsockname()[1])


def is_listening(port: str) -> bool:
    """Whether a process accepts connections on a TCP port."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", int(port))) == 0


@client.train()
def train(message: Message, context: Context) -> Message:
    """Train one client from the received model, as the plain loop does; Flower counts rounds from 1."""
    torch.set_num_threads(1)
    round_number = int(message.content["config"]["server-round"]) - 1
    received = message.content["arrays"].to_torch_state_dict()
    client_number = int(context.node_config["partition-id"])
    state, examples = plain_loop().train(received, client_number, round_number)
    sent = {"arrays": ArrayRecord(state), "metrics": MetricRecord({"num-examples": examples})}
    return Message(RecordDict(sent), reply_to=message)


class TimedFedAvg(FedAvg):
    """FedAvg that reports every completed round to the timer."""

    def __init__(self, clients_per_round: int, **options: Any) -> None:
        super().__init__(min_train_nodes=clients_per_round, fraction_evaluate=0.0, **options)
        self.clients_per_round = clients_per_round
        self.timer = connected_timer()

    def aggregate_train(self, server_round: int, replies: Any) -> Any:
        """Average the replies if all clients answered; a round with failed clients would seem too fast."""
        received = list(replies)
        errors = [str(reply.error.reason) for reply in received if reply.has_error()]
        if errors:
            raise RuntimeError(errors[0])
        if len(received) != self.clients_per_round:
            raise RuntimeError(f"{len(received)} of {self.clients_per_round} clients answered")
        arrays, metrics = super().aggregate_train(server_round, received)
        self.timer.round_done(lambda: training_loss(plain_loop().problem, arrays.to_torch_state_dict()))
        return arrays, metrics


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Run Flower's FedAvg until all rounds are timed."""
    simulator = read_simulator(benchmark_folder())
    strategy = TimedFedAvg(
        simulator.setting.clients_per_round,
        fraction_train=simulator.setting.clients_per_round / simulator.clients,
        min_available_nodes=simulator.clients,
    )
    try:
        strategy.start(grid=grid, initial_arrays=ArrayRecord(plain_loop().state), num_rounds=ROUNDS)
    except NoMoreRounds:
        return
