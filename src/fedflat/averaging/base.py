"""Interface of averages over rounds, which are evaluated but never fed back into training."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class Ring(Protocol):
    """A fixed number of stored vectors, addressed by position."""

    def __setitem__(self, position: int, vector: Tensor) -> None: ...
    def __getitem__(self, position: int) -> Tensor: ...


@dataclass(frozen=True)
class RunInfo:
    """What an average may know about its run; P is the number of entries of a model vector."""

    rounds: int
    """Number of rounds T."""
    cycle: int
    """Rounds after which the learning-rate schedule repeats; SWA captures one model per cycle."""
    classifier: Tensor
    """Boolean vector of shape (P,), true for the last linear layer."""
    ring: Callable[[str, int], Ring]
    """Creates a ring buffer that holds a number of vectors and is stored under a name."""
    first: int = 0
    """Rounds completed before the run started, e.g. by the run it continues."""


class AverageState(ABC):
    """The state of an average during a run."""

    def before_round(self, round: int, x: Tensor) -> None:  # noqa: B027 - most averages need only ``update``
        """Receive the server model ``x`` of shape (P,) with which ``round`` (counted from 0) starts."""

    @abstractmethod
    def update(self, round: int, x: Tensor) -> None:
        """Update the average with the server model ``x`` of shape (P,) that ``round`` (counted from 0) produced."""

    @abstractmethod
    def model(self, x: Tensor) -> Tensor | None:
        """The averaged model of shape (P,); None before averaging has begun.

        ``x`` is the current server model. It gives the dtype, and the entries that the average leaves out.
        """

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """The state as tensors by name, to store in a checkpoint."""

    @abstractmethod
    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Restore the state from ``tensors``, read from a checkpoint; the inverse of the method ``tensors``."""


@dataclass(frozen=True)
class Average(ABC):
    """An average of server models over rounds, described by its parameters."""

    @abstractmethod
    def begin(self, info: RunInfo, x: Tensor) -> AverageState:
        """The initial state for a run that starts at the model ``x`` of shape (P,)."""

    def warning(self, info: RunInfo) -> str | None:
        """Return why no model would be averaged in this run and what to change, or None if there are models."""
        return None


def rounds_before(fraction: float, rounds: int) -> int:
    """The number of rounds in the first ``fraction`` of a run, rounded down.

    Floating-point errors are ignored: 0.58 * 100, which is computed as 57.99..., counts as 58.

    >>> rounds_before(0.58, 100), rounds_before(0.75, 10)
    (58, 7)
    """
    return int(fraction * rounds + 1e-9)
