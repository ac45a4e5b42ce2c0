"""What clients keep between rounds, as rows of a store: a client has a row from its first participation on."""

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
from fedflat.experiment.store.row_store import Rows

STATISTICS = "statistics"
REMEMBERED = 2**16
"""Clients of which it is remembered where their state lies."""


class ClientStateStore:
    """The states of all clients, and their own normalisation statistics where they keep them."""

    def __init__(
        self, algorithm: Algorithm, first: ModelState, own_statistics: bool, rows: Callable[[int], Rows]
    ) -> None:
        self._device = first.weights.device
        self._fields = flat_fields(algorithm.client_fields())
        self._fresh: tuple[States, Tensor | None] = (
            algorithm.new_client(first.weights),
            first.buffers if own_statistics else None,
        )
        self._widths = {name: field.scalars(len(first.weights)) for name, field in self._fields.items()}
        if own_statistics:
            self._widths[STATISTICS] = len(first.buffers)
        self._rows = rows(sum(self._widths.values()))
        self._away: dict[int, tuple[RemoteState, Tensor | None]] = {}

    def read(self, number: int) -> tuple[Mapping[str, State], Tensor | None]:
        """A client's state and statistics; those it starts with, before it first takes part."""
        return self._away[number] if number in self._away else self._read(number)

    def _read(self, number: int) -> tuple[States, Tensor | None]:
        if number not in self._rows:
            return self._fresh
        row = self._rows[number].to(self._device)
        pieces = dict(zip(self._widths, torch.split(row, list(self._widths.values())), strict=True))
        statistics = pieces.pop(STATISTICS, None)
        return nested_state(
            {name: piece if self._fields[name].vector else piece[0] for name, piece in pieces.items()}
        ), statistics

    def statistics(self, clients: int) -> dict[int, Tensor]:
        """The own statistics of all clients that have taken part, where clients keep them."""
        if STATISTICS not in self._widths:
            return {}
        self.settle()
        kept = {number: self._read(number)[1] for number in range(clients) if number in self._rows}
        return {number: statistics for number, statistics in kept.items() if statistics is not None}

    def write(self, client: Client) -> None:
        """Keep a client's new state; one that lies elsewhere is written when it comes, and read from there until then."""
        self._away.pop(client.number, None)
        if not isinstance(client.state, RemoteState):
            self._write(client, client.state)
            return
        self._away[client.number] = client.state, client.statistics
        client.state.store_with(partial(self._write, client))
        while len(self._away) > REMEMBERED:
            oldest = next(iter(self._away))
            self._away.pop(oldest)[0].fetch()

    def settle(self) -> None:
        """Have everything here that lies elsewhere, before a checkpoint relies on it."""
        for state, _ in list(self._away.values()):
            state.fetch()

    def _write(self, client: Client, state: Mapping[str, State]) -> Callable[[], States]:
        pieces = {name: value.reshape(-1) for name, value in flat_state(state).items()}
        if client.statistics is not None:
            pieces[STATISTICS] = client.statistics
        if pieces:
            self._rows[client.number] = torch.cat([pieces[name] for name in self._widths])
        return partial(self._state, client.number)

    def _state(self, number: int) -> States:
        return self._read(number)[0]
