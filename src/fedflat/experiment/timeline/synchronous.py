"""Timelines with virtual time, and synchronous rounds: all clients of a round start together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from fedflat.engines.round.contract import Cost, Engine
from fedflat.engines.round.plan import generator
from fedflat.errors import UserError
from fedflat.experiment.setup.timing import client_clock, floats_sent, policy_of
from fedflat.experiment.store.checkpoint import ServerState, TimelineState
from fedflat.experiment.timeline.timeline import ReadClient, Timeline, TimelineSetup, TrainedRound
from fedflat.timing import WAIT_SECONDS, Synchronous


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


class SynchronousTimeline(TimedTimeline):
    """Rounds in which all clients start together."""

    def __init__(self, setup: TimelineSetup) -> None:
        """Start at time 0; raises a ``UserError`` if no client can meet the deadline."""
        super().__init__(setup)
        policy, federation = policy_of(setup.config), setup.config.federation
        assert isinstance(policy, Synchronous)
        self._policy = policy
        self._duration, self._wasted_downloads = 0.0, 0  # of the next round; set by ``choose_cohort``
        if not self.clock.always_available and (federation.dropout or federation.sampling != "fixed"):
            raise UserError(
                f"federation.clock={federation.clock} decides who is available, which federation.dropout and "
                "federation.sampling=bernoulli also do; remove these, or the availability from the clock"
            )
        smallest = min(len(setup.indices[client]) for client in range(min(len(setup.indices), 1000)))
        fewest = setup.training.plan.planned_steps(smallest) if len(setup.indices) <= 1000 else 1
        policy.check(self.clock, len(setup.indices), 1 if federation.partial else fewest)

    def train(self, engine: Engine, server: ServerState, read_client: ReadClient) -> TrainedRound:
        result = super().train(engine, server, read_client)
        self.seconds += self._duration
        floats_down, _ = floats_sent(self.setup.config, self.setup.algorithm, self.setup.problem)
        return result._replace(wasted=Cost(floats_down=self._wasted_downloads * floats_down))

    def choose_cohort(self, round: int) -> list[int]:
        """Choose the clients whose updates count; sets the duration of the round, and how many others get the model."""
        setup, wanted = self.setup, self.sampler.clients_per_round
        size = self._policy.cohort_size(wanted, len(setup.indices))
        sampled = np.array(self.sample(round, size, self.seconds), dtype=np.int64)
        if not len(sampled):  # nobody is available
            self._duration, self._wasted_downloads = WAIT_SECONDS, 0
            return []
        plan, seed = setup.training.plan, setup.config.seed
        sizes = {client: len(setup.indices[client]) for client in sampled.tolist()}
        steps = np.array([plan.unlimited_steps(seed, round, client, size) for client, size in sizes.items()])
        positions, self._duration = self._policy.count(self.clock, sampled, steps, wanted)
        self._wasted_downloads = len(sampled) - len(positions)
        cohort: list[int] = sampled[positions].tolist()
        return cohort
