"""The interface between an experiment and an engine: what a round needs and what it returns.

One round of one client, from sampling to the server:

1. ``plan.Sampler`` draws the cohort. The experiment passes it to ``Engine.train`` as a list of ``Client``.
2. The engine computes z, the model that clients start from, and copies it and each client's state into
   ``cohort_buffers.CohortBuffers``.
3. ``client.train_client`` (on a GPU ``gpu/lane.py``) draws the batches, takes the local steps, and writes the client's
   displacement, messages, new state and BatchNorm statistics into its row.
4. ``cohort.reduce_rows`` averages the rows with the weights of ``aggregation.Aggregation`` and returns an ``Outcome``.
5. The experiment passes the outcome to ``Algorithm.aggregate``, which returns the next server model and state.

Shapes: a weight vector is [parameters], BatchNorm statistics are [buffers], a cohort's rows are [cohort, parameters].
All are of ``Problem.dtype`` (float32 by default) on ``Problem.device``.

Client state has one representation at this interface, ``States``: slot -> field -> tensor, where a tensor is
[parameters] or a scalar, with the dtype and device above. ``RemoteState`` is the same mapping for state that is still
on a worker. Inside an engine the same numbers are rows of ``CohortBuffers``, and between processes numpy arrays, both
under flat names (``slot.field``); ``cohort_buffers.py`` converts between these forms.
"""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from torch import Tensor

from fedflat.algorithms.algorithm import Algorithm, States
from fedflat.algorithms.descent import Descent
from fedflat.algorithms.lr_schedule import Schedule
from fedflat.algorithms.slot import CohortMeans
from fedflat.algorithms.state import State
from fedflat.data import Examples
from fedflat.engines.round.aggregation import Aggregation
from fedflat.engines.round.plan import Plan
from fedflat.privacy import GaussianMechanism


@dataclass(frozen=True)
class Training:
    """How clients train, the same in every round.

    Args:
        algorithm: the slots, e.g. drift correction and server optimiser, and averages.
        descent: momentum, weight decay and clipping of local steps.
        schedule: base learning rate, decay and number of rounds.
        plan: batch size, and local epochs or steps.
        seed: seed of all sampling and augmentation.
        clients: number of clients in the federation.
        aggregation: how the server combines what clients send.
        own_statistics: whether clients keep their own BatchNorm statistics (SiLoBN).
        privacy: clipping and noise, if the run is differentially private.
    """

    algorithm: Algorithm
    descent: Descent
    schedule: Schedule
    plan: Plan
    seed: int
    clients: int
    aggregation: Aggregation
    own_statistics: bool = False
    privacy: GaussianMechanism | None = None


class ModelState(NamedTuple):
    """A model: weights [parameters], floating-point buffers [buffers], and integer buffers by name."""

    weights: Tensor
    buffers: Tensor
    integer_buffers: dict[str, Tensor]


class RoundStart(NamedTuple):
    """What the server and all clients of a round start from.

    Attributes:
        training: how clients train.
        round: number of the round, from 0.
        model: the server's model.
        server: the server's state by slot.
        z: the model that clients start from [parameters].
    """

    training: Training
    round: int
    model: ModelState
    server: States
    z: Tensor

    @classmethod
    def of(cls, training: Training, round: int, model: ModelState, server: States) -> RoundStart:
        """Compute z from the server's model and state."""
        return cls(training, round, model, server, training.algorithm.broadcast(model.weights, server))


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

    def in_round(self, round: int) -> ClientRound:
        """This client in a certain round."""
        return ClientRound(round, self.number, self.indices)


class ClientRound(NamedTuple):
    """One client in one round, which together with the seed determine all of its random numbers.

    Attributes:
        round: number of the round, from 0.
        client: the client's number in the federation.
        indices: int64 positions of its examples in the training set [examples].
    """

    round: int
    client: int
    indices: np.ndarray


