"""Driver of fluke: runs fluke's own FedAVG, clients and server, with all data in memory."""

from __future__ import annotations

from typing import Any

import torch
from fluke import DDict, FlukeENV
from fluke.algorithms.fedavg import FedAVG
from fluke.data import FastDataLoader

from fedflat.bench.drivers import client_tensors, connected_timer, local_epochs, participation, plain_loop
from fedflat.bench.peers import Simulator
from fedflat.bench.plain import training_loss
from fedflat.bench.setting import ROUNDS


class Splits:
    """Takes the place of fluke's DataSplitter, which would download and divide a dataset."""

    def __init__(self, simulator: Simulator, classes: int) -> None:
        self.simulator, self.classes = simulator, classes

    def assign(self, n_clients: int, batch_size: int) -> Any:
        """Return fluke's data loaders of all clients; there are no test sets, because nothing is evaluated."""
        loaders = [
            FastDataLoader(
                *client_tensors(self.simulator, client), num_labels=self.classes, batch_size=batch_size, shuffle=True
            )
            for client in range(n_clients)
        ]
        return (loaders, [None] * n_clients), None


def run(simulator: Simulator) -> None:
    """Run fluke's FedAVG and report the end of each round to the timer."""
    setting, loop, timer = simulator.setting, plain_loop(), connected_timer()
    environment = FlukeENV()
    environment.set_seed(0)
    environment.set_device("cuda" if setting.on_gpu else "cpu")
    environment.set_inmemory(True)
    environment.set_eval_cfg(server=False, locals=False, pre_fit=False, post_fit=False)
    model = loop.new_model()
    model.load_state_dict(loop.state)
    parameters = {
        "client": {
            "batch_size": setting.batch_size,
            "local_epochs": local_epochs(simulator),
            "loss": torch.nn.CrossEntropyLoss,
            "optimizer": {"name": "SGD", "lr": setting.lr},
            "scheduler": {"gamma": 1, "step_size": 1},
        },
        "server": {"weighted": True},
        "model": model,
    }

    class TimedFedAVG(FedAVG):
        """FedAVG that reports every completed round to the timer."""

        def notify(self, event: str, **values: Any) -> None:
            if event == "end_round":
                timer.round_done(lambda: training_loss(loop.problem, self.server.model.state_dict()))
            super().notify(event, **values)

    algorithm = TimedFedAVG(simulator.clients, Splits(simulator, loop.problem.data.num_classes), DDict(parameters))
    algorithm.run(ROUNDS, participation(simulator))
