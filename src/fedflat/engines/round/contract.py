"""The interface between an experiment and an engine: what a round needs and what it returns.

One round of one client, from sampling to the server:

1. ``plan.Sampler`` picks the cohort. The experiment passes it to ``Engine.train`` as a list of ``Client``. 2. The
engine computes z, the model that clients start from, and copies it into ``CohortBuffers`` with each client's state. 3.
``client.train_client`` (on a GPU ``gpu/lane.py``) draws the batches, takes the local steps, and writes the client's
   displacement, messages, new state and BatchNorm statistics into its row.
4. ``reduction.reduce_rows`` averages the rows (``aggregation.py``) and returns an ``Outcome``.
5. The experiment calls ``Algorithm.aggregate`` with it, which yields the next server model and state.

Shapes: a weight vector is [parameters], BatchNorm statistics are [buffers], a cohort's rows are [cohort, parameters].
All are of ``Problem.dtype`` (float32 by default) on ``Problem.device``.

Client state has one representation at this interface, ``States``: slot -> field -> tensor, where a tensor is
[parameters] or a scalar, with the dtype and device above. ``RemoteState`` is the same mapping for state that is still
on a worker. Inside an engine the same numbers are rows of ``CohortBuffers``, and between processes numpy arrays, both
under flat names (``slot.field``); ``cohort_buffers.py`` is where they are converted.
"""

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
    """How clients train, the same in every round.

    Args:
        algorithm: the slots: drift, perturbation, learning-rate schedule, server optimiser, averages.
        descent: the local optimiser's momentum, weight decay and clipping.
        schedule: base learning rate, decay and number of rounds.
        plan: batch size, and local epochs or steps.
        seed: seed of all sampling and augmentation.
        clients: number of clients in the federation.
        aggregation: how the server combines what clients send.
        own_statistics: whether clients keep their own BatchNorm statistics (SiLoBN).
    """

    algorithm: Algorithm
    descent: Descent
    schedule: Schedule
    plan: Plan
    seed: int
    clients: int
    aggregation: Aggregation
    own_statistics: bool = False


class ModelState(NamedTuple):
    """A model: weights [parameters], floating-point buffers [buffers], and integer buffers by name."""

    weights: Tensor
    buffers: Tensor
    integers: dict[str, Tensor]


class Client(NamedTuple):
    """A participating client.

    Attributes:
        number: index of the client in the federation.
        indices: int64 positions of its examples in the training set [examples].
        state: the state it keeps between rounds, by slot; a dict, or a ``RemoteState``.
        statistics: its own BatchNorm statistics [buffers], if ``Training.own_statistics``.
    """

    number: int
    indices: np.ndarray
    state: Mapping[str, State]
    statistics: Tensor | None = None


@dataclass
class Cost:
    """What a run has spent, summed over clients: backward passes, examples seen, and numbers sent each way."""

    backward_passes: int = 0
    samples: int = 0
    floats_down: int = 0
    floats_up: int = 0


class CohortRows(NamedTuple):
    """What each client of a cohort sent. Both are views of engine memory, valid until the next round.

    Attributes:
        displacements: [cohort, parameters].
        buffers: BatchNorm statistics [cohort, buffers].
    """

    displacements: Tensor
    buffers: Tensor


@dataclass(frozen=True)
class Outcome:
    """What a cohort returned, reduced over its clients.

    Attributes:
        returned: means of displacements and directions [parameters], for ``Algorithm.aggregate``.
        means: means of what the slots send, by slot.
        clients: the cohort with its new states.
        buffers: the new BatchNorm statistics of the server's model [buffers].
        integers: its new integer buffers by name.
        loss: mean training loss over all steps of all clients, a scalar.
        cost: what the round cost.
        rows: every client's row, where the engine has them; for in-run measurements, not for training.
    """

    returned: CohortMeans
    means: States
    clients: list[Client]
    buffers: Tensor
    integers: dict[str, Tensor]
    loss: Tensor
    cost: Cost = field(default_factory=Cost)
    rows: CohortRows | None = None


class Engine(Protocol):
    """Trains cohorts and evaluates models."""

    def train(self, training: Training, round: int, model: ModelState, server: States, cohort: list[Client]) -> Outcome:
        """Train a cohort for one round.

        Args:
            training: how clients train.
            round: number of the round, from 0.
            model: the server's model.
            server: the server's state by slot.
            cohort: the participating clients, in ascending order.
        """
        ...

    def prepare(self, training: Training, round: int, cohort: list[tuple[int, np.ndarray]]) -> None:
        """Prepare a coming round, given as (client, indices), if that saves time."""
        ...

    def evaluate(
        self, models: dict[str, ModelState], examples: dict[str, Examples]
    ) -> dict[str, dict[str, dict[str, float]]]:
        """Metrics of every model on every set of examples: model -> set -> metric -> value."""
        ...
