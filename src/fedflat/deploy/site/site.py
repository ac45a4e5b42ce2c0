"""A site: one client with its own data and its own memory, on its own machine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from fedflat.algorithms import algorithm
from fedflat.algorithms.algorithm import flat_state
from fedflat.data import Dataset
from fedflat.deploy.flower.wire import BUFFERS, DISPLACEMENT, GRADIENT, INTEGERS, MODEL
from fedflat.deploy.site.client_memory import Memory
from fedflat.deploy.trust.identity import Identity, identity_of
from fedflat.engines.cpu.engine import LoopEngine, one_thread
from fedflat.engines.problem.task import Task
from fedflat.engines.round.client import common_gradient, train_client
from fedflat.engines.round.cohort_buffers import CohortBuffers
from fedflat.engines.round.contract import ModelState, Training
from fedflat.errors import UserError
from fedflat.experiment.config import Config
from fedflat.experiment.setup.problem import federation
from fedflat.experiment.setup.training import training_of

STATISTICS = "statistics"
"""In a site's memory: normalisation statistics that never leave it."""


class Site:
    """What a node knows: the experiment, which client it is, its data, and where it keeps what it remembers."""

    def __init__(
        self,
        config: Config,
        client: int,
        folder: Path,
        data: Dataset | None = None,
        model: nn.Module | None = None,
        task: Task | None = None,
    ) -> None:
        self.client, self.folder = client, folder
        self.problem, partition = federation(_alone(config) if data is not None else config, data, model, task)
        clients = (config.data.clients or 1) if data is not None else len(partition.clients)
        if not 0 <= client < clients:
            raise UserError(
                f"this node says that it is client {client}, but the federation has clients 0 to {clients - 1}; "
                "start its SuperNode with --node-config 'partition-id=N'"
            )
        self.indices: np.ndarray = (
            np.arange(len(self.problem.data.train)) if data is not None else partition.clients[client]
        )
        self.training: Training = training_of(config, algorithm(config.algorithm), clients)

    def identity(self) -> Identity:
        """What it must have in common with the server."""
        return identity_of(self.problem, self.training)

    def whole_gradient(self, round: int, received: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, float]]:
        """The gradient of all its data at the model it received."""
        with one_thread():
            table = self._table(received, {})
            gradient, passes, samples = common_gradient(
                self.problem, self.training, table, round, self.client, self.indices, 0
            )
        return gradient, {"backward_passes": passes, "samples": samples, "examples": len(self.indices)}

    def train(
        self, experiment: str, round: int, before: int, received: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Train one round from what it received and remembers; what it sends, and the numbers beside it.

        ``before`` counts the rounds that were done when it last had an update accepted.
        """
        memory = Memory(self.folder, experiment, self.client)
        table = self._table(received, memory.read(before) if self.remembers else {})
        _, _, integers = self.problem.initial()
        integers = {name: received.get(INTEGERS + name, value) for name, value in integers.items()}
        with one_thread():
            report = train_client(self.problem, self.training, table, round, 0, self.client, self.indices, integers)
        if self.remembers:
            memory.write(self._kept(table), round + 1, before)
        sent = {DISPLACEMENT: table.displacement[0], **{name: rows[0] for name, rows in table.sent.items()}}
        if not self.training.own_statistics:
            if table.buffers.shape[1]:
                sent[BUFFERS] = table.buffers[0]
            sent |= {INTEGERS + name: value for name, value in report.integers.items()}
        numbers = {
            "rates": float(report.rates),
            "loss": float(report.loss),
            "steps": report.steps,
            "backward_passes": report.backward_passes,
            "samples": report.samples,
            "examples": len(self.indices),
        }
        return sent, numbers

    def score(self, received: Mapping[str, Tensor]) -> dict[str, float]:
        """How good a model is on the data that this site held out."""
        _, buffers, integers = self.problem.initial()
        state = ModelState(received[MODEL], received.get(BUFFERS, buffers), integers)
        examples = self.problem.held_out["test"]
        figures = LoopEngine(self.problem, workers=1).evaluate({"server": state}, {"test": examples})["server"]["test"]
        return {**figures, "examples": len(examples)}

    def _table(self, received: Mapping[str, Tensor], remembered: Mapping[str, Tensor]) -> CohortBuffers:
        """A table of one row, filled with what was received and what is remembered."""
        weights, buffers, _ = self.problem.initial()
        chosen = self.training.algorithm
        table = CohortBuffers.new(chosen, len(weights), len(buffers), 1, weights, shared=False)
        table.z.copy_(received[MODEL])
        for name, value in table.server.items():
            value.copy_(received[name])
        if GRADIENT in received:
            table.common_gradient.copy_(received[GRADIENT])
        for name, value in flat_state(chosen.new_client(weights)).items():
            table.client[name][0].copy_(remembered.get(name, value))
        table.buffers[0].copy_(remembered.get(STATISTICS, received.get(BUFFERS, buffers)))
        return table

    @property
    def remembers(self) -> bool:
        """Whether anything of it lasts from round to round."""
        return self.training.own_statistics or any(self.training.algorithm.client_fields().values())

    def _kept(self, table: CohortBuffers) -> dict[str, Tensor]:
        kept = {name: rows[0] for name, rows in table.client.items()}
        return kept | ({STATISTICS: table.buffers[0]} if self.training.own_statistics else {})


def _alone(config: Config) -> Config:
    """The config of a site with data of its own: all of its training examples are one client's."""
    data = config.data.model_copy(update={"partition": "iid", "clients": 1, "validation": 0.0})
    return config.model_copy(
        update={"data": data, "federation": config.federation.model_copy(update={"clients_per_round": 1})}
    )


def own_device(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Tensors that came over the wire, where the site computes."""
    return {name: tensor.to(device) for name, tensor in tensors.items()}
