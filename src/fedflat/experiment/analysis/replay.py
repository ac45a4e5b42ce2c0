"""Replays a round of a run bit for bit, without touching its folder.

All randomness is a function of (seed, purpose, round, client), so a round depends only on the server model and on the
server and client state. Together these form a ``Moment``. All three are known at the start of a run and at its last
checkpoint. At other rounds, only the saved model may be known. It suffices for algorithms without such state; others
are rejected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedflat.algorithms import Algorithm, algorithm
from fedflat.algorithms.algorithm import States, flat_fields
from fedflat.algorithms.state import State
from fedflat.data import Partition
from fedflat.engines.problem.problem import Problem
from fedflat.engines.problem.residuals import add_products
from fedflat.engines.round.contract import Client, CohortRows, Engine, ModelState, Outcome
from fedflat.engines.round.server_step import server_step
from fedflat.errors import UserError
from fedflat.experiment.config import Config
from fedflat.experiment.setup.engine import decide_compile, engine_for, sampler_of, training_of
from fedflat.experiment.setup.timing import depends_on_time
from fedflat.experiment.store.checkpoint import (
    ServerState,
    newest_checkpoint,
    require_rows,
    require_same_settings,
    require_same_shapes,
)
from fedflat.experiment.store.client_states import ClientStateStore, PastRowStore, RowStore
from fedflat.experiment.store.run_folder import RunFolder

StateAndStatistics = tuple[Mapping[str, State], Tensor | None]
"""A client's state, and its BatchNorm statistics if it keeps them (SiLoBN)."""


@dataclass(frozen=True)
class Moment:
    """A run after ``rounds`` rounds: everything that the next round depends on."""

    rounds: int
    """Number of completed rounds."""
    model: ModelState
    """The server model."""
    states: States
    """Server state of the algorithm, by slot."""
    client_state: Callable[[int], StateAndStatistics]
    """Reads the state of a client, given its number."""


class Replay:
    """Replays rounds of a run: ``train`` repeats the round after a ``Moment``, and ``advance`` also completes it.

    Args:
        config: the experiment.
        problem: its problem, on the device to train on.
        partition: its partition.
        moment: where to begin; default: before the first round.
        workers: train with the loop engine and this many workers; default: with the engine of the config.
    """

    def __init__(
        self,
        config: Config,
        problem: Problem,
        partition: Partition,
        moment: Moment | None = None,
        workers: int | None = None,
    ) -> None:
        self.config, self.problem, self.partition = config, problem, partition
        self.algorithm: Algorithm = algorithm(config.algorithm)
        self.moment = moment or moment_at_start(self.algorithm, ModelState(*problem.initial_state()), config)
        name = "auto" if config.engine.name == "ray" else config.engine.name
        changes: dict[str, Any] = {"name": name} if workers is None else {"name": "loop", "workers": workers}
        changes["ray_address"] = None
        self.engine: Engine = engine_for(decide_compile(config.changed(engine=changes), problem, partition), problem)
        self.training = training_of(config, self.algorithm, len(partition.clients), problem)
        self._sampler = sampler_of(config, len(partition.clients))
        # State of the clients that ``advance`` has trained; it overrides the moment's ``client_state``.
        self._changed: dict[int, StateAndStatistics] = {}

    @property
    def cohort(self) -> list[int]:
        """Numbers of the clients that participate in the next round."""
        return self.cohort_of(self.moment.rounds)

    def cohort_of(self, round: int) -> list[int]:
        """Numbers of the clients that participate in round ``round``, counted from 0.

        Raises a ``UserError`` if they depend on virtual time, which only the run itself knows.
        """
        if depends_on_time(self.config):
            raise UserError(
                f"the cohorts of this run depend on its clock and policy ({self.config.federation.policy}), "
                "so its rounds cannot be repeated; choose clients by number, or a run without virtual time"
            )
        return self._sampler(self.config.seed, round)

    @property
    def z(self) -> Tensor:
        """The weights that clients receive in the next round, [parameters]."""
        return self.algorithm.broadcast(self.moment.model.weights, self.moment.states)

    def clients(self, numbers: Sequence[int] | None = None) -> list[Client]:
        """Clients with their data and their state before the next round.

        Args:
            numbers: client numbers; default: the cohort of the next round.
        """
        # "common": every client uses the mean full-batch gradient of the cohort, so its update depends on the others.
        if numbers is not None and self.algorithm.drift.full_gradient == "common":
            raise UserError(
                f"clients of {self.config.algorithm} use the mean gradient of their cohort; "
                "measure the cohort instead of chosen clients"
            )
        clients = []
        for number in dict.fromkeys(self.cohort if numbers is None else numbers):
            check_client(number, len(self.partition.clients))
            state, statistics = self._changed.get(number) or self.moment.client_state(number)
            clients.append(Client(number, self.partition.clients[number], state, statistics))
        return clients

    def train(self, clients: list[Client]) -> Outcome:
        """Train clients for the next round without changing the moment."""
        moment = self.moment
        with torch.random.fork_rng(devices=[]):  # training reseeds the caller's generator
            return self.engine.train(self.training, moment.rounds, moment.model, moment.states, clients)

    def advance(self) -> Outcome:
        """Train the cohort of the next round and advance the moment by one round."""
        moment, outcome = self.moment, self.train(self.clients())
        model, states = server_step(self.algorithm, self.problem, outcome, moment.states)
        self._changed |= {client.number: (client.state, client.statistics) for client in outcome.clients}
        self.moment = replace(moment, rounds=moment.rounds + 1, model=model, states=states)
        return outcome

    def local_models(self, clients: list[Client], outcome: Outcome) -> list[ModelState]:
        """Return each client's model after local training, as copies that outlive the engine's buffers."""
        return list(each_local_model(self.algorithm, self.problem, clients, outcome))


