"""Driver of BlazeFL: its FedAvg, with a thread pool on Python without the GIL, and otherwise with a process pool."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch._dynamo  # torch imports it in the first optimiser step; here, so that forked processes have it already
import torch.multiprocessing as multiprocessing
from blazefl.contrib import (
    FedAvgBaseServerHandler,
    FedAvgPartitionType,
    FedAvgProcessPoolClientTrainer,
    FedAvgThreadPoolClientTrainer,
)
from blazefl.core import IPCMode, ModelSelector, PartitionedDataset
from torch.utils.data import DataLoader, TensorDataset

from fedflat.bench.drivers import (
    benchmark_folder,
    client_tensors,
    connected_timer,
    local_epochs,
    participation,
    plain_loop,
)
from fedflat.bench.peers import Simulator, read_simulator
from fedflat.bench.plain import training_loss
from fedflat.bench.setting import ROUNDS
from fedflat.processes import available_cores


class Clients(PartitionedDataset[FedAvgPartitionType]):
    """The clients' data; forked worker processes share it in memory."""

    def get_dataset(self, type_: FedAvgPartitionType, cid: int | None) -> TensorDataset:
        """Return the examples of client ``cid``."""
        return TensorDataset(*client_tensors(read_simulator(benchmark_folder()), int(cid or 0)))

    def set_dataset(self, type_: FedAvgPartitionType, cid: int | None, dataset: Any) -> None:
        """Do nothing: training does not change the data."""

    def get_dataloader(
        self, type_: FedAvgPartitionType, cid: int | None, batch_size: int | None = None, generator: Any = None
    ) -> DataLoader[Any]:
        """Return a loader of shuffled batches of client ``cid``."""
        return DataLoader(self.get_dataset(type_, cid), batch_size=batch_size, shuffle=True, generator=generator)


class Networks(ModelSelector):
    """Builds the benchmark's model for BlazeFL."""

    def select_model(self, model_name: str) -> torch.nn.Module:
        """Return the model with its initial weights."""
        torch.set_num_threads(1)  # also called in every worker process
        model = plain_loop().new_model()
        model.load_state_dict(plain_loop().state)
        return model


def run(simulator: Simulator) -> None:
    """Train rounds as in BlazeFL's examples: sample, send, train, receive, aggregate."""
    setting, timer = simulator.setting, connected_timer()
    device = "cuda" if setting.on_gpu else "cpu"
    # CUDA needs new processes. On a CPU, forking is faster, because BlazeFL starts its processes anew in every round.
    multiprocessing.set_start_method("spawn" if setting.on_gpu else "fork")
    shared: dict[str, Any] = {"model_selector": Networks(), "model_name": setting.model, "dataset": Clients()}
    shared |= {"device": device, "num_clients": simulator.clients, "batch_size": setting.batch_size, "seed": 0}
    handler = FedAvgBaseServerHandler(global_round=ROUNDS, sample_ratio=participation(simulator), **shared)
    shared |= {"epochs": local_epochs(simulator), "lr": setting.lr}
    shared |= {"num_parallels": min(available_cores(), setting.clients_per_round)}
    trainer: Any
    if getattr(sys, "_is_gil_enabled", lambda: True)():
        trainer = FedAvgProcessPoolClientTrainer(
            share_dir=benchmark_folder() / "share",
            state_dir=benchmark_folder() / "state",
            ipc_mode=IPCMode.SHARED_MEMORY,
            **shared,
        )
    else:
        trainer = FedAvgThreadPoolClientTrainer(**shared)
    while True:
        trainer.local_process(handler.downlink_package(), handler.sample_clients())
        for package in trainer.uplink_package():
            handler.load(package)
        timer.round_done(lambda: training_loss(plain_loop().problem, handler.model.state_dict()))
