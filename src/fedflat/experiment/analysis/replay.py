"""A run at one moment, from which its next round can be trained again, to the bit, without touching its folder.

All that is random is a function of (seed, purpose, round, client), so the server's model and vectors and the clients' vectors are all that
a round needs. A run keeps them at its start, which every config gives again, and at its last checkpoint. A snapshot holds the server's
model alone: that is enough where neither server nor clients send or keep anything else, and refused otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedflat.algorithms import Algorithm, algorithm
from fedflat.algorithms.algorithm import States, flat_fields, flat_state, nested_state
from fedflat.algorithms.slot import State
from fedflat.data import Partition
from fedflat.engines.cpu.engine import LoopEngine
from fedflat.engines.problem.problem import Problem
from fedflat.engines.round.contract import Client, CohortRows, Engine, ModelState, Outcome
from fedflat.errors import UserError
from fedflat.experiment.config import Config
from fedflat.experiment.setup.engine import engine_for
from fedflat.experiment.setup.training import sampler_of, training_of
from fedflat.experiment.store.checkpoint import CHECKPOINT, require_rows, under
from fedflat.experiment.store.client_states import ClientStateStore
from fedflat.experiment.store.row_store import PastRowStore, RowStore
from fedflat.experiment.store.run_folder import RunFolder

Kept = tuple[Mapping[str, State], Tensor | None]
"""A client's vectors, and its own normalisation statistics where it keeps them."""


@dataclass(frozen=True)
class Moment:
    """A run after so many rounds: the server's model and vectors, and what each client keeps."""

    rounds: int
    model: ModelState
    states: States
    kept: Callable[[int], Kept]


class Replay:
    """Trains the next round of a moment, or moves on by it."""

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
        self.moment = start_of(self.algorithm, ModelState(*problem.initial()), config) if moment is None else moment
        self.engine: Engine = engine_for(config, problem) if workers is None else LoopEngine(problem, workers)
        self._training = training_of(config, self.algorithm, len(partition.clients))
        self._sampler = sampler_of(config, len(partition.clients))
        self._changed: dict[int, Kept] = {}

    @property
    def cohort(self) -> list[int]:
        """Who takes part in the next round."""
        return self.cohort_of(self.moment.rounds)

    def cohort_of(self, round: int) -> list[int]:
        """Who takes part in any round, counted from 0."""
        return self._sampler(self.config.seed, round)

    @property
    def z(self) -> Tensor:
        """The model that clients receive in the next round."""
        return self.algorithm.broadcast(self.moment.model.weights, self.moment.states)

    def members(self, numbers: Sequence[int] | None = None) -> list[Client]:
        """Some clients as they are before the next round, each once: its cohort, or any others."""
        chosen = self.cohort if numbers is None else list(dict.fromkeys(numbers))
        if numbers is not None and self.algorithm.drift.whole_gradient == "common":
            raise UserError(
                f"clients of {self.config.algorithm} train with the mean gradient of their cohort, so that others cannot take its place; "
                "look at the cohort, without naming clients"
            )
        for number in chosen:
            check_client(number, len(self.partition.clients))
        kept = [self._changed.get(number) or self.moment.kept(number) for number in chosen]
        return [Client(number, self.partition.clients[number], *one) for number, one in zip(chosen, kept, strict=True)]

    def train(self, members: list[Client]) -> Outcome:
        """Train clients for the next round, and change nothing by it."""
        moment = self.moment
        with torch.random.fork_rng(devices=[]):  # training seeds it, and it is the caller's
            return self.engine.train(self._training, moment.rounds, moment.model, moment.states, members)

    def advance(self) -> Outcome:
        """Train the cohort and take its round."""
        moment, outcome = self.moment, self.train(self.members())
        weights, states = self.algorithm.aggregate(outcome.returned, outcome.means, moment.states)
        self._changed |= {client.number: (client.state, client.statistics) for client in outcome.clients}
        model = ModelState(weights, outcome.buffers, outcome.integers)
        self.moment = replace(moment, rounds=moment.rounds + 1, model=model, states=states)
        return outcome

    def local_models(self, members: list[Client], outcome: Outcome) -> list[ModelState]:
        """The model that each client ended its round with."""
        return local_models(self.algorithm, members, outcome)


