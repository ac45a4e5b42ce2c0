"""Row stores, which hold vectors ("rows") by integer key, and ``ClientStateStore``, which uses one for client states.

The state of a client between rounds is packed into one row. Averages keep their past models in row stores as well.
"""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedflat.algorithms import Algorithm
from fedflat.algorithms.algorithm import States, flat_fields, flat_state, nested_state
from fedflat.algorithms.state import State
from fedflat.engines.round.contract import Client, ModelState, RemoteState
from fedflat.experiment.store.files import DamagedFile, create_folder, explain_os_error
from fedflat.operating_system import BINARY, read_at, sync_folder, write_at

_NUMPY: dict[torch.dtype, np.dtype[Any]] = {torch.float32: np.dtype(np.float32), torch.float64: np.dtype(np.float64)}
_INTEGER = np.dtype(np.int64)
_ENTRY_BYTES = 5 * _INTEGER.itemsize
"""Size of an index entry in bytes. It holds five integers: key + 1 (an entry of zeros has no key), then
stamp and checksum of each of two copies."""
UNWRITTEN = 0
"""Stamp of a copy that has not been written. Otherwise, the stamp is the round that wrote it, counted from 1."""


class RowStore:
    """Rows by key, in memory, for runs without a folder; also the interface of the other row stores."""

    def __init__(self) -> None:
        self.current_round = 0
        """The round in progress, counted from 1; rows that are written now are stamped with it."""
        self._rows: dict[int, Tensor] = {}

    def __getitem__(self, key: int) -> Tensor:
        return self._rows[key]

    def __setitem__(self, key: int, row: Tensor) -> None:
        self._rows[key] = row.clone()

    def __contains__(self, key: int) -> bool:
        return key in self._rows

    @property
    def summary(self) -> tuple[int, int]:
        """Number of rows in the file and the sum of their checksums; zeros for a store without a file."""
        return 0, 0

    def verify(self, rounds: int) -> tuple[int, int]:
        """Check the rows as they were after ``rounds`` rounds; returns their summary or raises ``DamagedFile``."""
        return self.summary

    def flush(self) -> None:
        """Write cached rows and wait until they are on disk, before a checkpoint relies on them."""

    def commit(self, rounds: int) -> None:
        """Protect the current rows from being overwritten: the checkpoint after ``rounds`` rounds needs them."""

    def rewind(self, rounds: int) -> None:
        """Discard all rows that were written after ``rounds`` rounds."""

    def close(self) -> None:
        """Close the files, if there are any."""


@dataclass(slots=True)
class _Entry:
    """The index entry of a row, whose stamps and checksums are those of its two copies."""

    position: int
    """Place of the row in the file, counted in rows."""
    stamps: list[int]
    checksums: list[int]

    def stamps_up_to(self, rounds: float) -> list[int]:
        """The stamps after ``rounds`` rounds, when copies that were written later count as unwritten."""
        return [stamp if stamp <= rounds else UNWRITTEN for stamp in self.stamps]

    def newest(self, rounds: float = math.inf) -> int | None:
        """The copy that was written last in the first ``rounds`` rounds, 0 or 1; None if there is none."""
        first, second = self.stamps_up_to(rounds)
        return None if first == second == UNWRITTEN else int(second > first)

    @property
    def checksum(self) -> int:
        """The checksum of the newest copy."""
        return self.checksums[self.newest() or 0]


