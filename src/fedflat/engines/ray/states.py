"""Client states in Ray's object store, on the node that trained the client, with a copy in the driver.

The driver fetches copies while workers train the next round. If a node is lost before its states were copied, their
clients repeat the round from their previous states, which the driver has, and the round's broadcast.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fedflat.algorithms.algorithm import flat_fields
from fedflat.engines.problem.problem import Problem
from fedflat.engines.ray.results import RoundContext
from fedflat.engines.ray.scheduling import WorkerHandle, WorkItem
from fedflat.engines.ray.worker_pool import WorkerPool
from fedflat.engines.round.client import Arrays, state_from_arrays, state_to_arrays
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


class StoredState(RemoteState):
    """A client's state in the object store of a node.

    Attributes:
        ref: Ray's reference to the state, as arrays by name; None if it is no longer stored.
        node: Ray's id of the node.
    """

    def __init__(self, fetch: Callable[[], None], ref: Any, node: str) -> None:
        """Refer to a state; ``fetch`` copies it to the driver."""
        super().__init__(fetch)
        self.ref, self.node = ref, node


class StoredStates:
    """The latest states of clients: where they are, and copies of them.

    Args:
        pool: returns the current workers, which may change.
        retrain: trains some clients of a round again and returns their new states' references and nodes.
        max_bytes: bytes of states to keep in the object store; the oldest ones are dropped first.
    """

    def __init__(
        self,
        pool: Callable[[], WorkerPool],
        retrain: Callable[[RoundContext, list[Client]], list[tuple[Any, str]]],
        max_bytes: float,
    ) -> None:
        """Start without any state."""
        self._pool, self._retrain, self._max_bytes = pool, retrain, max_bytes
        self._latest: OrderedDict[int, StoredState] = OrderedDict()  # by client; trained longest ago first
        self._context: RoundContext | None = None  # the last round
        self._pending: list[tuple[Client, StoredState]] = []  # its new states that have not been copied, by client
        self._state_bytes = 1
        self.traffic = Traffic()

    def argument(self, client: Client, worker: WorkerHandle, initial_state: object) -> Any:
        """A client's state as an argument of a worker's method: Ray's reference to it, or its arrays.

        None stands for ``initial_state``, the state object of first-time participants, which the broadcast contains.
        """
        state = client.state
        if state is initial_state:
            return None
        if isinstance(state, StoredState) and state.ref is not None:
            self.traffic.states += state.node != worker.node
            return state.ref
        arrays = state_to_arrays(state)
        self.traffic.states += bool(arrays)
        return arrays

    def record(self, context: RoundContext, stored: Sequence[tuple[Any, str]], state_bytes: int) -> list[StoredState]:
        """Record the new states of a cohort, given by their references and nodes; returns them in the same order.

        ``state_bytes`` is the size of one state in bytes. Older states are dropped if all take too many bytes.
        """
        self._context, self._state_bytes = context, state_bytes
        states = [StoredState(self.fetch_all, ref, node) for ref, node in stored]
        for client, state in zip(context.cohort, states, strict=True):
            self._pending.append((client, state))
            self._latest[client.number] = state
            self._latest.move_to_end(client.number)
        while len(self._latest) > max(len(states), self._max_bytes / state_bytes):
            _, dropped = self._latest.popitem(last=False)
            dropped.ref = None
        return states

    def restore(self, clients: Sequence[Client]) -> None:
        """Use the driver's copies of some clients' states from now on, because those in the object store are lost."""
        for client in clients:
            if isinstance(client.state, StoredState):
                client.state.fetch()
                client.state.ref = None

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
        pool = self._pool()
        try:
            return pool.get([state.ref for _, state in batch])
        except pool.object_losses:
            lost = [(client, state) for client, state in batch if self._is_lost(state)]
        self.traffic.lost += len(lost)
        assert self._context is not None
        again = self._retrain(self._context, [client for client, _ in lost])
        for (_, state), (ref, node) in zip(lost, again, strict=True):
            state.ref, state.node = ref, node
        return self._values(batch)

    def _is_lost(self, state: StoredState) -> bool:
        """Whether a state is no longer in the object store."""
        pool = self._pool()
        try:
            pool.get([state.ref])
        except pool.object_losses:
            return True
        return False


def stored_states(items: Sequence[WorkItem], count: int) -> list[tuple[Any, str]]:
    """For each of ``count`` clients, the reference to its new state and the node that has it."""
    stored: list[Any] = [None] * count
    for item in items:
        assert item.worker is not None
        for row, ref in zip(item.rows, item.state_refs, strict=True):
            stored[row] = ref, item.worker.node
    return stored


def client_state_bytes(training: Training, problem: Problem) -> int:
    """Size of one client's state in bytes; 0 if the algorithm's clients keep none."""
    fields = flat_fields(training.algorithm.client_fields()).values()
    numbers = sum(field.scalars(problem.layout.size) for field in fields)
    return numbers * torch.finfo(problem.dtype).bits // 8
