"""The base class of timelines, and synchronous rounds with or without virtual time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from fedflat.algorithms import Algorithm
from fedflat.engines.problem.problem import Problem
from fedflat.engines.round.contract import Client, Cost, Engine, Outcome, Training
from fedflat.engines.round.plan import generator
from fedflat.errors import UserError
from fedflat.experiment.config import Config
from fedflat.experiment.setup.engine import sampler_of
from fedflat.experiment.setup.timing import client_clock, floats_sent, has_time, policy_of
from fedflat.experiment.store.checkpoint import ServerState, TimelineState
from fedflat.timing import WAIT_SECONDS, Synchronous

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
    unused: Cost
    """Cost of clients whose updates do not count: they have received the model in vain."""


@dataclass(frozen=True)
class TimelineSetup:
    """What a timeline needs to know about a run.

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


class Timeline(ABC):
    """Decides who trains in each round, and keeps virtual time.

    Attributes:
        setup: what it needs to know about the run.
        clock: the clients' times.
        seconds: virtual time at the end of the last round.
        idle_rounds: number of rounds so far that made no progress.
        participants: numbers of the clients whose updates counted in the last round.
    """

    def __init__(self, setup: TimelineSetup) -> None:
        """Start at virtual time 0; raises a ``UserError`` if a trace does not describe all clients."""
        self.setup = setup
        self.clock = client_clock(setup.config, setup.algorithm, setup.problem)
        self.clock.clock.check(len(setup.indices))
        self.sampler = sampler_of(setup.config, len(setup.indices))
        self.seconds, self.idle_rounds = 0.0, 0
        self.participants: tuple[int, ...] = ()
        self._has_time = has_time(setup.config)
        self._digests = self.clock.clock.digests()

    @abstractmethod
    def train(self, engine: Engine, server: ServerState, read_client: ReadClient) -> TrainedRound:
        """Train the next round; ``server`` is the server before it."""

    @abstractmethod
    def upcoming(self, round: int) -> list[tuple[int, np.ndarray]]:
        """Numbers and examples of the clients that start from the model after ``round`` rounds, in training order."""

    def metrics(self) -> dict[str, Any]:
        """Virtual time for the history; empty for a run without it."""
        return {"virtual_seconds": self.seconds, "idle_rounds": self.idle_rounds} if self._has_time else {}

    def state(self) -> TimelineState:
        """The state for a checkpoint; empty for a run without virtual time."""
        values: dict[str, Any] = {"seconds": self.seconds, "idle_rounds": self.idle_rounds, "traces": self._digests}
        return TimelineState({}, values if self._has_time else {})

    def restore(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Continue from the state in a checkpoint; raises a ``UserError`` if a trace has changed since."""
        if not values:
            return
        changed = [path for path, digest in self._digests.items() if values["traces"].get(path) != digest]
        if changed:
            raise UserError(f"the trace {changed[0]} has changed since the run began; restore it to resume the run")
        self.seconds, self.idle_rounds = values["seconds"], values["idle_rounds"]

    def sample(self, round: int, size: int, time: float) -> list[int]:
        """Sample up to ``size`` clients for a round that starts at a time, among those that are available.

        If all clients are always available, the cohort is that of a run without a clock.
        """
        if self.clock.always_available:
            return replace(self.sampler, clients_per_round=size)(self.setup.config.seed, round)
        rng = generator(self.setup.config.seed, "cohort", round)
        return self.clock.choose(rng, len(self.setup.indices), size, time, set())


class SynchronousTimeline(Timeline):
    """Rounds in which all clients start together; by default, without virtual time."""

    def __init__(self, setup: TimelineSetup) -> None:
        """Start at time 0; raises a ``UserError`` if no client can meet the deadline."""
        super().__init__(setup)
        policy, federation = policy_of(setup.config), setup.config.federation
        assert isinstance(policy, Synchronous)
        self._policy = policy
        if not self.clock.always_available and (federation.dropout or federation.sampling != "fixed"):
            raise UserError(
                f"federation.clock={federation.clock} decides who is available, which federation.dropout and "
                "federation.sampling=bernoulli also do; remove these, or the availability from the clock"
            )
        self._cohorts: dict[int, tuple[list[int], float, int]] = {}  # of the next round; see ``_cohort``
        if self._has_time:
            smallest = min(len(setup.indices[client]) for client in range(min(len(setup.indices), 1000)))
            fewest = setup.training.plan.planned_steps(smallest) if len(setup.indices) <= 1000 else 1
            policy.check(self.clock, len(setup.indices), 1 if setup.config.federation.partial else fewest)

    def train(self, engine: Engine, server: ServerState, read_client: ReadClient) -> TrainedRound:
        numbers, seconds, unused = self._cohort(server.rounds)
        self._cohorts.clear()
        self.seconds += seconds
        self.participants = tuple(numbers)
        floats_down, _ = floats_sent(self.setup.config, self.setup.algorithm, self.setup.problem)
        wasted = Cost(floats_down=unused * floats_down)
        if not numbers:
            self.idle_rounds += 1
            return TrainedRound([], None, [], wasted)
        cohort = [read_client(number) for number in numbers]
        outcome = engine.train(self.setup.training, server.rounds, server.model, server.states, cohort)
        return TrainedRound(cohort, outcome, outcome.clients, wasted)

    def upcoming(self, round: int) -> list[tuple[int, np.ndarray]]:
        return [(number, self.setup.indices[number]) for number in self._cohort(round)[0]]

    def _cohort(self, round: int) -> tuple[list[int], float, int]:
        """Who counts in the next round, how long the round takes, and how many other clients received the model."""
        if round not in self._cohorts:
            self._cohorts = {round: self._counted(round) if self._has_time else (self._sampled(round), 0.0, 0)}
        return self._cohorts[round]

    def _sampled(self, round: int) -> list[int]:
        """The clients that the policy samples for the next round."""
        clients = len(self.setup.indices)
        size = self._policy.cohort_size(self.sampler.clients_per_round, clients)
        return self.sample(round, size, self.seconds)

    def _counted(self, round: int) -> tuple[list[int], float, int]:
        """``_cohort`` of a run with virtual time."""
        sampled = np.array(self._sampled(round), dtype=np.int64)
        if not len(sampled):  # nobody is available
            return [], WAIT_SECONDS, 0
        plan, seed, indices = self.setup.training.plan, self.setup.config.seed, self.setup.indices
        sizes = {client: len(indices[client]) for client in sampled.tolist()}
        steps = np.array([plan.unlimited_steps(seed, round, client, size) for client, size in sizes.items()])
        positions, seconds = self._policy.count(self.clock, sampled, steps, self.sampler.clients_per_round)
        return sampled[positions].tolist(), seconds, len(sampled) - len(positions)


def timeline_for(setup: TimelineSetup) -> Timeline:
    """Build the timeline of a run; raises a ``UserError`` if its clock or policy does not suit its other settings."""
    if not policy_of(setup.config).is_asynchronous:
        return SynchronousTimeline(setup)
    from fedflat.experiment.timeline.asynchronous import AsynchronousTimeline  # imports this module

    return AsynchronousTimeline(setup)
