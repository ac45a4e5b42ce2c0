"""The interface between an experiment and an engine: what a round needs and what it returns.

One round of one client, from sampling to the server:

1. ``plan.Sampler`` draws the cohort. The experiment passes it to ``Engine.train`` as a list of ``Client``.
2. The engine computes z, the model that clients start from, and copies it and each client's state into
   ``client.CohortBuffers``.
3. ``client.train_client`` (on a GPU ``gpu/lane.py``) draws the batches, takes the local steps, and writes the client's
   displacement, messages, new state and BatchNorm statistics into its row.
4. ``cohort.reduce_rows`` averages the rows with the weights of ``Aggregation`` and returns an ``Outcome``.
5. The experiment passes the outcome to ``Algorithm.aggregate``, which returns the next server model and state.

Shapes: a weight vector is [parameters], BatchNorm statistics are [buffers], a cohort's rows are [cohort, parameters].
All are of ``Problem.dtype`` (float32 by default) on ``Problem.device``.

Client state has one representation at this interface, ``States``: slot -> field -> tensor, where a tensor is
[parameters] or a scalar, with the dtype and device above. ``RemoteState`` is the same mapping for state that is still
on a worker. Inside an engine the same numbers are rows of ``CohortBuffers``, and between processes numpy arrays, both
under flat names (``slot.field``); ``client.py`` converts between these forms.
"""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from fedflat.algorithms.algorithm import Algorithm, States
from fedflat.algorithms.descent import Descent
from fedflat.algorithms.lr_schedule import Schedule
from fedflat.algorithms.slot import CohortMeans
from fedflat.algorithms.state import State
from fedflat.data import Examples
from fedflat.engines.round.plan import Plan
from fedflat.errors import UserError
from fedflat.privacy import GaussianMechanism

Centre = Literal["mean", "median", "trimmed", "clipped"]
"""How a cohort's rows are combined into one; all but ``mean`` are robust to a few arbitrary rows."""
BLOCK = 8
"""Clients per partial sum. It is fixed, so results do not depend on the number of workers."""
PART = 2**26
"""Elements of a cohort's rows that a GPU scales at a time."""
CACHED = 2**16
"""Elements of each row that a CPU sums at a time: those of a block of rows fit into the cache."""


@dataclass(frozen=True)
class Aggregation:
    """How the server combines the rows of a cohort.

    Median and trimmed mean act on each coordinate and weight all clients equally (Yin et al. 2018). ``clipped`` is the
    mean of rows whose norm is clipped to a multiple of the cohort's median norm.

    Args:
        weighting: weights of displacements, by the clients' sample counts or uniform.
        centre: the mean or a robust centre.
        trim: share of the clients that the trimmed mean drops at each end.
        longest: largest norm after clipping, in units of the cohort's median norm.
    """

    weighting: Literal["samples", "uniform"] = "samples"
    centre: Centre = "mean"
    trim: float = 0.1
    longest: float = 1.0

    @property
    def needs_rows(self) -> bool:
        """Whether every client's row is needed; partial sums suffice for the mean."""
        return self.centre != "mean"

    def weights(self, samples: Sequence[int]) -> list[float]:
        """Weights p_i that sum to 1, from the clients' sample counts."""
        return weights_by_samples(samples) if self.weighting == "samples" else uniform_weights(len(samples))

    def combine(self, rows: Tensor, weights: Sequence[float] | Tensor) -> Tensor:
        """Combine the cohort's rows [cohort, ...] into one [...]; median and trimmed mean ignore the weights."""
        if self.centre == "mean":
            return weighted_sum(rows, weights)
        if self.centre == "clipped":
            return weighted_sum(self._clipped(rows), weights)
        count = len(rows)
        # The median is the mean of what remains after dropping all but the middle one or two values.
        dropped = (count - 1) // 2 if self.centre == "median" else int(self.trim * count)
        if 2 * dropped >= count:
            raise UserError(
                f"a trimmed mean with trim={self.trim} drops all {count} clients; use a smaller trim or more clients"
            )
        centre: Tensor = rows.sort(0).values[dropped : count - dropped].mean(0)
        return centre

    def _clipped(self, rows: Tensor) -> Tensor:
        """The rows [cohort, ...], shortened where their norm exceeds ``longest`` times the cohort's median norm."""
        norms = rows.reshape(len(rows), -1).norm(dim=1)
        largest_norm = self.longest * norms.quantile(0.5)
        scale = (largest_norm / norms.clamp_min(torch.finfo(rows.dtype).tiny)).clamp_max(1.0)
        return _scale_rows(rows, scale)


