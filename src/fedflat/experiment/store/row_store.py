"""Rows of numbers by key, kept so that a killed run finds exactly the rows of its last checkpoint.

Each row has two places. A write goes to the place that the last checkpoint does not need, stamped with the number of rounds done;
after a restart, every stamp later than the checkpoint is forgotten. So neither a round nor a checkpoint costs more than its cohort.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedflat.experiment.store.atomic_files import create_folder, explain_os_error

_NUMPY: dict[torch.dtype, np.dtype[Any]] = {torch.float32: np.dtype(np.float32), torch.float64: np.dtype(np.float64)}
_STAMP = np.dtype(np.int64)


class Rows:
    """Rows in memory, for runs without a folder."""

    def __init__(self) -> None:
        self.now = 0
        """The number of rounds done once the current round is over."""
        self._rows: dict[int, Tensor] = {}

    def __getitem__(self, key: int) -> Tensor:
        return self._rows[key]

    def __setitem__(self, key: int, row: Tensor) -> None:
        self._rows[key] = row.clone()

    def __contains__(self, key: int) -> bool:
        return key in self._rows

    @property
    def count(self) -> int:
        """How many rows there are, once those in memory are written."""
        return len(self._rows)

    def readable(self, rounds: int) -> int:
        """How many rows can be read as they were after so many rounds."""
        return self.count

    def flush(self) -> None:
        """Write what is still in memory, before a checkpoint relies on it."""

    def commit(self, rounds: int) -> None:
        """Note that a checkpoint after so many rounds needs the rows as they are now."""

    def rewind(self, rounds: int) -> None:
        """Forget all that was written after so many rounds."""

    def close(self) -> None:
        """Let go of the files, where there are any."""


class FileRows(Rows):
    """Rows in a file, two places each, with an index of (key + 1, stamp, stamp)."""

    def __init__(self, folder: Path, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        create_folder(folder)
        self._folder = folder
        self._dtype = _NUMPY[dtype]
        self._bytes = width * self._dtype.itemsize
        with explain_os_error(folder):
            self._data = os.open(folder / "rows.bin", os.O_RDWR | os.O_CREAT, 0o644)
            self._index = os.open(folder / "index.bin", os.O_RDWR | os.O_CREAT, 0o644)
        self._committed = 0
        self._place: dict[int, int] = {}
        self._stamps: dict[int, list[int]] = {}
        self._read_index()

    def __contains__(self, key: int) -> bool:
        return key in self._place

    @property
    def count(self) -> int:
        return len(self._place)

    def readable(self, rounds: int) -> int:
        size = os.fstat(self._data).st_size
        kept = ((key, [_until(rounds, stamp) for stamp in stamps]) for key, stamps in self._stamps.items())
        return sum(any(stamps) and self._offset(key, _newest(stamps)) + self._bytes <= size for key, stamps in kept)

    def __getitem__(self, key: int) -> Tensor:
        raw = os.pread(self._data, self._bytes, self._offset(key, _newest(self._stamps[key])))
        return torch.from_numpy(np.frombuffer(raw, self._dtype).copy())

    def __setitem__(self, key: int, row: Tensor) -> None:
        if key not in self._place:
            self._place[key] = len(self._place)
            self._stamps[key] = [0, 0]
        stamps = self._stamps[key]
        needed = max((stamp, place) for place, stamp in enumerate(stamps) if stamp <= self._committed or not stamp)
        place = 1 - needed[1] if needed[0] else 0
        with explain_os_error(self._folder):
            _write(
                self._data,
                row.detach().cpu().numpy().astype(self._dtype, copy=False).tobytes(),
                self._offset(key, place),
            )
            stamps[place] = self.now
            self._write_index(key)

    def commit(self, rounds: int) -> None:
        self._committed = rounds

    def rewind(self, rounds: int) -> None:
        for key, stamps in list(self._stamps.items()):
            self._stamps[key] = [_until(rounds, stamp) for stamp in stamps]
            if self._stamps[key] == [0, 0]:
                del self._stamps[key], self._place[key]
            elif self._stamps[key] != stamps:
                self._write_index(key)
        # FunctionalCall are given out in order, so those forgotten are the last ones.
        os.ftruncate(self._index, len(self._place) * 3 * _STAMP.itemsize)
        os.ftruncate(self._data, min(os.fstat(self._data).st_size, len(self._place) * 2 * self._bytes))
        self.commit(rounds)

    def _offset(self, key: int, place: int) -> int:
        return (2 * self._place[key] + place) * self._bytes

    def _write_index(self, key: int) -> None:
        entry = np.array([key + 1, *self._stamps[key]], _STAMP)
        _write(self._index, entry.tobytes(), self._place[key] * entry.nbytes)

    def _read_index(self) -> None:
        raw = os.pread(self._index, os.fstat(self._index).st_size, 0)
        entries = np.frombuffer(raw[: len(raw) // (3 * _STAMP.itemsize) * 3 * _STAMP.itemsize], _STAMP).reshape(-1, 3)
        for place, (key, first, second) in enumerate(entries.tolist()):
            self._place[key - 1] = place
            self._stamps[key - 1] = [first, second]

    def close(self) -> None:
        os.close(self._data)
        os.close(self._index)


class PastRows(FileRows):
    """The rows of a file as a checkpoint after so many rounds needs them, to look at; the file stays as it is."""

    def __init__(self, folder: Path, width: int, dtype: torch.dtype, rounds: int) -> None:
        Rows.__init__(self)
        self._dtype = _NUMPY[dtype]
        self._bytes = width * self._dtype.itemsize
        self._place, self._stamps = {}, {}
        with explain_os_error(folder):
            self._data = os.open(folder / "rows.bin", os.O_RDONLY)
            self._index = os.open(folder / "index.bin", os.O_RDONLY)
        self._read_index()
        self._stamps = {key: [_until(rounds, stamp) for stamp in stamps] for key, stamps in self._stamps.items()}
        self._place = {key: place for key, place in self._place.items() if any(self._stamps[key])}

    def __setitem__(self, key: int, row: Tensor) -> None:
        raise TypeError("rows of the past are only read")


class CachedRows(Rows):
    """Rows of a file that stay in memory, on the device they came from, until a checkpoint or a limit wants them written."""

    def __init__(self, file: FileRows, limit: int) -> None:
        super().__init__()
        self._file, self._limit = file, limit
        self._unwritten: dict[int, None] = {}

    def __contains__(self, key: int) -> bool:
        return key in self._rows or key in self._file

    @property
    def count(self) -> int:
        return self._file.count

    def readable(self, rounds: int) -> int:
        return self._file.readable(rounds)

    def __getitem__(self, key: int) -> Tensor:
        if key not in self._rows:
            self._rows[key] = self._file[key]
        return self._rows[key]

    def __setitem__(self, key: int, row: Tensor) -> None:
        self._rows[key] = row
        self._unwritten[key] = None
        if len(self._rows) * row.nbytes > self._limit:
            self.flush()
            self._rows.clear()

    def flush(self) -> None:
        self._file.now = self.now
        for key in self._unwritten:
            self._file[key] = self._rows[key]
        self._unwritten.clear()

    def commit(self, rounds: int) -> None:
        self._file.commit(rounds)

    def rewind(self, rounds: int) -> None:
        self._rows.clear()
        self._unwritten.clear()
        self._file.rewind(rounds)

    def close(self) -> None:
        self._file.close()


def cache_size(device: torch.device) -> int:
    """How many bytes of rows may stay in memory: a quarter of a GPU's, or 2 GB."""
    return torch.cuda.get_device_properties(device).total_memory // 4 if device.type == "cuda" else 2 * 10**9


def _until(rounds: int, stamp: int) -> int:
    """A stamp, or none where it is later than so many rounds."""
    return stamp if stamp <= rounds else 0


def _newest(stamps: list[int]) -> int:
    """Which of a row's two places was written last."""
    first, second = stamps
    return int(second > first)


def _write(descriptor: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written
