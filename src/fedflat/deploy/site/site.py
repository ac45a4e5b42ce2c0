"""A site: one client with its data and its saved state, on its own machine."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from fedflat.algorithms import algorithm as build_algorithm
from fedflat.algorithms.algorithm import flat_state
from fedflat.data import Dataset
from fedflat.deploy.flower.wire import BUFFERS, DISPLACEMENT, GRADIENT, INTEGERS, MODEL
from fedflat.deploy.site.client_memory import ClientMemory
from fedflat.deploy.trust.identity import Identity, identity_of
from fedflat.deploy.trust.inspection import LR_SUM
from fedflat.engines.cpu.engine import LoopEngine, one_thread
from fedflat.engines.problem.task import Task
from fedflat.engines.round.client import train_client, write_full_gradient
from fedflat.engines.round.cohort_buffers import CohortBuffers
from fedflat.engines.round.contract import ClientRound, ModelState, Training
from fedflat.engines.round.privacy import protect_rows
from fedflat.errors import UserError
from fedflat.experiment.config import Config
from fedflat.experiment.setup.engine import check_precision, training_of
from fedflat.experiment.setup.problem import build_problem
from fedflat.experiment.store.files import locked

log = logging.getLogger("flwr")
STATISTICS = "statistics"
"""Name of BatchNorm statistics in the saved state; they never leave the site."""


def load_site_data(data: Callable[..., Dataset], client: int, node_config: Mapping[str, Any]) -> Dataset:
    """Call the user's function for a site's data, with the node config if it takes a second argument."""
    try:
        inspect.signature(data).bind(client, dict(node_config))
    except TypeError:
        return data(client)
    return data(client, dict(node_config))


class Site:
    """One client of a federation, with its data and its saved state.

    The code that trains a simulated cohort also trains a site: its tensors are row 0 of a cohort of one client.

    Args:
        config: the experiment.
        client: number of the client.
        folder: where the client's state is saved.
        data: the site's own data; by default its part of the config's dataset.
        model: user-supplied model.
        task: user-supplied task.
        may_start_afresh: whether a client whose saved state is lost may train from the state of a new client.
    """

    def __init__(
        self,
        config: Config,
        client: int,
        folder: Path,
        data: Dataset | None = None,
        model: nn.Module | None = None,
        task: Task | None = None,
        may_start_afresh: bool = False,
    ) -> None:
        self.client, self.folder, self._may_start_afresh = client, folder, may_start_afresh
        self.has_own_data = has_own_data = data is not None
        problem_config = _as_only_client(config) if has_own_data else config
        self.problem, partition = build_problem(problem_config, data, model, task)
        if config.engine.precision == "bf16":  # a site without TF32 need not be warned in every round
            check_precision("bf16", self.problem.device.type == "cuda")
        # With data of its own, the site's partition has one client, and only the config knows the number of sites.
        clients = (config.data.clients or 1) if has_own_data else len(partition.clients)
        if not 0 <= client < clients:
            raise UserError(
                f"this node claims to be client {client}, but the federation has clients 0 to {clients - 1}; "
                "start its SuperNode with --node-config 'partition-id=N'"
            )
        if has_own_data:
            self.indices = np.arange(len(self.problem.data.train))
        else:
            self.indices = partition.clients[client]
        algorithm = build_algorithm(config.algorithm)
        self.training: Training = training_of(config, algorithm, clients, self.problem, is_deployed=True)

    def identity(self) -> Identity:
        """Return what the site must have in common with the server."""
        return identity_of(self.problem, self.training)

    def _in_round(self, round: int) -> ClientRound:
        """Return the client in a certain round."""
        return ClientRound(round, self.client, self.indices)

    def full_gradient(self, round: int, received: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, float]]:
        """Return the gradient of all of the site's data at the received model, and the numbers to send with it.

        ``received`` are the server's tensors by name. The gradient has shape [parameters].
        """
        with one_thread():
            cohort_buffers = self._cohort_of_one(received, {})  # the gradient does not depend on the client's state
            cost = write_full_gradient(self.problem, self.training, cohort_buffers, 0, self._in_round(round))
        return cohort_buffers.gradient[0], {
            "backward_passes": cost.backward_passes,
            "samples": cost.samples,
            "examples": len(self.indices),
        }

    def train(
        self, experiment: str, round: int, state_version: int, received: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Train one round and save the client's new state, if the algorithm keeps one.

        Args:
            experiment: the server's name of the experiment.
            round: number of the round, from 0.
            state_version: which saved state to train from, the one after the client's last accepted update.
            received: the tensors that the server sent: model, buffers, and the server's state as ``slot.field``.

        Returns:
            The tensors to send (displacement, buffers, and the algorithm's messages) and the numbers to send.
        """
        memory = ClientMemory(self.folder, experiment, self.client)
        if self.has_local_privacy:
            self._spend_privacy(memory)
        cohort_buffers = self._cohort_of_one(received, self._saved_state(memory, state_version))
        # Integer buffers, such as BatchNorm's counter of batches: the server's unless sites keep their own statistics.
        _, _, initial_integer_buffers = self.problem.initial_state()
        integer_buffers = {
            name: received.get(INTEGERS + name, value) for name, value in initial_integer_buffers.items()
        }
        with one_thread():
            report = train_client(
                self.problem, self.training, cohort_buffers, 0, self._in_round(round), integer_buffers
            )
            protect_rows(self.training, round, cohort_buffers, [self.client])
        if self.has_state:
            state = {name: rows[0] for name, rows in cohort_buffers.client_states.items()}
            if self.training.own_statistics:
                state[STATISTICS] = cohort_buffers.statistics[0]
            memory.write(state, round + 1, state_version)
        sent = {
            DISPLACEMENT: cohort_buffers.displacement[0],
            **{name: rows[0] for name, rows in cohort_buffers.sent.items()},
        }
        if not self.training.own_statistics:
            if cohort_buffers.statistics.shape[1]:  # the model has buffers
                sent[BUFFERS] = cohort_buffers.statistics[0]
            sent |= {INTEGERS + name: value for name, value in report.integer_buffers.items()}
        numbers = {
            LR_SUM: float(report.lr_sum),
            "loss": 0.0 if self.training.privacy else float(report.loss),  # it reveals the data and has no noise
            "steps": report.steps,
            "backward_passes": report.backward_passes,
            "samples": report.samples,
            "examples": len(self.indices),
        }
        return sent, numbers

    def _spend_privacy(self, memory: ClientMemory) -> None:
        """Count an answer before it is made; raises ``UserError`` if it would exceed the privacy budget.

        The site counts by itself, because it need not trust the server, which may also ask twice after a restart.
        """
        privacy = self.training.privacy
        assert privacy is not None
        with locked(memory.folder, wait=True):  # Flower may handle two messages concurrently
            answers = memory.answers()
            if privacy.exceeds_budget(answers + 1):
                raise UserError(
                    f"client {self.client} has answered {answers} training requests of this run; another answer would "
                    f"exceed epsilon={privacy.budget:g} of federation.privacy"
                )
            answers = memory.count_answer()
        log.info("fedflat: answer %d of this site to the run, epsilon %.3g", answers, privacy.epsilon(answers))

    def _saved_state(self, memory: ClientMemory, state_version: int) -> dict[str, Tensor]:
        """Return the client's saved state; empty if it has none, or has lost it and may start anew."""
        if not self.has_state or (self._may_start_afresh and not memory.has(state_version)):
            return {}
        return memory.read(state_version)

    def score(self, received: Mapping[str, Tensor]) -> dict[str, float]:
        """Return the metrics of the received model on the data that this site holds out."""
        _, buffers, integer_buffers = self.problem.initial_state()
        state = ModelState(received[MODEL], received.get(BUFFERS, buffers), integer_buffers)
        examples = self.problem.evaluation_sets["test"]
        metrics = LoopEngine(self.problem, workers=1).evaluate({"server": state}, {"test": examples})["server"]["test"]
        return {**metrics, "examples": len(examples)}

    def _cohort_of_one(self, received: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> CohortBuffers:
        """Return the buffers of a cohort of this client alone, with the received tensors and its saved state.

        ``saved`` is empty if the client has no state yet; it then starts with that of a new client.
        """
        weights, buffers, _ = self.problem.initial_state()
        algorithm = self.training.algorithm
        cohort_buffers = CohortBuffers.new(algorithm, len(weights), len(buffers), 1, weights)
        cohort_buffers.z.copy_(received[MODEL])
        for name, value in cohort_buffers.server.items():
            value.copy_(received[name])
        if GRADIENT in received:
            cohort_buffers.common_gradient.copy_(received[GRADIENT])
        for name, value in flat_state(algorithm.new_client(weights)).items():
            cohort_buffers.client_states[name][0].copy_(saved.get(name, value))
        cohort_buffers.statistics[0].copy_(saved.get(STATISTICS, received.get(BUFFERS, buffers)))
        return cohort_buffers

    @property
    def has_state(self) -> bool:
        """Whether the client keeps anything from round to round."""
        return self.training.own_statistics or any(self.training.algorithm.client_fields().values())

    @property
    def has_local_privacy(self) -> bool:
        """Whether the site protects its answers itself, and therefore counts them."""
        return self.training.privacy is not None and self.training.privacy.is_local


def _as_only_client(config: Config) -> Config:
    """Return the config of a site with its own data: all training examples belong to one client."""
    data = {"partition": "iid", "clients": 1, "validation": 0.0}
    return config.changed(data=data, federation={"clients_per_round": 1})
