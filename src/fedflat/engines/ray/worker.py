"""A Ray worker: one process with one device, which builds the problem once and trains the clients it is sent with the local engine."""

from __future__ import annotations

import os
import socket
import sys
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedflat.algorithms.algorithm import flat_state, nested_state
from fedflat.algorithms.slot import State
from fedflat.engines.cpu.engine import LoopEngine, one_thread
from fedflat.engines.cpu.worker_pool import keep_memory
from fedflat.engines.gpu.engine import LaneEngine
from fedflat.engines.problem.problem import Problem
from fedflat.engines.round.aggregation import block_sum
from fedflat.engines.round.cohort_buffers import Table
from fedflat.engines.round.contract import Client, Training
from fedflat.engines.round.reduction import Report, Shares, weighted_rows
from fedflat.errors import UserError

Arrays = dict[str, np.ndarray]
"""Tensors on their way: the object store holds arrays without a copy for each reader."""
FRESH = 0
"""The stamp of the state that clients start with."""
MOST_KEPT = 2**30
"""Bytes of clients' state up to which a worker keeps what it trained before the last round."""


class Local(NamedTuple):
    """What a worker trains with: a problem on its own device and the engine that is best there."""

    problem: Problem
    engine: LoopEngine | LaneEngine


class About(NamedTuple):
    """What a worker says of itself."""

    version: str
    node: str
    process: int
    actor: str
    """What Ray calls it."""


@dataclass(frozen=True)
class Source:
    """A problem by name; the reference is to what builds it, and is followed by a worker once."""

    key: str
    build: list[Any]
    facts: dict[str, Any]
    """What the driver knows of it, and every worker must find too."""


@dataclass(frozen=True)
class Broadcast:
    """What every client of a round reads: it travels once per round and node."""

    key: str
    """The name of how clients train, since lanes are set up for one object alone."""
    training: Training
    round: int
    z: np.ndarray
    server: Arrays
    buffers: np.ndarray
    integers: Arrays
    count: int
    """Clients in the whole cohort."""
    stamp: int
    """The name of the state that its clients end with."""
    fresh: Arrays
    """The state that its clients start with who take part for the first time."""


class Member(NamedTuple):
    """A client on its way to a worker."""

    number: int
    indices: np.ndarray
    stamp: int
    """Which state it has."""
    state: Arrays | None
    """That state, where it does not lie with the worker."""
    statistics: np.ndarray | None


Moved = list[tuple[int, int, Arrays]]
"""States on their way from one worker to another: client, stamp and state."""


class CacheMiss(Exception):
    """A worker has not, or no more, the state that it is taken to have."""


@dataclass(frozen=True)
class Trained:
    """What some clients of a cohort come back with: their rows or, where they are a block, its sums."""

    reports: list[Report]
    state: Arrays
    """Where it is asked for; otherwise it stays with the worker."""
    statistics: np.ndarray | None
    rows: Arrays
    sums: Arrays
    seconds: float


class StateCache:
    """The states of the clients that a worker trained last, up to a number of bytes; those of the last round always."""

    def __init__(self, most: int = MOST_KEPT) -> None:
        self._most, self._bytes = most, 0
        self._kept: OrderedDict[tuple[str, int], tuple[int, Arrays]] = OrderedDict()

    def put(self, training: str, client: int, stamp: int, state: Arrays) -> None:
        """Keep a client's state, and forget those that were kept longest."""
        self._drop((training, client))
        self._kept[training, client] = stamp, state
        self._bytes += _size(state)
        while self._bytes > self._most:
            oldest = next(iter(self._kept))
            if self._kept[oldest][0] == stamp:
                return
            self._drop(oldest)

    def get(self, training: str, client: int, stamp: int) -> Arrays:
        """A client's state by its stamp."""
        found = self._kept.get((training, client))
        if found is None or found[0] != stamp:
            raise CacheMiss
        return found[1]

    def _drop(self, key: tuple[str, int]) -> None:
        if key in self._kept:
            self._bytes -= _size(self._kept.pop(key)[1])


