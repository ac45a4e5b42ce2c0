"""Where clients' states are stored: on the worker that trained the client last, its home, and as a copy in the driver.

Copies are fetched while workers train the next round. If a worker is lost before its copies were fetched, its clients
repeat the round from their previous states, which the driver has, and the round's broadcast, which is kept until then.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fedflat.algorithms.algorithm import flat_fields
from fedflat.engines.problem.problem import Problem
from fedflat.engines.ray.messages import INITIAL_STATE_VERSION, Broadcast, DispatchedClient, bytes_of
from fedflat.engines.ray.scheduling import MAX_REMEMBERED_CLIENTS, Transfer
from fedflat.engines.ray.work_queue import WorkerHandle
from fedflat.engines.ray.worker_pool import WorkerPool
from fedflat.engines.round.client import Arrays, state_from_arrays, state_to_arrays
from fedflat.engines.round.contract import Client, RemoteState, Training

INITIAL_SECONDS_PER_BYTE = 1e-9
"""Assumed seconds to move a byte, before any was moved."""


@dataclass
class Traffic:
    """Statistics of the client states that were sent over the network.

    Attributes:
        states: number of states sent to a worker that did not have them.
        moved: total size of these states in bytes.
        handed_over: number of these states that came directly from another worker.
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
        ref: Ray's reference to the new states, as arrays with one row per client.
        retrain: trains the clients again if the states are lost; returns their worker and the new states.
        states: the new states, in the order of the clients; each is delivered once it has been copied.
    """

    clients: list[Client]
    ref: Any
    retrain: Callable[[], tuple[WorkerHandle, Arrays]]
    states: list[RemoteState] = field(default_factory=list)


class StateDirectory:
    """Records which worker, called the client's home, has the latest state of which client.

    Args:
        pool: returns the current workers, which may change.
    """

    def __init__(self, pool: Callable[[], WorkerPool]) -> None:
        """Start without any state."""
        self._pool = pool
        # By number of the client: its home, and the version of the state that the home has.
        self._homes: OrderedDict[int, tuple[WorkerHandle, int]] = OrderedDict()
        self._pending: list[PendingStates] = []  # states not yet copied to the driver
        self._seconds_per_byte = INITIAL_SECONDS_PER_BYTE
        self.traffic = Traffic()

    def transfers(
        self,
        groups: Sequence[Sequence[int]],
        cohort: Sequence[Client],
        workers: Sequence[WorkerHandle | None],
        state_bytes: int,
    ) -> list[Transfer]:
        """Expected seconds to bring the states of each group of clients to a worker.

        Args:
            groups: for each group, the rows of its clients in ``cohort``.
            cohort: the clients of the round.
            workers: the workers; None stands for one that has not started.
            state_bytes: size of one state in bytes; 0 if no states are needed.
        """
        seconds = state_bytes * self._seconds_per_byte  # for one state
        index = {worker: number for number, worker in enumerate(workers) if worker is not None}
        transfers = []
        for group in groups:
            homes = Counter(index.get(home) for row in group if seconds and (home := self._home(cohort[row])))
            homes.pop(None, None)  # nowhere, or on a lost worker
            at_homes = {worker: seconds * (len(group) - count) for worker, count in homes.items() if worker is not None}
            transfers.append(Transfer(seconds * len(group), at_homes))
        return transfers

    def request_transfers(
        self, clients: Sequence[Client], worker: WorkerHandle | None, broadcast: Broadcast, state_bytes: int
    ) -> tuple[set[int], list[Any]]:
        """Request the states of some clients from the other workers that have them, to be sent to ``worker``.

        Args:
            clients: the clients that ``worker`` will train.
            worker: the worker that needs the states; None if none has started.
            broadcast: the round's broadcast, which names the training.
            state_bytes: size of one state in bytes, for the statistics.

        Returns:
            The numbers of the clients whose states were requested, and for each worker that sends states Ray's
            reference to its ``StateTransfer``.
        """
        requests: dict[WorkerHandle, list[tuple[int, int]]] = {}
        transferred: set[int] = set()
        for client in clients:
            home = self._home(client)
            if home is None or home is worker or home.is_lost:
                continue
            _, state_version = self._homes[client.number]
            requests.setdefault(home, []).append((client.number, state_version))
            transferred.add(client.number)
        self.traffic.states += len(transferred)
        self.traffic.moved += len(transferred) * state_bytes
        self.traffic.handed_over += len(transferred)
        refs = [
            home.actor.transfer_states.remote(broadcast.training_key, request) for home, request in requests.items()
        ]
        return transferred, refs

    def assignment(
        self,
        client: Client,
        worker: WorkerHandle,
        broadcast: Broadcast,
        initial_state: object,
        force_state: bool,
        sent_by_other_worker: bool = False,
    ) -> DispatchedClient:
        """Build the message that assigns a client to a worker, and count the bytes of state in it.

        The state is left out if it is the initial state, which is part of the broadcast, if the worker already has it,
        or if another worker sends it.

        Args:
            client: the client.
            worker: the worker that trains it.
            broadcast: what every client of the round reads.
            initial_state: the state object that all clients share until they first train; None if there is none.
            force_state: whether to send the state in any case, because the worker reported that it does not have it.
            sent_by_other_worker: whether another worker sends the state.
        """
        statistics = None if client.statistics is None else client.statistics.detach().cpu().numpy()
        if not force_state:
            if client.state is initial_state:
                return DispatchedClient(client.number, client.indices, INITIAL_STATE_VERSION, None, statistics)
            is_at_worker = sent_by_other_worker or self._has_state(worker, client)
            if isinstance(client.state, RemoteState) and is_at_worker:
                return DispatchedClient(client.number, client.indices, client.state.state_version, None, statistics)
        state = state_to_arrays(client.state)
        self.traffic.states += bool(state)
        self.traffic.moved += bytes_of(state)
        # A state that is sent along is not looked up, so its version is irrelevant.
        return DispatchedClient(client.number, client.indices, broadcast.state_version, state, statistics)

    def record_trained(
        self,
        worker: WorkerHandle,
        broadcast: Broadcast,
        clients: Sequence[Client],
        retrain: Callable[[], tuple[WorkerHandle, Arrays]],
    ) -> list[RemoteState]:
        """Record that a worker has trained clients, and request copies of their new states.

        Args:
            worker: the worker.
            broadcast: what every client of the round read.
            clients: the clients with their previous states.
            retrain: trains the clients again if the worker is lost; returns the new worker and the states as arrays
                with one row per client.

        Returns:
            The new states, in the order of the clients; reading one fetches it from the worker.
        """
        numbers = [client.number for client in clients]
        ref = worker.actor.copy_states.remote(broadcast.training_key, numbers, broadcast.state_version)
        pending = PendingStates(list(clients), ref, retrain)
        pending.states = [RemoteState(broadcast.state_version, lambda: self._fetch(pending)) for _ in clients]
        self._pending.append(pending)
        self._set_home(worker, numbers, broadcast.state_version)
        return pending.states

    def fetch_all(self) -> None:
        """Fetch all states that have not been copied to the driver."""
        while self._pending:
            self._fetch(self._pending[0])

    def _fetch(self, pending: PendingStates) -> None:
        """Copy pending states to the driver: from their worker, or by training the clients again if it is lost.

        The time of a copy updates the estimate of the transfer speed.
        """
        start = time.perf_counter()
        pool = self._pool()
        try:
            arrays = pool.get(pending.ref)
            per_byte = (time.perf_counter() - start) / max(1, bytes_of(arrays))
            self._seconds_per_byte = 0.9 * self._seconds_per_byte + 0.1 * per_byte
        except pool.state_loss_errors:
            worker, arrays = pending.retrain()
            self._set_home(worker, [client.number for client in pending.clients], pending.states[0].state_version)
        self._pending.remove(pending)
        self.traffic.copied += bytes_of(arrays)
        for row, state in enumerate(pending.states):
            state.deliver(state_from_arrays({name: rows[row] for name, rows in arrays.items()}))

    def _set_home(self, worker: WorkerHandle, numbers: Sequence[int], state_version: int) -> None:
        """Record that a worker has this version of some clients' states; ``numbers`` are the clients' numbers.

        Beyond ``MAX_REMEMBERED_CLIENTS``, the clients that participated longest ago are forgotten.
        """
        for number in numbers:
            self._homes[number] = worker, state_version
            self._homes.move_to_end(number)
        while len(self._homes) > MAX_REMEMBERED_CLIENTS:
            self._homes.popitem(last=False)

    def _has_state(self, worker: WorkerHandle, client: Client) -> bool:
        """Whether a worker has the state from which the client trains next."""
        return self._home(client) is worker

    def _home(self, client: Client) -> WorkerHandle | None:
        """The worker that has the state from which the client trains next, or None.

        None for a state that is not a ``RemoteState``, such as an initial one: workers have only what they trained.
        """
        if not isinstance(client.state, RemoteState):
            return None
        home, state_version = self._homes.get(client.number, (None, 0))
        return home if state_version == client.state.state_version else None


def client_state_bytes(training: Training, problem: Problem) -> int:
    """Size of one client's state in bytes; 0 if the algorithm's clients keep none."""
    fields = flat_fields(training.algorithm.client_fields()).values()
    numbers = sum(field.scalars(problem.layout.size) for field in fields)
    return numbers * torch.finfo(problem.dtype).bits // 8
