"""Parts of clocks that describe how fast clients compute and communicate."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedflat.errors import UserError
from fedflat.text import param
from fedflat.timing.draws import FloatArray, IntArray, normal, uniform
from fedflat.timing.traces import speed_trace

SECONDS_HELP = "seconds of one local step with one backward pass"


class ClockPart(ABC):
    """A part of a clock; a frozen dataclass whose fields are the parameters of its text."""

    kind: ClassVar[str]
    """What the part describes; a clock has at most one part of each kind."""

    def trace_files(self) -> list[str]:
        """The files that this part reads."""
        return []

    def check(self, clients: int) -> None:  # noqa: B027
        """Raise a ``UserError`` if the part does not describe all ``clients`` clients of the federation."""


class Speed(ClockPart):
    """How fast clients compute."""

    kind = "speed"

    @abstractmethod
    def seconds_per_step(self, seed: int, clients: IntArray) -> FloatArray:
        """Seconds that each client [n] needs for a local step with one backward pass, [n]."""

    def link_mbps(self, direction: str, clients: IntArray) -> FloatArray | None:
        """Bandwidth of each client [n] in a direction, ``uplink`` or ``downlink``; None if not known to this part."""
        return None


@dataclass(frozen=True)
class ConstantSpeed(Speed):
    """Every client is equally fast.

    >>> ConstantSpeed(seconds=0.5).seconds_per_step(0, np.arange(2))
    array([0.5, 0.5])
    """

    seconds: float = param(0.1, SECONDS_HELP, above=0)

    def seconds_per_step(self, seed: int, clients: IntArray) -> FloatArray:
        return np.full(len(clients), self.seconds)


@dataclass(frozen=True)
class LognormalSpeed(Speed):
    """The logarithm of a client's step time is normally distributed.

        seconds_i = seconds exp(sigma n_i)

    n_i is a standard normal random number of client i.

    >>> LognormalSpeed(sigma=0.0, seconds=0.5).seconds_per_step(0, np.arange(2))
    array([0.5, 0.5])
    """

    sigma: float = param(0.6, "standard deviation of the logarithm of step times", low=0, high=10, positional=True)
    seconds: float = param(0.1, f"{SECONDS_HELP}, of the median client", above=0)

    def seconds_per_step(self, seed: int, clients: IntArray) -> FloatArray:
        values: FloatArray = self.seconds * np.exp(self.sigma * normal(seed, "speed", clients))
        return values


@dataclass(frozen=True)
class TieredSpeed(Speed):
    """Each client belongs to one of several tiers of devices, drawn with given probabilities.

    >>> sorted(set(TieredSpeed(seconds="0.1|0.4").seconds_per_step(0, np.arange(99)).tolist()))
    [0.1, 0.4]
    """

    seconds: str = param("0.05|0.1|0.4", f"{SECONDS_HELP}, of each tier, separated by |", positional=True)
    shares: str = param("", "share of the clients in each tier, separated by |; default: equal shares")

    def __post_init__(self) -> None:
        self._tiers()

    def seconds_per_step(self, seed: int, clients: IntArray) -> FloatArray:
        seconds, shares = self._tiers()
        limits = np.cumsum(shares)[:-1] / np.sum(shares)
        values: FloatArray = seconds[np.searchsorted(limits, uniform(seed, "tier", clients), side="right")]
        return values

    def _tiers(self) -> tuple[FloatArray, FloatArray]:
        """Seconds and shares of the tiers; raises a ``UserError`` if they are not positive numbers, one per tier."""
        seconds = _positive_numbers("tiers: seconds", self.seconds)
        shares = _positive_numbers("tiers: shares", self.shares) if self.shares else np.ones(len(seconds))
        if len(shares) != len(seconds):
            raise UserError(
                f"tiers has {len(seconds)} step times but {len(shares)} shares; expected one share per tier"
            )
        return seconds, shares


@dataclass(frozen=True)
class TracedSpeed(Speed):
    """Step times and, if the file has them, bandwidths come from a CSV file with one row per client.

    The columns are ``client``, numbered from 0, and ``seconds_per_step``, optionally ``uplink_mbps`` and
    ``downlink_mbps``.
    """

    path: str = param("", "CSV file", path=True, positional=True)
    repeat: bool = param(False, "whether clients beyond the last row of the file start again at its first row")

    def trace_files(self) -> list[str]:
        return [self.path]

    def check(self, clients: int) -> None:
        check_rows("trace", self.path, len(speed_trace(self.path)), clients, self.repeat)

    def seconds_per_step(self, seed: int, clients: IntArray) -> FloatArray:
        trace = speed_trace(self.path)
        return trace.columns["seconds_per_step"][clients % len(trace)]

    def link_mbps(self, direction: str, clients: IntArray) -> FloatArray | None:
        trace = speed_trace(self.path)
        values = trace.columns.get(f"{direction}_mbps")
        return None if values is None else values[clients % len(trace)]


@dataclass(frozen=True)
class Link(ClockPart):
    """The bandwidth of a connection; with ``sigma``, its logarithm is normally distributed over clients."""

    mbps: float = param(10.0, "bandwidth in megabits per second, of the median client", above=0, positional=True)
    sigma: float = param(0.0, "standard deviation of the logarithm of bandwidths; 0: equal", low=0, high=10)

    def link_mbps(self, seed: int, clients: IntArray) -> FloatArray:
        """Bandwidth of each client [n] in megabits per second, [n]."""
        values: FloatArray = self.mbps * np.exp(self.sigma * normal(seed, self.kind, clients))
        return values


@dataclass(frozen=True)
class Uplink(Link):
    """Bandwidth from clients to the server; without it, uploads take no time."""

    kind = "uplink"


@dataclass(frozen=True)
class Downlink(Link):
    """Bandwidth from the server to clients; without it, downloads take no time."""

    kind = "downlink"


@dataclass(frozen=True)
class Latency(ClockPart):
    """A fixed time per participation, e.g. for connecting and waking up."""

    kind = "latency"
    seconds: float = param(0.1, "seconds per participation of a client", low=0)


def _positive_numbers(what: str, text: str) -> FloatArray:
    """Numbers above 0 from a text in which they are separated by ``|``."""
    try:
        values = np.array([float(number) for number in str(text).split("|")])
    except ValueError:
        values = np.zeros(1)
    if not (np.isfinite(values).all() and (values > 0).all()):
        raise UserError(f"{what}={text} is invalid; expected numbers above 0, separated by |, such as 0.1|0.4")
    return values


def check_rows(part: str, path: str, described: int, clients: int, repeat: bool) -> None:
    """Raise a ``UserError`` if a trace describes fewer clients than there are and does not repeat."""
    if described < clients and not repeat:
        raise UserError(
            f"{path} describes {described} clients, but the federation has {clients}; add rows, "
            f"or reuse them with {part}(path=...,repeat=true)"
        )