def local_models(algorithm: Algorithm, members: list[Client], outcome: Outcome) -> list[ModelState]:
    """The model that each client ended its round with; copies, which outlive the engine's rows."""
    return list(each_local_model(algorithm, members, outcome))


def each_local_model(algorithm: Algorithm, members: list[Client], outcome: Outcome) -> Iterator[ModelState]:
    """The same, one at a time."""
    z, rows = outcome.returned.z, rows_of(outcome)
    for client, displacement, buffers in zip(members, *rows, strict=True):
        yield ModelState(
            z + algorithm.drift.moved(displacement, client.state["drift"]), buffers.clone(), outcome.integers
        )


def rows_of(outcome: Outcome) -> CohortRows:
    """What each client ended with, where the engine shows it."""
    if outcome.rows is None:
        raise UserError(
            "this engine does not show what single clients send; use the loop or lanes engine (--set engine.name=loop)"
        )
    return outcome.rows


def check_client(number: int, clients: int) -> None:
    """Refuse a client that does not exist."""
    if not 0 <= number < clients:
        raise UserError(
            f"there is no client {number}; this run has {clients} clients, numbered from 0 to {clients - 1}"
        )


# --- moments of a run ------------------------------------------------------------------------------------------------------------


def start_of(algorithm: Algorithm, model: ModelState, config: Config) -> Moment:
    """Before the first round: everything is what it starts with."""
    keeping = ClientStateStore(algorithm, model, config.training.statistics == "own", lambda width: RowStore())
    return Moment(config.init_rounds, model, algorithm.new_server(model.weights), keeping.read)


def at_checkpoint(
    folder: RunFolder, algorithm: Algorithm, problem: Problem, config: Config, first: ModelState | None = None
) -> Moment:
    """At a run's last checkpoint; what clients start with comes from ``first``, the model before the first round (the problem's own)."""
    if not (folder.path / CHECKPOINT).exists():
        raise UserError(
            f"the run in {folder.path} has no checkpoint (yet), so that no round of it can be trained again"
        )
    saved, about = folder.read_tensors(CHECKPOINT)
    tensors = {name: tensor.to(problem.device) for name, tensor in saved.items()}
    model = ModelState(tensors["weights"], tensors["buffers"], under(tensors, "integers/"))
    past = folder.path / "state" / "clients"

    def rows(width: int) -> RowStore:
        store = PastRowStore(past, width, problem.dtype, about["rounds"]) if width and past.exists() else RowStore()
        if width:
            require_rows(folder, {past.name: store}, about)
        return store

    def kept(number: int) -> Kept:
        if folder.is_of_sites and (flat_fields(algorithm.client_fields()) or config.training.statistics == "own"):
            raise UserError(
                f"the clients of the run in {folder.path} keep their vectors at their sites; no round of it can be trained again"
            )
        return keeping.read(number)

    keeping = ClientStateStore(
        algorithm, first or ModelState(*problem.initial()), config.training.statistics == "own", rows
    )
    return Moment(about["rounds"], model, nested_state(under(tensors, "server/")), kept)


def at_model(
    rounds: int, model: ModelState, algorithm: Algorithm, config: Config, states: States | None = None
) -> Moment:
    """At a snapshot: the server's model, and its vectors where they were kept too; refused where clients' vectors are needed."""
    needed = needs_vectors(algorithm, config, states)
    if needed:
        raise UserError(
            f"{config.algorithm} needs {needed} to train round {rounds + 1} again, and they are kept at the last checkpoint only; "
            "look at the checkpoint, or log it while training (--flatness every=10,what=drift+clients)"
        )
    fresh = algorithm.new_client(model.weights)
    return Moment(rounds, model, states or algorithm.new_server(model.weights), lambda number: (fresh, None))


def needs_vectors(algorithm: Algorithm, config: Config, states: States | None = None) -> str:
    """What a snapshot of the server's model lacks for a round to be trained again, in words; empty where it lacks nothing."""
    if flat_fields(algorithm.client_fields()):
        return "its clients' vectors"
    if config.training.statistics == "own":
        return "its clients' normalisation statistics"
    fields = flat_fields(algorithm.server_fields())
    # What the drift keeps decides what is broadcast even where it is not sent itself; the server's optimiser only acts afterwards.
    used = [name for name, field in fields.items() if field.sent or name.startswith("drift.")]
    return "the server's vectors" if used and not flat_state(states or {}) else ""
