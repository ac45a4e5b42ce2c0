"""Driver of pfl-research: FederatedAveraging on a SimulatedBackend, with one ``torchrun`` process per core or GPU."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from fedflat.bench.contender_process import NoMoreRounds
from fedflat.bench.drivers import benchmark_folder, connected_timer, plain_loop
from fedflat.bench.peers import Simulator, read_simulator
from fedflat.bench.plain import training_loss
from fedflat.bench.setting import ROUNDS
from fedflat.processes import available_cores


def run(simulator: Simulator) -> None:
    """Start one process per core or GPU, but no more than clients per round; each runs this module.

    Under ``torchrun``, pfl-research gives each process a GPU of its own.
    """
    on_gpu = simulator.setting.on_gpu
    os.environ["PFL_PYTORCH_DEVICE"] = "cuda" if on_gpu else "cpu"
    torchrun = [str(Path(sys.executable).parent / "torchrun"), "--standalone", "--nnodes=1"]
    most = torch.cuda.device_count() if on_gpu else available_cores()
    processes = min(most, simulator.setting.clients_per_round)
    # Without a folder for logs, torchrun would leave one behind.
    options = [f"--nproc_per_node={processes}", f"--log-dir={benchmark_folder() / 'torchrun'}"]
    command = [*torchrun, *options, "-m", __name__]
    sys.exit(subprocess.run(command, check=False).returncode)


def main() -> None:
    """Train the share of every cohort that pfl assigns to this process; the first process reports the rounds."""
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.pytorch import PyTorchTensorDataset
    from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
    from pfl.metrics import Metrics, Weighted
    from pfl.model.pytorch import PyTorchModel

    logging.getLogger("pfl").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    setting, loop = read_simulator(benchmark_folder()).setting, plain_loop()
    timer = connected_timer() if os.environ["RANK"] == "0" else None
    remaining_cohort: list[int] = []
    rounds_done = 0

    class PflNetwork(torch.nn.Module):
        """The model with the loss and metrics that pfl expects."""

        def __init__(self) -> None:
            """Wrap a new copy of the benchmark's model, with the initial weights that all simulators share."""
            super().__init__()
            self.inner = loop.new_model()
            self.inner.load_state_dict(loop.state)

        def loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            """Return the cross-entropy, in training mode."""
            self.train()
            return F.cross_entropy(self.inner(inputs), targets)

        def metrics(self, inputs: torch.Tensor, targets: torch.Tensor) -> dict[str, Any]:
            """Return the loss as the only metric."""
            return {"loss": Weighted(float(self.loss(inputs, targets).detach()) * len(inputs), len(inputs))}

    class TimerCallback(TrainingProcessCallback):
        """Reports every completed round to the timer."""

        def after_central_iteration(self, metrics: Any, model: Any, *, central_iteration: int) -> tuple[bool, Any]:
            """Count a round and report it to the timer; returns whether training stops (no), and no metrics."""
            nonlocal rounds_done
            rounds_done += 1
            if timer is not None:
                timer.round_done(lambda: training_loss(loop.problem, network.inner.state_dict()))
            return False, Metrics()

    def next_user() -> int:
        """Return the next client of the current round's cohort; the order is the same in every process."""
        if not remaining_cohort:
            remaining_cohort.extend(loop.cohort(rounds_done))
        return remaining_cohort.pop(0)

    def dataset(client: int) -> Any:
        """Return all batches of a client in the current round, concatenated as one dataset."""
        inputs, targets = zip(*loop.batches(loop.partition.clients[client], client, rounds_done), strict=True)
        return PyTorchTensorDataset((torch.cat(inputs), torch.cat(targets)), user_id=str(client))

    network, users = PflNetwork(), FederatedDataset(dataset, next_user)
    model = PyTorchModel(network, torch.optim.SGD, torch.optim.SGD(network.parameters(), lr=1.0))
    FederatedAveraging().run(
        NNAlgorithmParams(ROUNDS, ROUNDS, setting.clients_per_round, None),
        SimulatedBackend(users, users),
        model,
        NNTrainHyperParams(local_batch_size=setting.batch_size, local_num_epochs=1, local_learning_rate=setting.lr),
        NNEvalHyperParams(local_batch_size=None),
        [TimerCallback()],
        send_metrics_to_platform=False,
    )


if __name__ == "__main__":
    try:
        main()
    except NoMoreRounds:
        sys.exit()
