"""Client state between rounds, packed into one row per client that has participated."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from fedflat.algorithms import Algorithm
from fedflat.algorithms.algorithm import States, flat_fields, flat_state, nested_state
from fedflat.algorithms.slot import State
from fedflat.engines.round.contract import Client, ModelState
from fedflat.engines.round.remote_state import RemoteState
from fedflat.experiment.store.row_store import RowStore

STATISTICS = "statistics"
MOST_REMOTE = 2**16
"""Largest number of states left on workers; beyond it, the oldest are fetched."""


class ClientStateStore:
    """The states of all clients, with their BatchNorm statistics if clients keep them.

    Args:
        algorithm: declares the fields of the state.
        first: the model before the first round, from which initial states are made.
        own_statistics: whether clients keep their BatchNorm statistics (SiLoBN).
        rows: opens the row store for a given row width.
    """

    def __init__(
        self, algorithm: Algorithm, first: ModelState, own_statistics: bool, rows: Callable[[int], RowStore]
    ) -> None:
        self._device = first.weights.device
        self._fields = flat_fields(algorithm.client_fields())
        self._initial = algorithm.new_client(first.weights), first.buffers if own_statistics else None
        self._widths = {name: field.scalars(len(first.weights)) for name, field in self._fields.items()}
        if own_statistics:
            self._widths[STATISTICS] = len(first.buffers)
        self._rows = rows(sum(self._widths.values()))
        self._remote: dict[int, tuple[RemoteState, Tensor | None]] = {}

    def read(self, number: int) -> tuple[Mapping[str, State], Tensor | None]:
        """A client's state and statistics; the initial ones before it first participates."""
        return self._remote[number] if number in self._remote else self._read(number)

    def _read(self, number: int) -> tuple[States, Tensor | None]:
        if number not in self._rows:
            return self._initial
        row = self._rows[number].to(self._device)
        pieces = dict(zip(self._widths, torch.split(row, list(self._widths.values())), strict=True))
        statistics = pieces.pop(STATISTICS, None)
        state = {name: piece if self._fields[name].vector else piece[0] for name, piece in pieces.items()}
        return nested_state(state), statistics

    def statistics(self, clients: int) -> dict[int, Tensor]:
        """The statistics of each of ``clients`` clients that has participated; empty if clients keep none."""
        if STATISTICS not in self._widths:
            return {}
        self.settle()
        stored = {number: self._read(number)[1] for number in range(clients) if number in self._rows}
        return {number: statistics for number, statistics in stored.items() if statistics is not None}

    def write(self, client: Client) -> None:
        """Store a client's new state; a remote one is stored when it arrives and read remotely until then."""
        self._remote.pop(client.number, None)
        if not isinstance(client.state, RemoteState):
            self._write(client, client.state)
            return
        self._remote[client.number] = client.state, client.statistics
        client.state.store_with(partial(self._write, client))
        while len(self._remote) > MOST_REMOTE:
            oldest = next(iter(self._remote))
            self._remote.pop(oldest)[0].fetch()

    def settle(self) -> None:
        """Fetch all remote states, before a checkpoint relies on them."""
        for state, _ in list(self._remote.values()):
            state.fetch()

    def _write(self, client: Client, state: Mapping[str, State]) -> Callable[[], States]:
        """Store a state; returns a function that reads it again."""
        pieces = {name: value.reshape(-1) for name, value in flat_state(state).items()}
        if client.statistics is not None:
            pieces[STATISTICS] = client.statistics
        if pieces:
            self._rows[client.number] = torch.cat([pieces[name] for name in self._widths])
        number = client.number  # the reader must not keep the client's previous state alive
        return lambda: self._read(number)[0]
