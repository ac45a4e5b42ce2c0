"""The timeline of a run without virtual time, and the base class of those with virtual time."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from fedflat.algorithms import Algorithm
from fedflat.engines.problem.problem import Problem
from fedflat.engines.round.contract import Client, Cost, Engine, Outcome, Training
from fedflat.errors import UserError
from fedflat.experiment.config import Config
from fedflat.experiment.setup.engine import sampler_of
from fedflat.experiment.setup.timing import client_clock
from fedflat.experiment.store.checkpoint import ServerState, TimelineState
from fedflat.randomness import generator

ReadClient = Callable[[int], Client]
"""Returns a client with its examples and state, given its number."""


class TrainedRound(NamedTuple):
    """The result of a round."""

    cohort: list[Client]
    """The clients whose updates count, as they were before the round."""
    outcome: Outcome | None
    """What they returned; None if the round made no progress because no update counts."""
    trained: list[Client]
    """All clients that have trained, with their new states."""
    wasted: Cost
    """Cost of the clients that received the model, but whose updates do not count."""


@dataclass(frozen=True)
class TimelineSetup:
    """The parts of a run that its timeline reads.

    Attributes:
        config: the experiment.
        algorithm: its algorithm.
        training: how clients train.
        problem: model, task and data.
        indices: positions of each client's examples in the training set.
    """

    config: Config
    algorithm: Algorithm
    training: Training
    problem: Problem
    indices: Sequence[np.ndarray]


class Timeline:
    """Decides who trains in each round: the clients that the sampler draws, without virtual time.

    Attributes:
        setup: the parts of the run that it reads.
        sampler: draws cohorts.
        idle_rounds: number of rounds so far that made no progress.
        participants: numbers of the clients whose updates counted in the last round.
    """

    def __init__(self, setup: TimelineSetup) -> None:
        self.setup, self.idle_rounds = setup, 0
        self.sampler = sampler_of(setup.config, len(setup.indices))
        privacy = setup.training.privacy
        # Sites know the seed of the run, but privacy is accounted for cohorts that nobody can predict.
        self._cohort_seed = secrets.randbits(64) if privacy and privacy.is_secure else setup.config.seed
        self.participants: tuple[int, ...] = ()
        self._sampled: tuple[int, list[int]] | None = None  # the next round and its cohort, once sampled

    def train(self, engine: Engine, server: ServerState, read_client: ReadClient) -> TrainedRound:
        """Train the next round; ``server`` is the server before it."""
        self.participants = tuple(self._cohort(server.rounds))
        if not self.participants:
            self.idle_rounds += 1
            return TrainedRound([], None, [], Cost())
        cohort = [read_client(number) for number in self.participants]
        outcome = engine.train(self.setup.training, server.rounds, server.model, server.states, cohort)
        return TrainedRound(cohort, outcome, outcome.clients, Cost())

    def upcoming(self, round: int) -> list[tuple[int, np.ndarray]]:
        """Numbers and examples of the clients that start from the model after ``round`` rounds, in training order."""
        return [(number, self.setup.indices[number]) for number in self._cohort(round)]

    def _cohort(self, round: int) -> list[int]:
        """Sample the cohort of the next round, unless it is known already."""
        if self._sampled is None or self._sampled[0] != round:
            self._sampled = round, self.choose_cohort(round)
        return self._sampled[1]

    def choose_cohort(self, round: int) -> list[int]:
        """Numbers of the clients whose updates count in the next round, in ascending order."""
        return self.sample(round, self.sampler.clients_per_round, 0.0)

    def sample(self, round: int, size: int, time: float) -> list[int]:
        """Sample up to ``size`` clients for a round that starts at a virtual time."""
        return replace(self.sampler, clients_per_round=size)(self._cohort_seed, round)

    def metrics(self) -> dict[str, Any]:
        """Values for the history: none without virtual time."""
        return {}

    def state(self) -> TimelineState:
        """The state for a checkpoint: empty without virtual time."""
        return TimelineState({}, {})

    def restore(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Continue from the state in a checkpoint."""


class TimedTimeline(Timeline):
    """Keeps virtual time.

    Attributes:
        clock: the clients' times.
        seconds: virtual time at the end of the last round.
    """

    def __init__(self, setup: TimelineSetup) -> None:
        """Start at virtual time 0; raises a ``UserError`` if a trace does not describe all clients."""
        super().__init__(setup)
        self.seconds = 0.0
        self.clock = client_clock(setup.config, setup.algorithm, setup.problem)
        self.clock.clock.check(len(setup.indices))
        self._digests = self.clock.clock.digests()

    def metrics(self) -> dict[str, Any]:
        return {"virtual_seconds": self.seconds, "idle_rounds": self.idle_rounds}

    def state(self) -> TimelineState:
        values = {"seconds": self.seconds, "idle_rounds": self.idle_rounds, "traces": self._digests}
        return TimelineState({}, values)

    def restore(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Continue from the state in a checkpoint; raises a ``UserError`` if a trace has changed since."""
        changed = [path for path, digest in self._digests.items() if values["traces"].get(path) != digest]
        if changed:
            raise UserError(f"the trace {changed[0]} has changed since the run began; restore it to resume the run")
        self.seconds, self.idle_rounds = values["seconds"], values["idle_rounds"]

    def sample(self, round: int, size: int, time: float) -> list[int]:
        """Sample clients among those that are available; if all always are, as in a run without a clock."""
        if self.clock.always_available:
            return super().sample(round, size, time)
        rng = generator(self.setup.config.seed, "cohort", round)
        return self.clock.choose(rng, len(self.setup.indices), size, time, set())
