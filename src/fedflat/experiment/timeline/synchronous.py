"""Synchronous rounds: all clients of a round start together."""

from __future__ import annotations

import numpy as np

from fedflat.engines.round.contract import Cost, Engine
from fedflat.errors import UserError
from fedflat.experiment.setup.timing import floats_sent, policy_of
from fedflat.experiment.store.checkpoint import ServerState
from fedflat.experiment.timeline.timeline import ReadClient, TimedTimeline, TimelineSetup, TrainedRound
from fedflat.timing import WAIT_SECONDS, Synchronous


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
        if not len(sampled):  # no client is available
            self._duration, self._wasted_downloads = WAIT_SECONDS, 0
            return []
        plan, seed = setup.training.plan, setup.config.seed
        sizes = {client: len(setup.indices[client]) for client in sampled.tolist()}
        steps = np.array([plan.unlimited_steps(seed, round, client, size) for client, size in sizes.items()])
        positions, self._duration = self._policy.count(self.clock, sampled, steps, wanted)
        self._wasted_downloads = len(sampled) - len(positions)
        cohort: list[int] = sampled[positions].tolist()
        return cohort
