"""Drivers of other simulators, one module each, which train the benchmark's model with the simulator's own FedAvg.

A driver runs in the simulator's environment, in which fedflat is not installed. It takes the model, data and partition
from the plain loop, a straightforward PyTorch loop over clients, and reports the end of each round to a timer.

May import ``fedflat.bench`` and the simulator; nothing imports a driver.
"""

from __future__ import annotations

import os
from functools import lru_cache
from multiprocessing.connection import Client
from pathlib import Path

import torch

from fedflat.bench.contender_process import RoundTimer
from fedflat.bench.peers import FOLDER_VARIABLE, Simulator, read_simulator
from fedflat.bench.plain import PlainLoop
from fedflat.errors import UserError


def benchmark_folder() -> Path:
    """Return the folder that the measuring process made for this simulator; drivers may write to it."""
    return Path(os.environ[FOLDER_VARIABLE])


def connected_timer() -> RoundTimer:
    """Return the timer of this simulator's rounds, for the one process that knows when a round is over."""
    return RoundTimer(Client(str(benchmark_folder() / "socket"), "AF_UNIX"))


@lru_cache(maxsize=1)
def plain_loop() -> PlainLoop:
    """Return the plain PyTorch loop of this benchmark, from which drivers take the model, data and partition.

    All simulators thus train on the same problem. Cached, so that a process builds it only once.
    """
    simulator = read_simulator(benchmark_folder())
    return PlainLoop(
        simulator.setting.config(simulator.algorithm, simulator.precision, "loop", simulator.clients),
        simulator.setting.load_data(),
    )


def local_epochs(simulator: Simulator) -> int:
    """Return the number of local epochs that equals ``local_steps`` steps, for a simulator that trains whole epochs.

    Raises:
        UserError: the steps are not a whole number of epochs, or not the same number for every client.
    """
    setting = simulator.setting
    sizes = sorted({len(indices) for indices in plain_loop().partition.clients})
    epochs, rest = divmod(setting.local_steps * setting.batch_size, sizes[0])
    if len(sizes) > 1 or rest or sizes[0] % setting.batch_size:
        examples = f"{sizes[0]} to {sizes[-1]}" if len(sizes) > 1 else sizes[0]
        raise UserError(
            f"{simulator.name} trains whole epochs, but {setting.local_steps} steps of {setting.batch_size} examples "
            f"are not a whole number of epochs of every client, which has {examples} examples; "
            "change --local-steps, --batch-size or --partition"
        )
    return epochs


def participation(simulator: Simulator) -> float:
    """Return the share of clients per round; a simulator multiplies it by the number of clients and rounds down."""
    return min(1.0, (simulator.setting.clients_per_round + 0.5) / simulator.clients)


def client_tensors(simulator: Simulator, client: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return all normalised inputs and targets of a client, for simulators with their own data loaders."""
    if simulator.setting.augmentation != "none":
        raise UserError(f"{simulator.name} is measured without augmentation; use --augmentation none")
    problem, indices = plain_loop().problem, torch.from_numpy(plain_loop().partition.clients[client])
    examples = problem.data.train.take(indices.to(problem.device))
    return problem.normalised(examples.inputs).to(problem.dtype), examples.targets
