"""Interface and registry of averages over rounds, which are evaluated but never fed back into training."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from fedflat.registry import Registry
from fedflat.text import changed, show


class Ring(Protocol):
    """A ring buffer: a fixed number of stored vectors, read and written by position."""

    def __setitem__(self, position: int, vector: Tensor) -> None: ...
    def __getitem__(self, position: int) -> Tensor: ...


@dataclass(frozen=True)
class RunInfo:
    """Information about the run for averaging methods. P is the length of a model vector."""

    rounds: int
    """Number of rounds T of the run."""
    cycle: int
    """Number of rounds after which the learning-rate schedule repeats; SWA captures one model per cycle."""
    classifier: Tensor
    """Boolean vector of shape (P,) that is true for the parameters of the last linear layer."""
    ring: Callable[[str, int], Ring]
    """Function that creates a ring buffer, given the name under which it is stored and the number of its vectors."""
    first: int = 0
    """Number of rounds that were completed before this run started, e.g. by the run that it continues."""


class AverageState(ABC):
    """The state of an average during a run."""

    def before_round(self, round: int, x: Tensor) -> None:  # noqa: B027 - most averages need only ``update``
        """Receive the server model ``x`` of shape (P,) with which ``round`` (counted from 0) starts."""

    @abstractmethod
    def update(self, round: int, x: Tensor) -> None:
        """Update the average with the server model ``x`` of shape (P,) that ``round`` (counted from 0) produced."""

    @abstractmethod
    def model(self, x: Tensor) -> Tensor | None:
        """Return the averaged model of shape (P,), or None before averaging has begun.

        The current server model ``x`` provides the dtype, and the entries that are not averaged.
        """

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """Return the state as tensors by name, to store in a checkpoint."""

    @abstractmethod
    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Restore the state from ``tensors``, read from a checkpoint; the inverse of the method ``tensors``."""


@dataclass(frozen=True)
class Average(ABC):
    """An average of server models over rounds, described by its parameters."""

    @abstractmethod
    def begin(self, info: RunInfo, x: Tensor) -> AverageState:
        """Return the initial state of the average for a run that starts at the model ``x`` of shape (P,)."""

    def warning(self, info: RunInfo) -> str | None:
        """Return why this run would average no model and what to change, or None if it averages at least one."""
        return None


def rounds_before(fraction: float, rounds: int) -> int:
    """The number of rounds in the first ``fraction`` of a run, rounded down.

    Floating-point errors are ignored: 0.58 * 100, which is computed as 57.99..., counts as 58.

    >>> rounds_before(0.58, 100), rounds_before(0.75, 10)
    (58, 7)
    """
    return int(fraction * rounds + 1e-9)


AVERAGES: Registry[type[Average]] = Registry("average", see="fedflat algorithms", namespace="algorithm parts")
"""Averages by name."""


def average_name(average: Average) -> str:
    """Return the text that identifies an averaged model in metrics and files: name and non-default parameters.

    >>> from fedflat.averaging import Wima
    >>> average_name(Wima(window=50))
    'wima(window=50)'
    """
    return show(AVERAGES.name_of(type(average)) or type(average).__name__.lower(), changed(average))
