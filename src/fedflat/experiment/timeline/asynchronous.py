"""Asynchronous training: clients start from different versions of the server model and arrive at any time.

The simulation of arrivals needs no weights. All clients that start from version v of the server model are therefore
trained together, when the buffer is full and the server is about to replace that version. What clients in flight will
send is kept until they arrive.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedflat.algorithms.algorithm import flat_fields, flat_state, nested_state
from fedflat.algorithms.slot import CohortMeans
from fedflat.engines.round.aggregation import uniform_weights, weights_by_samples
from fedflat.engines.round.contract import Client, Cost, Engine, GroupEngine, Outcome
from fedflat.experiment.setup.timing import check_asynchronous, policy_of
from fedflat.experiment.store.checkpoint import ServerState, TimelineState, with_prefix
from fedflat.experiment.timeline.timeline import ReadClient, TimedTimeline, TimelineSetup, TrainedRound
from fedflat.randomness import generator
from fedflat.timing import WAIT_SECONDS, ArrivalSimulation, Asynchronous, Flight, ServerUpdate, SimulationState


@dataclass(frozen=True)
class ClientUpdates:
    """What one client, or several that started and arrived together, send to the server.

    Attributes:
        flights: their flights, in order of arrival.
        samples: their numbers of examples.
        tensors: means over the clients, by name: ``displacement``, ``buffers``, ``loss``, ``sent/slot.field`` and
            ``integers/name``. Messages that are relative to a server vector (``Slot.relative_messages``) are stored as
            absolute values. Also, of several clients, ``uniform`` and ``direction`` as in ``CohortMeans``; of one
            client, its sum of learning rates ``lr_sum``, from which both follow.
        cost: what their training cost.
        outcome: what the engine returned, unless the updates were read from a checkpoint.
    """

    flights: list[Flight]
    samples: list[int]
    tensors: dict[str, Tensor]
    cost: Cost
    outcome: Outcome | None = None

    @classmethod
    def of(cls, flights: list[Flight], outcome: Outcome, server: ServerState, setup: TimelineSetup) -> ClientUpdates:
        """Keep what is needed of an engine's outcome.

        Args:
            flights: the clients' flights.
            outcome: what the engine returned.
            server: the server that the clients started from.
            setup: what the timeline knows about the run.
        """
        cohort_means = outcome.cohort_means
        tensors = {
            "displacement": cohort_means.displacement,
            "loss": outcome.loss,
            **{f"sent/{name}": m for name, m in _absolute(flat_state(outcome.message_means), server, setup).items()},
        }
        if len(flights) > 1:
            tensors |= {"uniform": cohort_means.uniform, "direction": cohort_means.direction}
        else:
            assert outcome.lr_sums is not None
            tensors["lr_sum"] = outcome.lr_sums[0]
        if not setup.training.own_statistics:  # otherwise the outcome has the server's
            tensors["buffers"] = outcome.buffers
            tensors |= {f"integers/{name}": value for name, value in outcome.integer_buffers.items()}
        samples = [len(client.indices) for client in outcome.clients]
        return cls(flights, samples, tensors, outcome.cost, outcome)

    @property
    def version(self) -> int:
        """Version of the server model that the clients started from."""
        return self.flights[0].version

    def mean(self, name: str) -> Tensor:
        """A mean over the clients by its name in ``tensors``; of one client, also ``uniform`` and ``direction``."""
        if name in self.tensors:
            return self.tensors[name]
        displacement = self.tensors["displacement"]
        # A direction is a displacement divided by -H_i, here as a sum of rows, without -0.
        return displacement if name == "uniform" else displacement * (-1 / self.tensors["lr_sum"]) + 0.0


class AsynchronousTimeline(TimedTimeline):
    """Keeps ``clients_per_round`` clients in flight; a round is one update of the server model.

    Clients draw their batches by the version from which they start. A client that starts from one version several
    times draws other batches each time: its k-th repetition uses the random numbers of client ``number + k * clients``.
    """

    def __init__(self, setup: TimelineSetup) -> None:
        """Start at time 0; raises a ``UserError`` if a setting does not allow asynchronous training."""
        check_asynchronous(setup.config, setup.algorithm)
        super().__init__(setup)
        policy = policy_of(setup.config)
        assert isinstance(policy, Asynchronous)
        self._policy, self._clients = policy, len(setup.indices)
        fields = setup.algorithm.client_fields()
        self._has_client_state = setup.training.own_statistics or any(fields.values())
        self._simulation = ArrivalSimulation(
            self.sampler.clients_per_round,
            policy.buffer_size,
            self._choose,
            lambda version, time: self.sample(version, self.sampler.clients_per_round, time),
            self._seconds,
            WAIT_SECONDS,
            setup.config.init_rounds,
        )
        # The state before the next update, and the update.
        self._next: tuple[SimulationState, ServerUpdate] | None = None
        self._pending: dict[Flight, ClientUpdates] = {}  # trained, not yet part of an update; each of one client
        self._starts: dict[int, Tensor] = {}  # what pending clients started from, by version, if models are mixed
        self._staleness = [0, 0]  # sum, and number of arrivals, since the last evaluation

    def _choose(self, draw: int, count: int, time: float, busy: set[int]) -> list[int]:
        """Draw replacements for clients that have arrived; see ``ArrivalSimulation``."""
        rng = generator(self.setup.config.seed, "replacements", draw)
        return self.clock.choose(rng, self._clients, count, time, busy)

    def _seconds(self, version: int, client: int, repetition: int) -> float:
        """How long a client takes from start to arrival; see ``ArrivalSimulation``."""
        setup, draws_as = self.setup, client + repetition * self._clients
        size = len(setup.indices[client])
        steps = setup.training.plan.unlimited_steps(setup.config.seed, version, draws_as, size)
        return float(self.clock.seconds(np.array([client]), np.array([steps]))[0])

    def _peek(self) -> ServerUpdate:
        """The next update; the state before it stays available for checkpoints."""
        if self._next is None:
            before = self._simulation.state.copy()
            self._next = before, self._simulation.next_update()
        return self._next[1]

    def upcoming(self, round: int) -> list[tuple[int, np.ndarray]]:
        flights = self._peek().dispatched
        return [(self._draws_as(flight), self.setup.indices[flight.client]) for flight in flights]

    def train(self, engine: Engine, server: ServerState, read_client: ReadClient) -> TrainedRound:
        assert isinstance(engine, GroupEngine)  # not that of a deployment, which runs in real time
        update = self._peek()
        self._next = None
        together, trained = self._train_dispatched(engine, server, update, read_client)
        self.seconds = update.time
        self.participants = tuple(sorted({flight.client for flight in update.arrived}))
        if not update.arrived:
            self.idle_rounds += 1
            return TrainedRound([], None, trained, Cost())
        for flight in update.arrived:
            self._staleness[0] += update.staleness(flight)
            self._staleness[1] += 1
        members = {flight for group in together for flight in group.flights}
        groups = together + [self._pending.pop(flight) for flight in update.arrived if flight not in members]
        outcome = self._combine(server, update, groups, trained)
        needed = {flight.version for flight in self._pending}
        self._starts = {version: z for version, z in self._starts.items() if version in needed}
        return TrainedRound([], outcome, trained, Cost())

    def _train_dispatched(
        self, engine: GroupEngine, server: ServerState, update: ServerUpdate, read_client: ReadClient
    ) -> tuple[list[ClientUpdates], list[Client]]:
        """Train all clients that started from the current version.

        Returns:
            The updates of those that have arrived by now, one for each repetition; and all trained clients with their
            new states. What the others will send is kept in ``_pending``.
        """
        arrived, together, trained = set(update.arrived), list[ClientUpdates](), dict[int, Client]()
        flights = sorted(update.dispatched, key=lambda flight: flight.repetition)
        # A client's next repetition starts from the state that the last one left; without state, all train together.
        for _, members in groupby(flights, lambda flight: self._has_client_state and flight.repetition):
            batch = list(members)
            landed = [flight for flight in batch if flight in arrived]
            groups = [list(group) for _, group in groupby(landed, lambda flight: flight.repetition)]
            groups += [[flight] for flight in batch if flight not in arrived]
            clients = [[self._client(flight, trained, read_client) for flight in group] for group in groups]
            outcomes = engine.train_groups(self.setup.training, update.version, server.model, server.states, clients)
            for group, outcome in zip(groups, outcomes, strict=True):
                updates = ClientUpdates.of(group, outcome, server, self.setup)
                for flight, client in zip(group, outcome.clients, strict=True):
                    trained[flight.client] = client._replace(number=flight.client)
                if group[0] in arrived:
                    together.append(updates)
                    continue
                self._pending[group[0]] = replace(updates, outcome=None)  # frees the engine's tensors
                if self._policy.mixes_models:
                    self._starts[update.version] = outcome.cohort_means.z
        return together, list(trained.values())

    def _client(self, flight: Flight, trained: dict[int, Client], read_client: ReadClient) -> Client:
        """The client of a flight, with the state that its last training left; its number determines its draws."""
        client = trained.get(flight.client) or read_client(flight.client)
        return client._replace(number=self._draws_as(flight))

    def _draws_as(self, flight: Flight) -> int:
        """The client number that determines the random numbers of a flight."""
        return flight.client + flight.repetition * self._clients

    def _combine(
        self, server: ServerState, update: ServerUpdate, groups: list[ClientUpdates], clients: list[Client]
    ) -> Outcome:
        """The outcome of a full buffer.

        Displacements are scaled by their staleness and their clients' shares of the buffer. Directions, which estimate
        gradients, are averaged with the same weights, normalised to sum to 1. Messages, such as changes of control
        variates, are averaged without staleness weights. Those that are relative to a server vector are made relative
        to its current value. BatchNorm statistics are mixed into the current ones with the clients' shares times their
        staleness weights.

        Args:
            server: the server before the update.
            update: the update.
            groups: what the buffer contains.
            clients: the clients that were trained, with their new states.
        """
        ages = [update.staleness(group.flights[0]) for group in groups]
        scales, weights = [self._policy.scale(tau) for tau in ages], [self._policy.weight(tau) for tau in ages]
        first, is_current = groups[0], groups[0].version == update.version
        if len(groups) == 1 and scales == weights == [1.0] and is_current and first.outcome:
            return replace(first.outcome, clients=clients, rows=None)
        training = self.setup.training
        samples = [count for group in groups for count in group.samples]
        shares = {
            "uniform": _by_group(groups, uniform_weights(len(samples))),
            "samples": _by_group(groups, weights_by_samples(samples)),
            "aggregation": _by_group(groups, training.aggregation.weights(samples)),
        }
        x = server.model.weights
        z = training.algorithm.broadcast(x, server.states)
        displacement = _weighted_sum(groups, "displacement", shares["aggregation"], scales)
        if self._policy.mixes_models and not is_current:  # otherwise the displacement is y - z
            displacement = scales[0] * (self._starts[first.version] + first.tensors["displacement"] - z)
        directed = [p * weight for p, weight in zip(shares["uniform"], weights, strict=True)]
        cohort_means = CohortMeans(
            x=x,
            z=z,
            displacement=displacement,
            uniform=_weighted_sum(groups, "uniform", shares["uniform"], scales),
            direction=_weighted_sum(groups, "direction", [p / sum(directed) for p in directed]),
            mean={},
            share=len(samples) / training.clients,
            cohort_size=len(samples),
            round=update.version,
        )
        fields = flat_fields(training.algorithm.message_fields())
        absolute = {
            name: _weighted_sum(groups, f"sent/{name}", shares[field.weighting]) for name, field in fields.items()
        }
        buffers, integer_buffers = server.model.buffers, server.model.integer_buffers
        if not training.own_statistics:
            mixed = [p * weight for p, weight in zip(shares["aggregation"], weights, strict=True)]
            buffers = _weighted_sum(groups, "buffers", mixed, start=(1 - sum(mixed)) * buffers)
            integer_buffers = with_prefix(first.tensors, "integers/")
        cost = sum((group.cost for group in groups), Cost())
        passes = [group.cost.backward_passes / cost.backward_passes for group in groups]
        return Outcome(
            cohort_means=cohort_means,
            message_means=nested_state(_absolute(absolute, server, self.setup, -1.0)),
            clients=clients,
            buffers=buffers,
            integer_buffers=integer_buffers,
            loss=_weighted_sum(groups, "loss", passes),
            cost=cost,
        )

    def metrics(self) -> dict[str, Any]:
        """Virtual time and the mean staleness since the last evaluation, which is then counted anew."""
        total, count = self._staleness
        self._staleness = [0, 0]
        return super().metrics() | {"staleness": total / count if count else None}

    def state(self) -> TimelineState:
        """Virtual time, the schedule, and what the clients in flight will send."""
        before = self._next[0] if self._next else self._simulation.state
        tensors = {f"start/{version}": z for version, z in self._starts.items()}
        pending = []
        for number, (flight, updates) in enumerate(self._pending.items()):
            tensors |= {f"{number}/{name}": value for name, value in updates.tensors.items()}
            pending.append({"flight": flight, "samples": updates.samples, "cost": asdict(updates.cost)})
        _, values = super().state()
        values |= {"schedule": before.to_json(), "pending": pending, "staleness": self._staleness}
        return TimelineState(tensors, values)

    def restore(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        super().restore(tensors, values)
        self._simulation.state, self._next = SimulationState.from_json(values["schedule"]), None
        self._staleness = list(values["staleness"])
        self._starts = {int(version): z for version, z in with_prefix(tensors, "start/").items()}
        self._pending = {}
        for number, entry in enumerate(values["pending"]):
            flight = Flight(*entry["flight"])
            updates = with_prefix(tensors, f"{number}/")
            self._pending[flight] = ClientUpdates([flight], entry["samples"], updates, Cost(**entry["cost"]))


def _absolute(
    messages: Mapping[str, Tensor], server: ServerState, setup: TimelineSetup, sign: float = 1.0
) -> dict[str, Tensor]:
    """Messages by ``slot.field``, plus (or, with ``sign`` -1, minus) the server vectors that they are relative to."""
    states = flat_state(server.states)
    relative = {
        f"{slot}.{name}": states[f"{slot}.{field}"]
        for slot, part in setup.algorithm.slots()
        for name, field in part.relative_messages.items()
    }
    return {name: m + sign * relative[name] if name in relative else m for name, m in messages.items()}


def _by_group(groups: list[ClientUpdates], weights: list[float]) -> list[float]:
    """The total weight of each group, from the weights of the clients, which are in the order of the groups."""
    totals, first = [], 0
    for group in groups:
        totals.append(sum(weights[first : first + len(group.flights)]))
        first += len(group.flights)
    return totals if len(groups) > 1 else [1.0]  # a sum of weights need not be exactly 1


def _weighted_sum(groups: list[ClientUpdates], name: str, *factors: list[float], start: Tensor | None = None) -> Tensor:
    """``start`` plus a mean of each group times the product of its ``factors``, added in order."""
    total = start
    for group, *group_factors in zip(groups, *factors, strict=True):
        value, weight = group.mean(name), math.prod(group_factors)
        total = weight * value if total is None else torch.add(total, value, alpha=weight)
    assert total is not None
    return total
