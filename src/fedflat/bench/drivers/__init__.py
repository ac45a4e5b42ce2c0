"""Drivers of other simulators, one module each; they run in the simulator's environment, not in fedflat's.

May import ``fedflat.bench`` and the simulator; nothing imports a driver.
"""

from __future__ import annotations

import os
from functools import lru_cache
from multiprocessing.connection import Client
from pathlib import Path

import torch

from fedflat.bench.contender_process import RoundTimer
from fedflat.bench.peers import FOLDER_VARIABLE, Peer, read_peer
from fedflat.bench.plain import PlainLoop
from fedflat.errors import UserError


def folder() -> Path:
    """The folder that the measuring process made for this peer; drivers may write to it."""
    return Path(os.environ[FOLDER_VARIABLE])


def connected_timer() -> RoundTimer:
    """The timer of this peer's rounds, for the one process that knows when a round is over."""
    return RoundTimer(Client(str(folder() / "socket"), "AF_UNIX"))


@lru_cache(maxsize=1)
def plain_loop() -> PlainLoop:
    """The plain loop, which has the model, the data, the partition and a training function.

    Cached, so that a process builds it only once.
    """
    peer = read_peer(folder())
    return PlainLoop(
        peer.setting.config(peer.algorithm, peer.precision, "loop", peer.clients), peer.setting.load_data()
    )


def local_epochs(peer: Peer) -> int:
    """The local epochs that take ``local_steps`` steps, for a simulator that trains only whole epochs.

    Raises:
        UserError: these steps are not the same whole number of epochs for every client.
    """
    setting = peer.setting
    sizes = sorted({len(indices) for indices in plain_loop().partition.clients})
    epochs, rest = divmod(setting.local_steps * setting.batch_size, sizes[0])
    if len(sizes) > 1 or rest or sizes[0] % setting.batch_size:
        examples = f"{sizes[0]} to {sizes[-1]}" if len(sizes) > 1 else sizes[0]
        raise UserError(
            f"{peer.name} trains whole epochs, but {setting.local_steps} steps of {setting.batch_size} examples are "
            f"not a whole number of epochs of every client, which has {examples} examples; "
            "change --local-steps, --batch-size or --partition"
        )
    return epochs


def participation(peer: Peer) -> float:
    """The share of clients per round, from which a simulator computes the number of clients by rounding down."""
    return min(1.0, (peer.setting.clients_per_round + 0.5) / peer.clients)


def client_tensors(peer: Peer, client: int) -> tuple[torch.Tensor, torch.Tensor]:
    """All normalised inputs and the targets of a client, for simulators with their own data loaders."""
    if peer.setting.augmentation != "none":
        raise UserError(f"{peer.name} is measured without augmentation; use --augmentation none")
    problem, indices = plain_loop().problem, torch.from_numpy(plain_loop().partition.clients[client])
    examples = problem.data.train.take(indices.to(problem.device))
    return problem.normalised(examples.inputs).to(problem.dtype), examples.targets
