"""Where the clients' states lie: each with the worker that trained the client last, and a copy here, which follows while workers train.

A state that is lost with its worker before its copy has come is computed again: the client's round is trained once more, from the state
before, which is here, with what all clients of that round read, which is kept until then.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fedflat.algorithms.algorithm import nested_state
from fedflat.engines.ray.scheduling import REMEMBERED
from fedflat.engines.ray.worker import FRESH, Arrays, Broadcast, Member, arrays_of
from fedflat.engines.ray.worker_pool import WorkerHandle, WorkerPool
from fedflat.engines.round.contract import Client
from fedflat.engines.round.remote_state import RemoteState

GUESSED = 1e-9
"""Seconds in which a byte is moved, before any was."""


@dataclass
class Traffic:
    """Bytes of clients' state that have travelled."""

    states: int = 0
    """States that were brought to a worker before it could train."""
    moved: int = 0
    """Their bytes."""
    handed_over: int = 0
    """How many of them came from another worker, and not from the driver."""
    copied: int = 0
    """Bytes that followed from workers while others trained, or before a checkpoint."""


@dataclass(eq=False)
class Batch:
    """The states that one worker's clients ended a round with, on their way here."""

    clients: list[Client]
    """As they were before."""
    found: list[RemoteState]
    ref: Any
    again: Callable[[], tuple[WorkerHandle, Arrays]]
    """Trains them again."""


class StateDirectory:
    """Knows which worker has which client's state."""

    def __init__(self, crew: Callable[[], WorkerPool]) -> None:
        self._crew = crew
        self._homes: OrderedDict[int, tuple[WorkerHandle, int]] = OrderedDict()
        self._coming: list[Batch] = []
        self._per_byte = GUESSED
        self.traffic = Traffic()

    def moving(self, client: Client, hand: WorkerHandle | None, size: int) -> float:
        """Seconds until a worker has the state of a client, which is so many bytes."""
        return 0.0 if not size or self._has(hand, client) else size * self._per_byte

    def hand_over(
        self, clients: Sequence[Client], hand: WorkerHandle | None, told: Broadcast, size: int
    ) -> tuple[set[int], list[Any]]:
        """Let other workers hand over what they have of some clients' states: which these are, and references to them."""
        asked: dict[WorkerHandle, list[tuple[int, int]]] = {}
        for client in clients:
            home = self._homes.get(client.number)
            if (
                home is not None
                and home[0] is not hand
                and home[0] in self._crew().hands
                and self._has(home[0], client)
            ):
                asked.setdefault(home[0], []).append((client.number, home[1]))
        coming = {number for some in asked.values() for number, _ in some}
        self.traffic.states += len(coming)
        self.traffic.moved += len(coming) * size
        self.traffic.handed_over += len(coming)
        return coming, [home.actor.hand_over.remote(told.key, some) for home, some in asked.items()]

    def member(
        self, client: Client, hand: WorkerHandle, told: Broadcast, fresh: object, whole: bool, coming: bool = False
    ) -> Member:
        """A client for a worker, with its state where that lies elsewhere and does not come from there."""
        statistics = None if client.statistics is None else client.statistics.detach().cpu().numpy()
        if client.state is fresh and not whole:
            return Member(client.number, client.indices, FRESH, None, statistics)
        if isinstance(client.state, RemoteState) and not whole and (coming or self._has(hand, client)):
            return Member(client.number, client.indices, client.state.stamp, None, statistics)
        state = arrays_of(client.state)
        self.traffic.states += bool(state)
        self.traffic.moved += _size(state)
        return Member(client.number, client.indices, told.stamp, state, statistics)

    def trained(
        self,
        hand: WorkerHandle,
        told: Broadcast,
        clients: Sequence[Client],
        again: Callable[[], tuple[WorkerHandle, Arrays]],
    ) -> list[RemoteState]:
        """Take note that a worker has trained clients; returns their states, of which copies are asked for now."""
        numbers = [client.number for client in clients]
        batch = Batch(list(clients), [], hand.actor.give.remote(told.key, numbers, told.stamp), again)
        batch.found = [RemoteState(told.stamp, lambda: self._bring(batch)) for _ in clients]
        self._coming.append(batch)
        self._live_with(hand, numbers, told.stamp)
        return batch.found

    def bring_all(self) -> None:
        """Bring here what is on its way."""
        while self._coming:
            self._bring(self._coming[0])

    def _bring(self, batch: Batch) -> None:
        begun = time.perf_counter()
        crew = self._crew()
        try:
            arrays = crew.got(batch.ref)
            spent = (time.perf_counter() - begun) / max(1, _size(arrays))
            self._per_byte = 0.9 * self._per_byte + 0.1 * spent
        except crew.forgetting:
            hand, arrays = batch.again()
            self._live_with(hand, [client.number for client in batch.clients], batch.found[0].stamp)
        self._coming.remove(batch)
        self.traffic.copied += _size(arrays)
        for row, away in enumerate(batch.found):
            away.arrived(nested_state({name: torch.from_numpy(np.array(rows[row])) for name, rows in arrays.items()}))

    def _live_with(self, hand: WorkerHandle, numbers: Sequence[int], stamp: int) -> None:
        for number in numbers:
            self._homes[number] = hand, stamp
            self._homes.move_to_end(number)
        while len(self._homes) > REMEMBERED:
            self._homes.popitem(last=False)

    def _has(self, hand: WorkerHandle | None, client: Client) -> bool:
        known = self._homes.get(client.number)
        return isinstance(client.state, RemoteState) and known is not None and known == (hand, client.state.stamp)


def _size(arrays: Arrays) -> int:
    return sum(array.nbytes for array in arrays.values())