def each_local_model(
    algorithm: Algorithm, problem: Problem, clients: list[Client], outcome: Outcome
) -> Iterator[ModelState]:
    """Yield each client's model after local training, one at a time to save memory."""
    rows = rows_of(outcome)
    for client, displacement, buffers in zip(clients, rows.displacements, rows.buffers, strict=True):
        start = algorithm.local_start(outcome.cohort_means.z, client.state)
        weights = start + algorithm.drift.local_displacement(displacement, client.state["drift"])
        local_buffers = buffers.clone()
        add_products(problem, local_buffers, weights, -1.0)  # clients have added them for the server
        yield ModelState(weights, local_buffers, outcome.integer_buffers)


def rows_of(outcome: Outcome) -> CohortRows:
    """Each client's displacement and buffers; raises a ``UserError`` if the engine does not expose them."""
    if outcome.rows is None:
        raise UserError(
            "this engine does not expose single clients' updates; use the loop or lanes engine (--engine loop)"
        )
    return outcome.rows


def check_client(number: int, clients: int) -> None:
    """Reject a client number that does not exist."""
    if not 0 <= number < clients:
        raise UserError(f"unknown client {number}; this run has {clients} clients, numbered 0 to {clients - 1}")


def moment_at_start(algorithm: Algorithm, model: ModelState, config: Config) -> Moment:
    """Return the state of a run before its first round, from which that round can be replayed."""
    own_statistics = config.training.statistics == "own"
    # The store is in memory and empty, so every client has its initial state.
    client_states = ClientStateStore(algorithm, model, own_statistics, lambda width: RowStore())
    return Moment(config.init_rounds, model, algorithm.new_server(model.weights), client_states.read)


def moment_at_checkpoint(
    folder: RunFolder, algorithm: Algorithm, problem: Problem, config: Config, initial: ModelState | None = None
) -> Moment:
    """Return the state of a run at its last checkpoint, from which the next round can be replayed.

    Args:
        folder: the run folder.
        algorithm: the run's algorithm.
        problem: the run's problem.
        config: the run's config.
        initial: the initial model, which defines the initial client state; default: the problem's.
    """
    checkpoint = newest_checkpoint(folder)
    if checkpoint is None:
        raise UserError(f"the run in {folder.path} has no checkpoint yet, so its rounds cannot be replayed")
    header = checkpoint.header
    require_same_settings(folder, folder.config(), header)
    initial = initial or ModelState(*problem.initial_state())
    require_same_shapes(folder, checkpoint.tensors, initial)
    tensors = {name: tensor.to(problem.device) for name, tensor in checkpoint.tensors.items()}
    server = ServerState.from_checkpoint(tensors, header)
    own_statistics = config.training.statistics == "own"
    rows_file = folder.path / "state" / "clients"

    def open_rows(width: int) -> RowStore:
        """Open the clients' saved state as of the checkpoint, one row of ``width`` numbers per client."""
        if not width:  # clients have no state
            return RowStore()
        has_rows = rows_file.exists()
        store = PastRowStore(rows_file, width, problem.dtype, header["rounds"]) if has_rows else RowStore()
        require_rows(folder, {rows_file.name: store}, header)
        return store

    client_states = ClientStateStore(algorithm, initial, own_statistics, open_rows)

    def client_state(number: int) -> StateAndStatistics:
        """A client's state and BatchNorm statistics as of the checkpoint.

        Raises a ``UserError`` for a run on real sites whose clients keep either of them to themselves.
        """
        if folder.has_real_sites and (flat_fields(algorithm.client_fields()) or own_statistics):
            raise UserError(
                f"the client state of the run in {folder.path} is at its sites, so its rounds cannot be replayed"
            )
        return client_states.read(number)

    return Moment(server.rounds, server.model, server.states, client_state)


def moment_at_model(rounds: int, model: ModelState, algorithm: Algorithm, config: Config) -> Moment:
    """Return the state of a run after ``rounds`` rounds, made from the model saved then, to replay the next round.

    Raises a ``UserError`` if the algorithm needs state that is not saved with models.
    """
    missing = missing_state(algorithm, config)
    if missing:
        raise UserError(
            f"{config.algorithm} needs {missing} to replay round {rounds + 1}, which only the last checkpoint has; "
            "use the checkpoint, or measure during training (--flatness every=10,what=drift+clients)"
        )
    client = algorithm.new_client(model.weights)
    return Moment(rounds, model, algorithm.new_server(model.weights), lambda number: (client, None))


def missing_state(algorithm: Algorithm, config: Config) -> str:
    """Describe the state that replaying a round needs in addition to a saved server model; empty if there is none."""
    if flat_fields(algorithm.client_fields()):
        return "its client state"
    if config.training.statistics == "own":
        return "its clients' BatchNorm statistics"
    # Drift state affects the broadcast even if it is not sent; the server optimiser acts only after the round.
    for name, field in flat_fields(algorithm.server_fields()).items():
        if field.sent or name.startswith("drift."):
            return "its server state"
    return ""