class Worker:
    """Lives in a process of its own; all that it keeps can be had elsewhere or computed again, so that any other could take its place."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        keep_memory()
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # nor is it written to
        self._local: Local | None = None
        self._mistake: Exception | None = None
        self._training: tuple[str, Training] | None = None
        self._shelf = StateCache()

    def hello(self) -> About:
        """Say who this is."""
        import ray

        return About(own_version(), socket.gethostname(), os.getpid(), str(ray.get_runtime_context().get_actor_id()))

    def open(self, source: Source) -> None:
        """Build the problem; what goes wrong is said again by whatever needs it."""
        import ray

        self._local, self._mistake, self._shelf = (
            None,
            None,
            StateCache(),
        )  # first, so that two problems are never held at once
        try:
            build: Callable[[], Local] = ray.get(source.build[0])
            local = build()
            check_facts(facts(local.problem), source.facts)
            self._local = local
        except Exception as mistake:
            self._mistake = mistake
            raise

    def train(
        self,
        told: Broadcast,
        gradient: np.ndarray | None,
        members: list[Member],
        shares: Shares | None,
        wanted: bool,
        *moved: Moved,
    ) -> Trained:
        """Train some clients and keep their state, which is returned where it is wanted.

        ``gradient`` is the whole cohort's, where they need it; with ``shares`` they are a block, whose sums do; ``moved`` are states that
        other workers had.
        """
        begun = time.perf_counter()
        for number, stamp, state in (one for some in moved for one in some):
            self._shelf.put(told.key, number, stamp, {name: np.array(array) for name, array in state.items()})
        local = self._opened()
        training = self._known(local, told)
        with one_thread():
            table, cohort = self._filled(local, told, members)
            if gradient is not None:
                table.common_gradient.copy_(_view(gradient))
            integers = {name: value.to(local.problem.device) for name, value in _tensors(told.integers).items()}
            reports = local.engine.train_rows(training, told.round, table, cohort, integers)
            here = len(members)
            sums = {} if shares is None else _summed(training, table, shares, reports, told.count)
            rows = {} if shares is not None else _rows(table, here)
            statistics = _array(table.buffers[:here]) if training.own_statistics else None
            state = {name: kept[:here].detach().to("cpu", copy=True).numpy() for name, kept in table.client.items()}
            plain = [_plain(report) for report in reports]
        if state:
            for row, member in enumerate(members):
                self._shelf.put(
                    told.key, member.number, told.stamp, {name: kept[row].copy() for name, kept in state.items()}
                )
        return Trained(plain, state if wanted else {}, statistics, rows, sums, time.perf_counter() - begun)

    def give(self, training: str, clients: list[int], stamp: int) -> Arrays:
        """The states of some clients as a round left them, a row each."""
        found = [self._shelf.get(training, client, stamp) for client in clients]
        return {name: np.stack([state[name] for state in found]) for name in found[0]}

    def hand_over(self, training: str, clients: list[tuple[int, int]]) -> Moved:
        """The states of some clients, each by its stamp, for another worker."""
        return [(client, stamp, self._shelf.get(training, client, stamp)) for client, stamp in clients]

    def gradients(self, told: Broadcast, members: list[Member]) -> tuple[np.ndarray, int, int]:
        """The whole gradient of some clients at z, a row each; with the passes and samples that took."""
        local = self._opened()
        with one_thread():
            table, cohort = self._filled(local, told, members)
            passes, samples = local.engine.take_gradients(self._known(local, told), told.round, table, cohort)
            return _array(table.gradient[: len(members)]), passes, samples

    def evaluate(
        self, models: list[tuple[np.ndarray, np.ndarray, Arrays]], tasks: list[tuple[int, str, np.ndarray]]
    ) -> list[Arrays]:
        """The sums of metrics over some batches, each of a model and a held-out set."""
        problem = self._opened().problem
        found = []
        here: dict[int, tuple[Tensor, dict[str, Tensor]]] = {}
        with one_thread():
            for index, name, positions in tasks:
                if index not in here:
                    weights, buffers, integers = models[index]
                    vector, statistics = _tensor(weights).to(problem.device), _tensor(buffers).to(problem.device)
                    counted = {k: v.to(problem.device) for k, v in _tensors(integers).items()}
                    here[index] = vector, {**problem.buffers.views(statistics), **counted}
                vector, named = here[index]
                part = problem.held_out[name].take(torch.from_numpy(positions.copy()).to(problem.device))
                found.append({k: v.double().cpu().numpy() for k, v in problem.sum_tensors(vector, named, part).items()})
        return found

    def _opened(self) -> Local:
        if self._mistake is not None:
            raise self._mistake
        assert self._local is not None
        return self._local

    def _known(self, local: Local, told: Broadcast) -> Training:
        if self._training is None or self._training[0] != told.key:
            self._training = told.key, told.training
            local.engine.table = None
        return self._training[1]

    def _filled(self, local: Local, told: Broadcast, members: list[Member]) -> tuple[Table, list[Client]]:
        """The table with what these clients read; copied, so that it lies in memory as it does without Ray."""
        device = local.problem.device
        cohort = [
            Client(
                m.number,
                m.indices,
                nested_state(_views(self._state(told, m))),
                None if m.statistics is None else _view(m.statistics),
            )
            for m in members
        ]
        local.problem.training_mode()
        z = _view(told.z).to(device)
        table = local.engine.room(self._known(local, told), _roomy(local.engine, len(members), told.count), z)
        table.receive(z, nested_state(_views(told.server)), _view(told.buffers), cohort)
        return table, cohort

    def _state(self, told: Broadcast, member: Member) -> Arrays:
        if member.state is not None:
            return member.state
        return told.fresh if member.stamp == FRESH else self._shelf.get(told.key, member.number, member.stamp)


def own_version() -> str:
    """The version of fedflat in this process, from the package that is loaded already, which engines do not import."""
    return str(sys.modules["fedflat"].__version__)


def other_version(node: str, there: str, here: str) -> str:
    """Why a node is refused whose results might differ."""
    return f"node {node} of the Ray cluster has fedflat {there}, and this is {here}; install the same version on every node"


def facts(problem: Problem) -> dict[str, Any]:
    """What two processes must agree on before they train the same experiment."""
    data = problem.data
    held_out = {name: len(examples) for name, examples in problem.held_out.items()}
    return {
        "training examples": len(data.train),
        "held-out examples": held_out,
        "trained parameters": problem.layout.size,
        "buffers": problem.buffers.size,
        "frozen weights": problem.still.fingerprint(),
    }


def check_facts(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Refuse a node that has other data or weights under the same name."""
    for name, value in expected.items():
        if found[name] != value:
            raise UserError(
                f"node {socket.gethostname()} of the Ray cluster finds other {name} than the process that runs the experiment "
                f"({found[name]} instead of {value}); put the same data and weights in the same place on every node"
            )


