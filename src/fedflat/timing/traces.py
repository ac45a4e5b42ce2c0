"""Traces: CSV files with the speed and network of every client, or with the times at which clients are available.

A trace is read once per process into arrays with one number per row, so a million clients need a few megabytes.
"""

from __future__ import annotations

import csv
import hashlib
import warnings
from functools import lru_cache
from pathlib import Path

import numpy as np

from fedflat.errors import UserError, missing_file
from fedflat.timing.draws import BoolArray, FloatArray, IntArray

MAX_CLIENT = 10**8
"""Largest client number in a trace; memory grows with it."""
SPEED_COLUMNS = ("client", "seconds_per_step")
LINK_COLUMNS = ("uplink_mbps", "downlink_mbps")
SESSION_COLUMNS = ("client", "start", "end")


class SpeedTrace:
    """Seconds per step and, if the file has them, bandwidths of the clients 0 to n - 1.

    Attributes:
        columns: one number per client [n], by the name of the column.
    """

    def __init__(self, path: Path) -> None:
        columns = _read(path, SPEED_COLUMNS, LINK_COLUMNS)
        numbers = columns.pop("client")
        order = np.argsort(numbers, kind="stable")
        expected = np.arange(len(order))
        differing = np.flatnonzero(numbers[order] != expected)
        if len(differing):
            first = int(differing[0])
            raise UserError(
                f"{path} needs exactly one row per client, numbered 0 to {len(order) - 1}, but client {first} "
                f"{'is missing' if first not in numbers else 'is not the only one with its number'}"
            )
        self.columns = {name: values[order] for name, values in columns.items()}
        for name, values in self.columns.items():
            invalid = np.flatnonzero(~(values > 0))
            if len(invalid):
                raise UserError(
                    f"{path}: {name} of client {invalid[0]} is {values[invalid[0]]:g}; expected a number above 0"
                )

    def __len__(self) -> int:
        return len(self.columns["seconds_per_step"])


class SessionTrace:
    """The times at which clients are available, as sessions from ``start`` to ``end`` in virtual seconds.

    Sessions of one client must not overlap. A client without a session is never available.

    Attributes:
        clients: one more than the largest client number.
    """

    def __init__(self, path: Path) -> None:
        columns = _read(path, SESSION_COLUMNS, ())
        order = np.lexsort((columns["start"], columns["client"]))
        numbers = columns["client"][order].astype(np.int64)
        self._starts, self._ends = columns["start"][order], columns["end"][order]
        invalid = np.flatnonzero((self._starts < 0) | (self._starts >= self._ends))
        if len(invalid):
            row = int(invalid[0])
            raise UserError(
                f"{path}: client {numbers[row]} has a session from {self._starts[row]:g} to {self._ends[row]:g}; "
                "expected 0 <= start < end"
            )
        overlapping = np.flatnonzero((numbers[1:] == numbers[:-1]) & (self._starts[1:] < self._ends[:-1]))
        if len(overlapping):
            row = int(overlapping[0]) + 1
            raise UserError(
                f"{path}: client {numbers[row]} has overlapping sessions, one of which starts at {self._starts[row]:g}"
            )
        self.clients = int(numbers[-1]) + 1
        self._first_row = np.searchsorted(numbers, np.arange(self.clients + 1))  # of each client's sessions

    def __len__(self) -> int:
        return self.clients

    def available(self, clients: IntArray, time: float) -> BoolArray:
        """Whether each of the clients [n] is available at a time."""
        low, high = self._first_row[clients], self._first_row[clients + 1]
        first = low
        while (low < high).any():  # find each client's first session that starts after ``time``
            middle = (low + high) // 2
            has_started = (low < high) & (self._starts[np.minimum(middle, len(self._starts) - 1)] <= time)
            low, high = np.where(has_started, middle + 1, low), np.where(has_started | (low >= high), high, middle)
        last = np.maximum(low - 1, 0)
        present: BoolArray = (low > first) & (time < self._ends[last])
        return present


def speed_trace(path: str) -> SpeedTrace:
    """Read a trace of speeds, again only if the file has changed."""
    return _speed_trace(path, _stamp(path))


def session_trace(path: str) -> SessionTrace:
    """Read a trace of sessions, again only if the file has changed."""
    return _session_trace(path, _stamp(path))


@lru_cache(maxsize=8)
def _speed_trace(path: str, stamp: tuple[int, int]) -> SpeedTrace:
    return SpeedTrace(Path(path))


@lru_cache(maxsize=8)
def _session_trace(path: str, stamp: tuple[int, int]) -> SessionTrace:
    return SessionTrace(Path(path))


def _stamp(path: str) -> tuple[int, int]:
    """Time of the last change and size of a file; zeros if it does not exist, which reading it reports."""
    status = Path(path).stat() if Path(path).exists() else None
    return (status.st_mtime_ns, status.st_size) if status else (0, 0)


def digest(path: str) -> str:
    """The sha256 hash of a trace, by which a resumed run recognises it."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read(path: Path, required: tuple[str, ...], optional: tuple[str, ...]) -> dict[str, FloatArray]:
    """Read a CSV file with a header; returns one array per column.

    Args:
        path: the file.
        required: columns that it must have.
        optional: columns that it may have; there must be no others.

    Raises:
        UserError: the file is missing, has other columns, no rows, or a cell that is not a finite number.
    """
    if not path.is_file():
        raise missing_file(path, "the CSV file of a trace")
    with path.open(newline="", encoding="utf-8-sig") as file:
        try:
            header = [name.strip() for name in next(csv.reader(file), [])]
        except (UnicodeDecodeError, csv.Error) as error:
            raise UserError(f"{path} cannot be read: {error}; expected a CSV file in UTF-8") from None
        if not set(required) <= set(header) <= {*required, *optional} or len(set(header)) < len(header):
            may = f", and optionally {', '.join(optional)}" if optional else ""
            raise UserError(f"{path} has the columns {', '.join(header)}; expected {', '.join(required)}{may}")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # numpy warns of a file without rows, which is an error below
                table = np.loadtxt(file, delimiter=",", ndmin=2, dtype=np.float64, comments=None)
        except ValueError as error:
            raise UserError(f"{path} cannot be read: {error}; expected one number per column in each row") from None
    if not len(table) or table.shape[1] != len(header):
        raise UserError(f"{path} has no rows, or rows without all columns ({', '.join(header)})")
    if not np.isfinite(table).all():
        row, column = np.argwhere(~np.isfinite(table))[0]
        raise UserError(f"{path}: {header[column]} in data row {row + 1} is not a finite number")
    clients = table[:, header.index("client")]
    invalid = np.flatnonzero((clients != np.floor(clients)) | (clients < 0) | (clients > MAX_CLIENT))
    if len(invalid):
        raise UserError(
            f"{path}: client {clients[invalid[0]]:g} in data row {invalid[0] + 1} is invalid; expected integers from 0 "
            f"to {MAX_CLIENT:,}"
        )
    return {name: table[:, column].copy() for column, name in enumerate(header)}
