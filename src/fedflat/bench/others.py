"""The same rounds in other simulators, if they are installed: Flower with Ray, and pfl-research."""

from __future__ import annotations

import logging
import multiprocessing
import os
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from fedflat.bench.contender_process import Contender, NoMoreRounds, RoundTimer
from fedflat.bench.plain import PlainLoop
from fedflat.bench.setting import ROUNDS
from fedflat.processes import available_cores


@dataclass(frozen=True)
class Other(Contender):
    """Another simulator, used as its documentation recommends."""

    packages: ClassVar[tuple[str, ...]]
    install: ClassVar[str]

    @classmethod
    def installed(cls) -> bool:
        """Whether its packages are installed."""
        return all(find_spec(package) is not None for package in cls.packages)


@lru_cache(maxsize=1)
def plain_loop(contender: Other) -> PlainLoop:
    """Build the plain loop, whose data, partition and training function the other simulators use.

    Cached, so that a worker process builds it only once.
    """
    torch.set_num_threads(1)
    setting = contender.setting
    config = setting.config(contender.algorithm, contender.precision, "loop", contender.clients)
    return PlainLoop(config, setting.load_data())


@dataclass(frozen=True)
class Flower(Other):
    """Flower's simulation with its FedAvg strategy and one Ray worker per core; no evaluation."""

    name = "flower"
    packages = ("flwr", "ray")
    install = "pip install 'flwr[simulation]'"

    def run_rounds(self, timer: RoundTimer) -> None:
        """Simulate rounds until ``timer.round_done`` raises ``NoMoreRounds``; clients train as in the plain loop."""
        os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
        os.environ |= {"RAY_worker_niceness": "0"}  # the same priority as our processes
        from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
        from flwr.clientapp import ClientApp
        from flwr.serverapp import Grid, ServerApp
        from flwr.serverapp.strategy import FedAvg
        from flwr.simulation import run_simulation

        logging.getLogger("flwr").setLevel(logging.CRITICAL)
        setting, cores = self.setting, available_cores()
        client, server = ClientApp(), ServerApp()
        failures: list[str] = []

        @client.train()  # type: ignore[untyped-decorator, unused-ignore]
        def train(message: Message, context: Context) -> Message:
            """Train one client from the received model, as the plain loop does; Flower counts rounds from 1."""
            round_number = int(message.content["config"]["server-round"]) - 1
            received = message.content["arrays"].to_torch_state_dict()
            client_number = int(context.node_config["partition-id"])
            state, examples = plain_loop(self).train(received, client_number, round_number)
            sent = {"arrays": ArrayRecord(state), "metrics": MetricRecord({"num-examples": examples})}
            return Message(RecordDict(sent), reply_to=message)

        class TimedFedAvg(FedAvg):  # type: ignore[misc, unused-ignore]
            """FedAvg that reports every completed round to the timer."""

            def aggregate_train(self, server_round: int, replies: Any) -> Any:
                """Average the replies if all clients answered; a round with failed clients would seem too fast."""
                received = list(replies)
                errors = [str(reply.error.reason) for reply in received if reply.has_error()]
                if errors:
                    raise RuntimeError(errors[0])
                if len(received) != setting.clients_per_round:
                    raise RuntimeError(f"{len(received)} of {setting.clients_per_round} clients answered")
                combined = super().aggregate_train(server_round, received)
                timer.round_done()
                return combined

        @server.main()  # type: ignore[untyped-decorator, unused-ignore]
        def main(grid: Grid, context: Context) -> None:
            """Run Flower's FedAvg until all rounds are timed, and keep an error for the measuring process."""
            strategy = TimedFedAvg(
                fraction_train=setting.clients_per_round / self.clients,
                fraction_evaluate=0.0,
                min_train_nodes=setting.clients_per_round,
                min_available_nodes=self.clients,
            )
            try:
                strategy.start(grid=grid, initial_arrays=ArrayRecord(plain_loop(self).state), num_rounds=ROUNDS)
            except NoMoreRounds:  # from timer.round_done: all rounds are timed
                return
            except Exception as error:  # Flower would only log it; it is raised again below
                failures.append(str(error))

        resources = {"num_cpus": 1, "num_gpus": 1 / min(cores, setting.clients_per_round) if setting.on_gpu else 0.0}
        backend = {
            "client_resources": resources,
            "init_args": {"num_cpus": cores, "log_to_driver": False, "logging_level": 40},
        }
        run_simulation(server_app=server, client_app=client, num_supernodes=self.clients, backend_config=backend)
        if failures:
            raise RuntimeError(failures[0])
        raise NoMoreRounds


@dataclass(frozen=True)
class Pfl(Other):
    """pfl-research's FederatedAveraging on a SimulatedBackend, in one process, its default without a launcher."""

    name = "pfl-research"
    packages = ("pfl",)
    install = "pip install 'pfl[pytorch]'"

    def run_rounds(self, timer: RoundTimer) -> None:
        """Simulate rounds until ``timer.round_done`` raises ``NoMoreRounds``, with the plain loop's batches."""
        multiprocessing.current_process().name = "MainProcess"  # pfl takes any other process for a data loader
        os.environ["PFL_PYTORCH_DEVICE"] = "cuda" if self.setting.on_gpu else "cpu"
        from pfl.aggregate.simulate import SimulatedBackend
        from pfl.algorithm.base import NNAlgorithmParams
        from pfl.algorithm.federated_averaging import FederatedAveraging
        from pfl.callback.base import TrainingProcessCallback
        from pfl.data.federated_dataset import FederatedDataset
        from pfl.data.pytorch import PyTorchTensorDataset
        from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
        from pfl.metrics import Metrics, Weighted
        from pfl.model.pytorch import PyTorchModel

        logging.getLogger("pfl").setLevel(logging.CRITICAL)
        loop, setting = plain_loop(self), self.setting
        remaining_cohort: list[int] = []
        rounds_done = 0

        class PflNetwork(torch.nn.Module):
            """The model with the loss and metrics that pfl expects."""

            def __init__(self) -> None:
                super().__init__()
                self.inner = loop.new_model()

            def loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
                """Cross-entropy, in training mode."""
                self.train()
                return F.cross_entropy(self.inner(inputs), targets)

            def metrics(self, inputs: torch.Tensor, targets: torch.Tensor) -> dict[str, Any]:
                """The loss alone."""
                return {"loss": Weighted(float(self.loss(inputs, targets).detach()) * len(inputs), len(inputs))}

        class PflTimerCallback(TrainingProcessCallback):  # type: ignore[misc, unused-ignore]
            """Reports every completed round to the timer."""

            def after_central_iteration(self, metrics: Any, model: Any, *, central_iteration: int) -> tuple[bool, Any]:
                """Count a round and report it to the timer; returns whether training stops (no), and no metrics."""
                nonlocal rounds_done
                rounds_done += 1
                timer.round_done()
                return False, Metrics()

        def next_user() -> int:
            """The next client of the current round's cohort."""
            if not remaining_cohort:
                remaining_cohort.extend(loop.cohort(rounds_done))
            return remaining_cohort.pop(0)

        def dataset(client: int) -> Any:
            """All batches of a client in the current round, as one dataset."""
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
            [PflTimerCallback()],
            send_metrics_to_platform=False,
        )


OTHERS: dict[str, type[Other]] = {"flower": Flower, "pfl": Pfl}