class FileRowStore(RowStore):
    """Rows in a file, with an index of their keys and stamps.

    The file has room for two copies of every row, 0 and 1. For each copy, the index holds its checksum and its stamp,
    the number of the round that wrote it. A write overwrites the copy that the last checkpoint does not need, so a
    killed run can resume from that checkpoint with its rows intact.

    Args:
        folder: holds ``rows.bin`` and ``index.bin``; created if necessary.
        width: scalars per row.
        dtype: float32 or float64.
    """

    def __init__(self, folder: Path, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        create_folder(folder)
        self._folder = folder
        self._checkpoint_round = 0  # number of rounds that the last checkpoint covers
        self._open(folder, width, dtype, os.O_RDWR | os.O_CREAT)
        sync_folder(folder)

    def _open(self, folder: Path, width: int, dtype: torch.dtype, flags: int) -> None:
        """Open both files with the given ``flags`` of ``os.open``, and read the index."""
        self._dtype = _NUMPY[dtype]
        self._row_bytes = width * self._dtype.itemsize
        with explain_os_error(folder):
            self._data = os.open(folder / "rows.bin", flags | BINARY, 0o644)
            self._index = os.open(folder / "index.bin", flags | BINARY, 0o644)
        raw = read_at(self._index, os.fstat(self._index).st_size, 0)
        complete = len(raw) // _ENTRY_BYTES * _ENTRY_BYTES  # a killed run may have left part of an entry
        entries = np.frombuffer(raw[:complete], _INTEGER).reshape(-1, 5).tolist()
        self._entries = {
            key_plus_1 - 1: _Entry(position, [stamp_0, stamp_1], [checksum_0, checksum_1])
            for position, (key_plus_1, stamp_0, checksum_0, stamp_1, checksum_1) in enumerate(entries)
        }
        self._checksum_sum = sum(entry.checksum for entry in self._entries.values())

    def __contains__(self, key: int) -> bool:
        return key in self._entries

    @property
    def summary(self) -> tuple[int, int]:
        return len(self._entries), self._checksum_sum

    def verify(self, rounds: int) -> tuple[int, int]:
        """Check the newest copy of each row of the first ``rounds`` rounds; returns their number and checksum sum."""
        count = total = 0
        for key, entry in self._entries.items():
            copy = entry.newest(rounds)
            if copy is not None:
                self._read(key, copy)
                count, total = count + 1, total + entry.checksums[copy]
        return count, total

    def __getitem__(self, key: int) -> Tensor:
        raw = self._read(key, self._entries[key].newest() or 0)
        return torch.from_numpy(np.frombuffer(raw, self._dtype).copy())

    def _read(self, key: int, copy: int) -> bytes:
        """The bytes of one copy of a row; raises ``DamagedFile`` if its checksum does not match."""
        raw = read_at(self._data, self._row_bytes, self._offset(key, copy))
        if len(raw) < self._row_bytes or _checksum(key, raw) != self._entries[key].checksums[copy]:
            raise DamagedFile(f"{self._folder / 'rows.bin'} is damaged: the checksum of row {key} does not match")
        return raw

    def __setitem__(self, key: int, row: Tensor) -> None:
        """Overwrite the copy that the last checkpoint does not need, then stamp it in the index."""
        entry = self._entries.setdefault(key, _Entry(len(self._entries), [UNWRITTEN, UNWRITTEN], [0, 0]))
        self._checksum_sum -= entry.checksum
        # The last checkpoint needs the newest of the copies that were written before it, if there is one.
        copy = int(entry.newest(self._checkpoint_round) == 0)
        data = row.detach().cpu().numpy().astype(self._dtype, copy=False).tobytes()
        with explain_os_error(self._folder):
            write_at(self._data, data, self._offset(key, copy))
            entry.stamps[copy], entry.checksums[copy] = self.current_round, _checksum(key, data)
            self._write_index_entry(key)
        self._checksum_sum += entry.checksum

    def flush(self) -> None:
        """Wait until all rows are on disk."""
        with explain_os_error(self._folder):
            os.fsync(self._data)
            os.fsync(self._index)

    def commit(self, rounds: int) -> None:
        self._checkpoint_round = rounds

    def rewind(self, rounds: int) -> None:
        """Return to the rows as they were after ``rounds`` rounds: discard all copies that were written later.

        Erases the stamps of these copies from the index, and cuts off rows that have no copy left.
        """
        for key, entry in list(self._entries.items()):
            if entry.newest(rounds) is None:
                del self._entries[key]
            elif max(entry.stamps) > rounds:
                entry.stamps = entry.stamps_up_to(rounds)
                self._write_index_entry(key)
        # Positions are assigned in order of first writing, so the discarded rows are the last ones in the file.
        os.ftruncate(self._index, len(self._entries) * _ENTRY_BYTES)
        os.ftruncate(self._data, min(os.fstat(self._data).st_size, len(self._entries) * 2 * self._row_bytes))
        self._checksum_sum = sum(entry.checksum for entry in self._entries.values())
        self.commit(rounds)

    def _offset(self, key: int, copy: int) -> int:
        """Where a copy of a row begins in the file, in bytes."""
        return (2 * self._entries[key].position + copy) * self._row_bytes

    def _write_index_entry(self, key: int) -> None:
        """Write a row's entry to the index; the key is stored as key + 1, because 0 marks an empty entry."""
        entry = self._entries[key]
        (stamp_0, stamp_1), (checksum_0, checksum_1) = entry.stamps, entry.checksums
        integers = np.array([key + 1, stamp_0, checksum_0, stamp_1, checksum_1], _INTEGER)
        write_at(self._index, integers.tobytes(), entry.position * _ENTRY_BYTES)

    def close(self) -> None:
        os.close(self._data)
        os.close(self._index)


class PastRowStore(FileRowStore):
    """Read-only view of a file's rows as of a checkpoint after ``rounds`` rounds."""

    def __init__(self, folder: Path, width: int, dtype: torch.dtype, rounds: int) -> None:
        """Open the file and ignore copies written after the checkpoint; a row without an earlier copy is left out."""
        RowStore.__init__(self)  # the constructor of FileRowStore would create missing files
        self._folder = folder
        self._open(folder, width, dtype, os.O_RDONLY)
        for entry in self._entries.values():
            entry.stamps = entry.stamps_up_to(rounds)
        self._entries = {key: entry for key, entry in self._entries.items() if entry.newest() is not None}

    def __setitem__(self, key: int, row: Tensor) -> None:
        raise TypeError("the rows of a past checkpoint are read-only")


class CachedRowStore(RowStore):
    """A write-back cache: rows stay in memory, on their device, until a checkpoint or a full cache forces a write.

    Args:
        store: the store behind the cache.
        max_bytes: size of the cache in bytes.
    """

    def __init__(self, store: FileRowStore, max_bytes: int) -> None:
        super().__init__()
        self._store, self._max_bytes = store, max_bytes
        # Keys of the rows whose current value is not in the file yet; the dictionary serves as an ordered set.
        self._unwritten: dict[int, None] = {}

    def __contains__(self, key: int) -> bool:
        return key in self._rows or key in self._store

    @property
    def summary(self) -> tuple[int, int]:
        return self._store.summary

    def verify(self, rounds: int) -> tuple[int, int]:
        return self._store.verify(rounds)

    def __getitem__(self, key: int) -> Tensor:
        return self._rows[key] if key in self._rows else self._store[key]

    def __setitem__(self, key: int, row: Tensor) -> None:
        """Cache a row; if the cache is then too large, write its rows and empty it."""
        self._rows[key] = row
        self._unwritten[key] = None
        if len(self._rows) * row.nbytes > self._max_bytes:
            self._write_back()
            self._rows.clear()

    def flush(self) -> None:
        self._write_back()
        self._store.flush()

    def _write_back(self) -> None:
        """Write the rows whose current value is not in the file yet."""
        self._store.current_round = self.current_round
        for key in self._unwritten:
            self._store[key] = self._rows[key]
        self._unwritten.clear()

    def commit(self, rounds: int) -> None:
        self._store.commit(rounds)

    def rewind(self, rounds: int) -> None:
        """Empty the cache, and discard all rows that were written to the file after ``rounds`` rounds."""
        self._rows.clear()
        self._unwritten.clear()
        self._store.rewind(rounds)

    def close(self) -> None:
        self._store.close()


def cache_size(device: torch.device) -> int:
    """Size of the row cache in bytes: a quarter of a GPU's memory, or 2 GB."""
    return torch.cuda.get_device_properties(device).total_memory // 4 if device.type == "cuda" else 2 * 10**9


def _checksum(key: int, row: bytes) -> int:
    """The CRC-32 of a row, with its key as the initial value, so that a row in the wrong place does not match."""
    return zlib.crc32(row, key)


STATISTICS = "statistics"
"""Name of the part of a client's row that holds its BatchNorm statistics."""
MAX_REMOTE_STATES = 2**16
"""Largest number of client states that stay on workers; beyond it, the oldest are fetched."""


class ClientStateStore:
    """The states of all clients between rounds, with their BatchNorm statistics if clients keep their own.

    Args:
        algorithm: declares the fields of the state.
        initial: the model before the first round, from which initial states are derived.
        own_statistics: whether clients keep their own BatchNorm statistics (SiLoBN).
        open_rows: opens the row store, given the number of scalars per row.
    """

    def __init__(
        self, algorithm: Algorithm, initial: ModelState, own_statistics: bool, open_rows: Callable[[int], RowStore]
    ) -> None:
        self._device = initial.weights.device
        self._fields = flat_fields(algorithm.client_fields())
        self._initial = algorithm.new_client(initial.weights), initial.buffers if own_statistics else None
        # Number of scalars in each part of a row, by the part's name, in the order of the row.
        self._widths = {name: field.scalars(len(initial.weights)) for name, field in self._fields.items()}
        if own_statistics:
            self._widths[STATISTICS] = len(initial.buffers)
        self._rows = open_rows(sum(self._widths.values()))
        # By client: a state that is still on the worker that trained the client, and the client's statistics.
        self._remote: dict[int, tuple[RemoteState, Tensor | None]] = {}

    def read(self, number: int) -> tuple[Mapping[str, State], Tensor | None]:
        """A client's state and BatchNorm statistics, which are None unless clients keep their own.

        A client that has not participated yet has the initial ones.
        """
        return self._remote[number] if number in self._remote else self._read(number)

    def _read(self, number: int) -> tuple[States, Tensor | None]:
        """Split a client's row into its state and statistics; a client without a row has the initial ones."""
        if number not in self._rows:
            return self._initial
        row = self._rows[number].to(self._device)
        pieces = dict(zip(self._widths, torch.split(row, list(self._widths.values())), strict=True))
        statistics = pieces.pop(STATISTICS, None)
        # A field that is not a vector is a scalar, in a piece of one number.
        state = {name: piece if self._fields[name].vector else piece[0] for name, piece in pieces.items()}
        return nested_state(state), statistics

    def statistics(self, clients: int) -> dict[int, Tensor]:
        """The statistics of each of ``clients`` clients that has participated; empty if clients keep none."""
        if STATISTICS not in self._widths:
            return {}
        self.fetch_remote_states()
        read = {number: self._read(number)[1] for number in range(clients) if number in self._rows}
        # Copies: these are views of rows, which also contain the clients' states.
        return {number: statistics.clone() for number, statistics in read.items() if statistics is not None}

    def write(self, client: Client) -> None:
        """Store a client's new state.

        A state that is still on the worker that trained the client is stored when it arrives; until then, readers get
        a reference to it.
        """
        self._remote.pop(client.number, None)
        if not isinstance(client.state, RemoteState):
            self._write(client, client.state)
            return
        self._remote[client.number] = client.state, client.statistics
        client.state.store_with(partial(self._write, client))
        while len(self._remote) > MAX_REMOTE_STATES:
            oldest = next(iter(self._remote))
            state, _ = self._remote.pop(oldest)
            state.fetch()  # this also stores it

    def fetch_remote_states(self) -> None:
        """Fetch the states that are still on workers, before a checkpoint relies on them."""
        for state, _ in list(self._remote.values()):
            state.fetch()

    def _write(self, client: Client, state: Mapping[str, State]) -> Callable[[], States]:
        """Store a client's state and statistics, concatenated into one row.

        Returns a function that reads the state again, so that the caller need not keep it in memory.
        """
        pieces = {name: value.reshape(-1) for name, value in flat_state(state).items()}
        if client.statistics is not None:
            pieces[STATISTICS] = client.statistics
        if pieces:
            self._rows[client.number] = torch.cat([pieces[name] for name in self._widths])
        number = client.number  # a reference to ``client`` in the returned function would keep its state in memory
        return lambda: self._read(number)[0]
