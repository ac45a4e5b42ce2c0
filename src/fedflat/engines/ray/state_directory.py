"""Where clients' states are stored: with the worker that trained the client last, and a copy in the driver.

Copies are fetched while workers train the next round. If a worker is lost before its copies were fetched, the clients'
round is trained again from their previous states, which the driver has, and the round's broadcast, which is kept until
then.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedflat.engines.ray.messages import FRESH, Broadcast, DispatchedClient, size_of
from fedflat.engines.ray.scheduling import REMEMBERED
from fedflat.engines.ray.worker_pool import WorkerHandle, WorkerPool
from fedflat.engines.round.cohort import Arrays, state_from_arrays, state_to_arrays
from fedflat.engines.round.contract import Client, RemoteState

INITIAL_PER_BYTE = 1e-9
"""Assumed seconds to move a byte, before any was moved."""


@dataclass
class Traffic:
    """Client state that has travelled.

    Attributes:
        states: states sent to a worker that did not have them.
        moved: their bytes.
        handed_over: how many of them came directly from another worker.
        copied: bytes of state copied to the driver.
    """

    states: int = 0
    moved: int = 0
    handed_over: int = 0
    copied: int = 0


@dataclass(eq=False)
class PendingStates:
    """New states of the clients that one worker trained, not yet copied to the driver.

    Attributes:
        clients: the clients with their previous states.
        ref: Ray's reference to the new states.
        retrain: trains the clients again, if the states are lost.
        states: the new states, in the order of the clients.
    """

    clients: list[Client]
    ref: Any
    retrain: Callable[[], tuple[WorkerHandle, Arrays]]
    states: list[RemoteState] = field(default_factory=list)


class StateDirectory:
    """Knows which worker has which client's state."""

    def __init__(self, pool: Callable[[], WorkerPool]) -> None:
        self._pool = pool
        self._homes: OrderedDict[int, tuple[WorkerHandle, int]] = OrderedDict()
        self._pending: list[PendingStates] = []
        self._per_byte = INITIAL_PER_BYTE
        self.traffic = Traffic()

    def moving(self, client: Client, worker: WorkerHandle | None, size: int) -> float:
        """Seconds to bring a client's state of ``size`` bytes to a worker."""
        return 0.0 if not size or self._has(worker, client) else size * self._per_byte

    def hand_over(
        self, clients: Sequence[Client], worker: WorkerHandle | None, broadcast: Broadcast, size: int
    ) -> tuple[set[int], list[Any]]:
        """Ask other workers for the states that they have of some clients.

        Returns:
            The numbers of these clients, and references to their states.
        """
        requests: dict[WorkerHandle, list[tuple[int, int]]] = {}
        for client in clients:
            home, stamp = self._homes.get(client.number, (None, 0))
            if home is not None and home is not worker and home in self._pool().workers and self._has(home, client):
                requests.setdefault(home, []).append((client.number, stamp))
        coming = {number for request in requests.values() for number, _ in request}
        self.traffic.states += len(coming)
        self.traffic.moved += len(coming) * size
        self.traffic.handed_over += len(coming)
        return coming, [home.actor.hand_over.remote(broadcast.key, request) for home, request in requests.items()]

    def dispatch(
        self,
        client: Client,
        worker: WorkerHandle,
        broadcast: Broadcast,
        fresh: object,
        with_state: bool,
        coming: bool = False,
    ) -> DispatchedClient:
        """A client to send to a worker, with its state unless the worker has it or gets it elsewhere.

        Args:
            client: the client.
            worker: who trains it.
            broadcast: what every client of the round reads.
            fresh: the state object that the broadcast contains as ``fresh``.
            with_state: whether to send the state in any case.
            coming: whether another worker sends it.
        """
        statistics = None if client.statistics is None else client.statistics.detach().cpu().numpy()
        if client.state is fresh and not with_state:
            return DispatchedClient(client.number, client.indices, FRESH, None, statistics)
        if isinstance(client.state, RemoteState) and not with_state and (coming or self._has(worker, client)):
            return DispatchedClient(client.number, client.indices, client.state.stamp, None, statistics)
        state = state_to_arrays(client.state)
        self.traffic.states += bool(state)
        self.traffic.moved += size_of(state)
        return DispatchedClient(client.number, client.indices, broadcast.stamp, state, statistics)

    def trained(
        self,
        worker: WorkerHandle,
        broadcast: Broadcast,
        clients: Sequence[Client],
        retrain: Callable[[], tuple[WorkerHandle, Arrays]],
    ) -> list[RemoteState]:
        """Record that a worker has trained clients; requests copies of their new states and returns these."""
        numbers = [client.number for client in clients]
        ref = worker.actor.give.remote(broadcast.key, numbers, broadcast.stamp)
        pending = PendingStates(list(clients), ref, retrain)
        pending.states = [RemoteState(broadcast.stamp, lambda: self._fetch(pending)) for _ in clients]
        self._pending.append(pending)
        self._set_home(worker, numbers, broadcast.stamp)
        return pending.states

    def fetch_all(self) -> None:
        """Fetch all states that have not been copied to the driver."""
        while self._pending:
            self._fetch(self._pending[0])

    def _fetch(self, pending: PendingStates) -> None:
        start = time.perf_counter()
        pool = self._pool()
        try:
            arrays = pool.get(pending.ref)
            per_byte = (time.perf_counter() - start) / max(1, size_of(arrays))
            self._per_byte = 0.9 * self._per_byte + 0.1 * per_byte
        except pool.state_losses:
            worker, arrays = pending.retrain()
            self._set_home(worker, [client.number for client in pending.clients], pending.states[0].stamp)
        self._pending.remove(pending)
        self.traffic.copied += size_of(arrays)
        for row, state in enumerate(pending.states):
            state.deliver(state_from_arrays({name: rows[row] for name, rows in arrays.items()}))

    def _set_home(self, worker: WorkerHandle, numbers: Sequence[int], stamp: int) -> None:
        for number in numbers:
            self._homes[number] = worker, stamp
            self._homes.move_to_end(number)
        while len(self._homes) > REMEMBERED:
            self._homes.popitem(last=False)

    def _has(self, worker: WorkerHandle | None, client: Client) -> bool:
        home = self._homes.get(client.number)
        return isinstance(client.state, RemoteState) and home is not None and home == (worker, client.state.stamp)
