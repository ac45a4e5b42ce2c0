"""Averages of the server's models over rounds. They are evaluated and never fed back into training."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class Ring(Protocol):
    """A fixed number of vectors kept by position."""

    def __setitem__(self, position: int, vector: Tensor) -> None: ...
    def __getitem__(self, position: int) -> Tensor: ...


@dataclass(frozen=True)
class RunInfo:
    """What an average may know of the run it belongs to."""

    rounds: int
    cycle: int
    """After how many rounds the local rate repeats: SWA captures once per cycle."""
    classifier: Tensor
    """A boolean vector, true where the last linear layer lies."""
    ring: Callable[[str, int], Ring]
    """A new ring, by name and number of vectors."""
    first: int = 0
    """Rounds that the run's first model has behind it."""


class AverageState(ABC):
    """An average in the middle of a run."""

    def before(self, round: int, x: Tensor) -> None:  # noqa: B027 - most averages only look after a round
        """Called with the server's model before a round."""

    @abstractmethod
    def after(self, round: int, x: Tensor) -> None:
        """Called with the server's model after a round."""

    @abstractmethod
    def model(self, x: Tensor) -> Tensor | None:
        """The average as a model, ``x`` being the server's; None while there is none."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint must hold."""

    @abstractmethod
    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Go on from what ``tensors`` gave."""


@dataclass(frozen=True)
class Average(ABC):
    """A way to average the server's models over rounds."""

    @abstractmethod
    def begin(self, scene: RunInfo, x: Tensor) -> AverageState:
        """The average of a run that starts at ``x``."""

    def averages_nothing(self, scene: RunInfo) -> str:
        """Why a run gives it no model to average, and what to change, in words; empty where it gives some."""
        return ""


def rounds_before(share: float, rounds: int) -> int:
    """How many rounds a share of them is, in whole ones; what floating point takes off a whole one does not count.

    >>> rounds_before(0.58, 100), rounds_before(0.75, 10)
    (58, 7)
    """
    return int(share * rounds + 1e-9)