def uniform_weights(count: int) -> list[float]:
    """Equal weights that sum to 1."""
    return [1 / count] * count


def weights_by_samples(samples: Sequence[int]) -> list[float]:
    """Weights proportional to sample counts, which sum to 1."""
    total = sum(samples)
    return [n / total for n in samples]


def weighted_sum(rows: Tensor, weights: Sequence[float] | Tensor) -> Tensor:
    """The weighted sum of rows [cohort, ...] -> [...]; weights [cohort].

    On a CPU, the rows of each block of ``BLOCK`` rows are added in order, then the sums of the blocks. The result is
    therefore bit-identical if Ray workers each sum some of the blocks. On a GPU, torch chooses the order.
    """
    if rows.is_cuda:
        return sum_in_parts(rows, weights)
    scales = torch.split(weights if isinstance(weights, Tensor) else _tensor_like(weights, rows), BLOCK)

    def total(part: Tensor) -> Tensor:
        blocks = zip(torch.split(part, BLOCK), scales, strict=True)
        return sum_of_blocks([block_sum(block, scale) for block, scale in blocks])

    if rows.ndim == 1:
        return total(rows)
    return torch.cat([total(part) for part in torch.split(rows, CACHED, dim=1)])


def sum_in_parts(rows: Tensor, weights: Sequence[float] | Tensor, part: int = PART) -> Tensor:
    """The weighted sum of rows for ``part`` elements at a time, since a scaled copy of all rows may not fit."""
    scale = weights if isinstance(weights, Tensor) else _tensor_like(weights, rows)
    if rows.ndim == 1:
        return (rows * scale).sum(0)
    columns = torch.split(rows, max(part // len(rows), 1), dim=1)
    return torch.cat([_scale_rows(some, scale).sum(0) for some in columns])


def block_sum(rows: Tensor, weights: Sequence[float] | Tensor) -> Tensor:
    """The partial sum of one block of at most ``BLOCK`` rows, bit-identical to its part of ``weighted_sum``."""
    return sum_of_rows(_scale_rows(rows, weights))


def sum_of_rows(rows: Tensor) -> Tensor:
    """The sum of rows [n, ...], added one after another, so that the bits do not depend on torch's summation order."""
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total


def sum_of_blocks(partials: Sequence[Tensor]) -> Tensor:
    """The total of partial sums over blocks of clients, which must be in cohort order."""
    total = torch.zeros_like(partials[0])
    for partial in partials:
        total += partial
    return total


def _scale_rows(rows: Tensor, weights: Sequence[float] | Tensor) -> Tensor:
    """Multiply each of the rows [cohort, ...] by its weight."""
    scale = weights if isinstance(weights, Tensor) else _tensor_like(weights, rows)
    # Append dimensions of size 1 to the weights [cohort], so that each one multiplies a whole row.
    return rows * scale.reshape(-1, *[1] * (rows.ndim - 1))


def _tensor_like(numbers: Sequence[float], like: Tensor) -> Tensor:
    """Numbers as a tensor with the dtype and device of ``like``; copying to a GPU does not wait for it."""
    on_host = torch.tensor(numbers, dtype=like.dtype)
    return on_host.pin_memory().to(like.device, non_blocking=True) if like.is_cuda else on_host.to(like.device)


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
    """What a cohort returned, reduced over its clients.

    Attributes:
        returned: means of displacements and directions [parameters], for ``Algorithm.aggregate``.
        means: means of what the slots send, by slot; for client weights, also what changes in their server state.
        clients: the cohort with its new states.
        buffers: the new BatchNorm statistics of the server's model [buffers].
        integer_buffers: the new integer buffers of the server's model, by name.
        loss: mean training loss over all steps of all clients, a scalar.
        cost: what the round cost.
        rows: every client's row, where the engine has them; for in-run measurements, not for training.
        lr_sums: each client's sum of learning rates H_i [cohort]; None if clients of several rounds were combined.
    """

    returned: CohortMeans
    means: States
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

    def prepare(self, training: Training, round: int, cohort: list[tuple[int, np.ndarray]]) -> None:
        """Prepare a later round while the device is busy; engines that cannot do so ignore the call.

        ``cohort`` lists, for each client, its number and the positions of its examples in the training set.
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
