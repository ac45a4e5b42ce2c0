"""Client states in Ray's object store, on the node that trained the client, with a copy in the driver.

The driver fetches copies while workers train the next round. If a node is lost before its states were copied, their
clients repeat the round from their previous states, which the driver has, and the round's broadcast.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch

from fedflat.algorithms.algorithm import flat_fields
from fedflat.engines.problem.problem import Problem
from fedflat.engines.ray.results import RoundContext
from fedflat.engines.ray.scheduling import WorkerHandle, WorkItem
from fedflat.engines.ray.worker_pool import WorkerPool
from fedflat.engines.round.cohort_buffers import Arrays, state_from_arrays, state_to_arrays
from fedflat.engines.round.contract import Client, RemoteState, Training

SHARE_OF_OBJECT_STORE = 0.3
"""Share of the cluster's object store that client states may take; those of the last round may take more."""
COPIED_BYTES = 2**26
"""Bytes of states that the driver fetches at a time."""


@dataclass
class Traffic:
    """Statistics of the client states that were sent over the network.

    Attributes:
        states: number of states sent to a node that did not have them.
        copied: bytes of state copied to the driver.
        lost: number of states that were lost before they were copied, and computed again.
    """

    states: int = 0
    copied: int = 0
    lost: int = 0


class Place(NamedTuple):
    """Where a state is stored: Ray's reference to the states of several clients, a row of them, and Ray's node id."""

    ref: Any
    row: int
    node: str


class StoredState(RemoteState):
    """A client's state in the object store of a node; ``place`` is None if it is no longer stored."""

    def __init__(self, fetch: Callable[[], None], place: Place) -> None:
        """Refer to a state; ``fetch`` copies it to the driver."""
        super().__init__(fetch)
        self.place: Place | None = place


class StoredStates:
    """The latest states of clients: where they are, and copies of them.

    Args:
        pool: returns the current workers, which may change.
        retrain: trains some clients of a round again and returns their new states' references and nodes.
        max_bytes: bytes of states to keep in the object store; those of the oldest rounds are dropped first.
    """

    def __init__(
        self,
        pool: Callable[[], WorkerPool],
        retrain: Callable[[RoundContext, list[Client]], list[Place]],
        max_bytes: float,
    ) -> None:
        """Start without any state."""
        self._pool, self._retrain, self._max_bytes = pool, retrain, max_bytes
        self._rounds: deque[list[weakref.ref[StoredState]]] = deque()  # states by round, oldest first
        self._context: RoundContext | None = None  # the last round
        self._pending: list[tuple[Client, StoredState]] = []  # its new states that have not been copied, by client
        self._state_bytes = 1
        self.traffic = Traffic()

    def arguments(
        self, clients: Sequence[Client], worker: WorkerHandle, initial_state: object
    ) -> tuple[list[tuple[int, int] | None], list[Any]]:
        """States of some clients as arguments of a worker's method.

        Returns:
            For each client the index of an argument and the row of its state in it, or None if its state is
            ``initial_state``, which the broadcast contains; and the arguments: references, or arrays with one row.
        """
        positions: list[tuple[int, int] | None] = []
        arguments: dict[Any, Any] = {}
        index: dict[Any, int] = {}
        for client in clients:
            state = client.state
            if state is initial_state:
                positions.append(None)
                continue
            place = state.place if isinstance(state, StoredState) else None
            if place is not None:
                key, row, value = place.ref, place.row, place.ref
                self.traffic.states += place.node != worker.node
            else:
                value = {name: array[None] for name, array in state_to_arrays(state).items()}
                key, row = client.number, 0
                self.traffic.states += bool(value)
            arguments[key] = value
            positions.append((index.setdefault(key, len(index)), row))
        return positions, list(arguments.values())

    def record(self, context: RoundContext, stored: Sequence[Place], state_bytes: int) -> list[StoredState]:
        """Record the new states of a cohort, given their references and nodes; returns them in the same order.

        ``state_bytes`` is the size of one state in bytes. Older states are dropped if all take too many bytes.
        """
        self._context, self._state_bytes = context, state_bytes
        states = [StoredState(self.fetch_all, place) for place in stored]
        self._pending = list(zip(context.cohort, states, strict=True))
        self._rounds.append([weakref.ref(state) for state in states])
        # An object holds states of several clients, and exists until all of them have new states or are dropped.
        while len(self._rounds) > 1 and sum(map(len, self._rounds)) * state_bytes > self._max_bytes:
            for reference in self._rounds.popleft():
                if (state_or_none := reference()) is not None:
                    state_or_none.place = None
        return states

    def restore(self, clients: Sequence[Client]) -> None:
        """Use the driver's copies of some clients' states from now on, because those in the object store are lost."""
        for client in clients:
            if isinstance(client.state, StoredState):
                client.state.fetch()
                client.state.place = None

    def fetch_all(self) -> None:
        """Copy all new states to the driver."""
        while self._pending:
            batch = self._pending[: max(1, COPIED_BYTES // self._state_bytes)]
            for (_, state), arrays in zip(batch, self._values(batch), strict=True):
                state.deliver(state_from_arrays(arrays))
                self.traffic.copied += self._state_bytes
            del self._pending[: len(batch)]
        self._context = None

    def _values(self, batch: list[tuple[Client, StoredState]]) -> list[Arrays]:
        """The new states of some clients, from the object store, or else by training these clients again."""
        places = [cast("Place", state.place) for _, state in batch]  # states of the last round are always stored
        objects: dict[Any, Any] = dict.fromkeys(place.ref for place in places)
        lost = []
        pool = self._pool()
        for ref in objects:
            try:
                (objects[ref],) = pool.get([ref])
            except pool.object_losses:
                lost += [pair for pair, place in zip(batch, places, strict=True) if place.ref == ref]
        if not lost:
            return [{name: rows[place.row] for name, rows in objects[place.ref].items()} for place in places]
        self.traffic.lost += len(lost)
        assert self._context is not None
        again = self._retrain(self._context, [client for client, _ in lost])
        for (_, state), place in zip(lost, again, strict=True):
            state.place = place
        return self._values(batch)


def stored_states(items: Sequence[WorkItem], count: int) -> list[Place]:
    """The places of the new states of ``count`` clients, in the order of their rows."""
    places: list[Any] = [None] * count
    for item in items:
        assert item.worker is not None
        for position, row in enumerate(item.rows):
            places[row] = Place(item.states_ref, position, item.worker.node)
    return places


def client_state_bytes(training: Training, problem: Problem) -> int:
    """Size of one client's state in bytes; 0 if the algorithm's clients keep none."""
    fields = flat_fields(training.algorithm.client_fields()).values()
    numbers = sum(field.scalars(problem.layout.size) for field in fields)
    return numbers * torch.finfo(problem.dtype).bits // 8