@dataclass
class Cost:
    """What training has cost, summed over clients: backward passes, examples seen, and floats sent.

    ``floats_down`` counts those from the server to clients, ``floats_up`` those from clients to the server.
    """

    backward_passes: int = 0
    samples: int = 0
    floats_down: int = 0
    floats_up: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(**{name: value + getattr(other, name) for name, value in asdict(self).items()})


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
    """The result of training a cohort: means over its clients, and their new states.

    Attributes:
        cohort_means: means of displacements and directions [parameters], for ``Algorithm.aggregate``.
        message_means: means of the slots' messages, by slot; for client weights, also what changes in their server
            state.
        clients: the cohort with its new states.
        buffers: the new BatchNorm statistics of the server's model [buffers].
        integer_buffers: the new integer buffers of the server's model, by name.
        loss: mean training loss over all steps of all clients, a scalar.
        cost: what the round cost.
        rows: every client's row, where the engine has them; for in-run measurements, not for training.
        lr_sums: each client's sum of learning rates H_i [cohort]; None if clients of several rounds were combined.
    """

    cohort_means: CohortMeans
    message_means: States
    clients: list[Client]
    buffers: Tensor
    integer_buffers: dict[str, Tensor]
    loss: Tensor
    cost: Cost = field(default_factory=Cost)
    rows: CohortRows | None = None
    lr_sums: Tensor | None = None


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

    def prepare(self, training: Training, round: int, clients: list[tuple[int, np.ndarray]]) -> None:
        """Prepare a later round while the device is busy; engines that cannot do so ignore the call.

        ``clients`` lists, for each client, its number and the positions of its examples in the training set.
        """
        ...

    def evaluate(
        self, models: dict[str, ModelState], examples: dict[str, Examples]
    ) -> dict[str, dict[str, dict[str, float]]]:
        """Metrics of every model on every set of examples: model -> set -> metric -> value."""
        ...


@runtime_checkable
class GroupEngine(Protocol):
    """An engine that trains several groups of clients at once, as asynchronous runs need."""

    def train_groups(
        self, training: Training, round: int, model: ModelState, server: States, groups: list[list[Client]]
    ) -> list[Outcome]:
        """Train several groups for one round; returns the outcome that ``train`` would return for each.

        ``server`` is the server's state by slot, and ``groups`` lists the clients of each group; none is in two groups.
        """
        ...


@runtime_checkable
class RepeatingEngine(Protocol):
    """An engine that may train a round again after a restart, because its clients are at remote sites."""

    @property
    def private_rounds(self) -> int:
        """How often a private run has trained a round, over all of its starts; 0 without privacy."""
        ...


Read = Callable[[], States]
"""Reads a client's state from where it is stored."""


class RemoteState(Mapping[str, State]):
    """A client's state by slot after a certain round, fetched from its worker when it is first read.

    Args:
        fetch: gets the state from its worker and passes it to ``deliver``.
    """

    def __init__(self, fetch: Callable[[], None]) -> None:
        """Refer to a state that is still on its worker; ``fetch`` gets it and calls ``deliver``."""
        self._fetch = fetch
        self._read: Read | None = None  # set by ``deliver``
        self._store: Callable[[States], Read] | None = None  # set by ``store_with``, until the state is delivered

    def deliver(self, states: States) -> None:
        """Accept the state, by slot, from its worker.

        It is kept here, or stored by the function given to ``store_with``, which returns a function that reads it.
        """
        self._read = self._store(states) if self._store else lambda: states
        # Neither function is needed again, and both hold references to earlier states.
        self._store, self._fetch = None, _do_nothing

    def store_with(self, store: Callable[[States], Read]) -> None:
        """Persist the state now, or once it has been delivered.

        ``store`` writes the state and returns a function that reads it, so that it need not stay in memory.
        """
        if self._read is None:  # not delivered yet
            self._store = store
        else:
            self._read = store(self._read())

    def fetch(self) -> None:
        """Get the state from its worker, unless it has been delivered."""
        if self._read is None:
            self._fetch()

    def states(self) -> States:
        """The state, fetched if necessary."""
        self.fetch()
        assert self._read is not None
        return self._read()

    def __getitem__(self, slot: str) -> State:
        return self.states()[slot]

    def __iter__(self) -> Iterator[str]:
        return iter(self.states())

    def __len__(self) -> int:
        return len(self.states())

    def items(self) -> ItemsView[str, State]:
        """Slots and their state, read once."""
        return self.states().items()


def _do_nothing() -> None:
    """Replaces the fetch of a state that has been delivered."""