def _roomy(engine: LoopEngine | LaneEngine, members: int, cohort: int) -> int:
    """Rows of the table: lanes are captured anew when it grows, and shares of a cohort vary from round to round."""
    return members if isinstance(engine, LoopEngine) else min(cohort, 1 << (members - 1).bit_length())


def _summed(training: Training, table: Table, shares: Shares, reports: list[Report], count: int) -> Arrays:
    return {
        name: _array(block_sum(*what)) for name, what in weighted_rows(training, table, shares, reports, count).items()
    }


def _rows(table: Table, here: int) -> Arrays:
    sent = {f"sent/{name}": _array(rows[:here]) for name, rows in table.sent.items()}
    return {"displacement": _array(table.displacement[:here]), "buffers": _array(table.buffers[:here]), **sent}


def _plain(report: Report) -> Report:
    return report._replace(
        rates=float(report.rates),
        loss=float(report.loss),
        integers={name: value.cpu() for name, value in report.integers.items()},
    )


def _array(tensor: Tensor) -> np.ndarray:
    return tensor.detach().cpu().numpy()


def _tensor(array: np.ndarray) -> Tensor:
    """A tensor of its own: what the object store holds may not be written to."""
    return torch.from_numpy(np.array(array))


def _view(array: np.ndarray) -> Tensor:
    """A tensor to read from, once: it lies where the object store has it, which need not be as it would lie without Ray."""
    return torch.from_numpy(np.asarray(array))


def _views(arrays: Arrays) -> dict[str, Tensor]:
    return {name: _view(array) for name, array in arrays.items()}


def _tensors(arrays: Arrays) -> dict[str, Tensor]:
    return {name: _tensor(array) for name, array in arrays.items()}


def arrays_of(state: Mapping[str, State]) -> Arrays:
    """A client's state as arrays."""
    return {name: _array(value) for name, value in flat_state(state).items()}


def _size(state: Arrays) -> int:
    return sum(array.nbytes for array in state.values())
