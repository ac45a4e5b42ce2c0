"""The contract between an experiment and an engine: what a round asks for, and what comes back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
from torch import Tensor

from fedflat.algorithms.algorithm import Algorithm, States
from fedflat.algorithms.descent import Descent
from fedflat.algorithms.lr_schedule import Schedule
from fedflat.algorithms.slot import CohortMeans, State
from fedflat.data import Examples
from fedflat.engines.round.aggregation import Aggregation
from fedflat.engines.round.plan import Plan


@dataclass(frozen=True)
class Training:
    """How every client of every round trains."""

    algorithm: Algorithm
    descent: Descent
    schedule: Schedule
    plan: Plan
    seed: int
    clients: int
    """How many clients there are in all."""
    aggregation: Aggregation
    own_statistics: bool = False
    """SiLoBN: clients keep their normalisation statistics."""


class ModelState(NamedTuple):
    """A model: trainable weights, floating buffers, integer buffers."""

    weights: Tensor
    buffers: Tensor
    integers: dict[str, Tensor]


class Client(NamedTuple):
    """A client that takes part: its number, its data, and what it keeps."""

    number: int
    indices: np.ndarray
    state: Mapping[str, State]
    """By slot; here, or where it was trained (``away.RemoteState``)."""
    statistics: Tensor | None = None
    """Its own normalisation statistics, where clients keep them."""


@dataclass
class Cost:
    """What a run has spent, summed over clients."""

    backward_passes: int = 0
    samples: int = 0
    floats_down: int = 0
    floats_up: int = 0


class CohortRows(NamedTuple):
    """What each client of a cohort ended with, a row each: views of an engine's own memory, good until it trains again."""

    displacements: Tensor
    """[clients, P], as uploaded."""
    buffers: Tensor
    """[clients, B]: floating buffers, which are BatchNorm statistics."""


@dataclass(frozen=True)
class Outcome:
    """What came back from a cohort."""

    returned: CohortMeans
    means: States
    clients: list[Client]
    """The cohort with its new states."""
    buffers: Tensor
    integers: dict[str, Tensor]
    loss: Tensor
    """The mean training loss over all steps of all clients."""
    cost: Cost = field(default_factory=Cost)
    rows: CohortRows | None = None
    """For whoever looks at single clients; nothing in training does."""


class Engine(Protocol):
    """Trains cohorts and evaluates models."""

    def train(self, training: Training, round: int, model: ModelState, server: States, cohort: list[Client]) -> Outcome:
        """Train a cohort for one round."""
        ...

    def prepare(self, training: Training, round: int, cohort: list[tuple[int, np.ndarray]]) -> None:
        """Get ready for a coming round, given as (client, indices), where that saves time."""
        ...

    def evaluate(
        self, models: dict[str, ModelState], examples: dict[str, Examples]
    ) -> dict[str, dict[str, dict[str, float]]]:
        """Every metric of every model on every set of examples: model, set, metric."""
        ...
