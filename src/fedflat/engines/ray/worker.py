"""A Ray worker: a process with one device that builds the problem once and trains the clients it is sent."""

from __future__ import annotations

import os
import socket
import sys
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedflat.algorithms.algorithm import nested_state
from fedflat.engines.cpu.engine import LoopEngine, one_thread
from fedflat.engines.gpu.engine import LaneEngine
from fedflat.engines.problem.problem import Problem
from fedflat.engines.ray.messages import (
    FRESH,
    Broadcast,
    DispatchedClient,
    ProblemSource,
    StateTransfer,
    TrainedClients,
    WorkerInfo,
    WorkerSetup,
    size_of,
)
from fedflat.engines.round.cohort import (
    Arrays,
    ClientReport,
    CohortBuffers,
    CohortWeights,
    state_from_arrays,
    weighted_rows,
)
from fedflat.engines.round.contract import Client, Training, block_sum
from fedflat.errors import UserError
from fedflat.processes import keep_memory

CACHE_BYTES = 2**30
"""Client states that a worker keeps from before the last round."""


class CacheMiss(Exception):
    """A worker does not have, or no longer has, the requested state."""


class StateCache:
    """The states of the clients that a worker trained last, up to a number of bytes; the last round's always fit."""

    def __init__(self, limit: int = CACHE_BYTES) -> None:
        self._limit, self._bytes = limit, 0
        self._entries: OrderedDict[tuple[str, int], tuple[int, Arrays]] = OrderedDict()

    def put(self, training: str, client: int, stamp: int, state: Arrays) -> None:
        """Keep a client's state and evict the oldest ones."""
        self._drop((training, client))
        self._entries[training, client] = stamp, state
        self._bytes += size_of(state)
        while self._bytes > self._limit:
            oldest = next(iter(self._entries))
            if self._entries[oldest][0] == stamp:
                return
            self._drop(oldest)

    def get(self, training: str, client: int, stamp: int) -> Arrays:
        """A client's state with a given stamp; raises ``CacheMiss``."""
        entry = self._entries.get((training, client))
        if entry is None or entry[0] != stamp:
            raise CacheMiss
        return entry[1]

    def _drop(self, key: tuple[str, int]) -> None:
        if key in self._entries:
            self._bytes -= size_of(self._entries.pop(key)[1])


class Worker:
    """A Ray actor. Everything it keeps is available elsewhere or can be recomputed, so any other can replace it."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        keep_memory()
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # such arrays are only read
        self._setup: WorkerSetup | None = None
        self._build_error: Exception | None = None
        self._training: tuple[str, Training] | None = None
        self._cache = StateCache()

    def hello(self) -> WorkerInfo:
        """Identify this worker."""
        import ray

        actor = str(ray.get_runtime_context().get_actor_id())
        return WorkerInfo(own_version(), socket.gethostname(), os.getpid(), actor)

    def open(self, source: ProblemSource) -> None:
        """Build the problem; an error is raised again by every later call that needs the problem."""
        import ray

        # Release the old problem first, so that two are never in memory at once.
        self._setup, self._build_error, self._cache = None, None, StateCache()
        try:
            build: Callable[[], WorkerSetup] = ray.get(source.build[0])
            setup = build()
            check_facts(facts(setup.problem), source.facts)
            self._setup = setup
        except Exception as error:
            self._build_error = error
            raise

    def train(
        self,
        broadcast: Broadcast,
        common_gradient: np.ndarray | None,
        clients: list[DispatchedClient],
        weights: CohortWeights | None,
        return_state: bool,
        *transfers: StateTransfer,
    ) -> TrainedClients:
        """Train some clients and keep their new states.

        Args:
            broadcast: what every client of the round reads.
            common_gradient: the cohort's gradient at z [parameters], if the drift needs it.
            clients: the clients to train.
            weights: if given, return weighted sums of the clients' rows instead of the rows.
            return_state: whether to return the new states as well.
            transfers: states that other workers had.
        """
        start = time.perf_counter()
        for number, stamp, state in (entry for transfer in transfers for entry in transfer):
            self._cache.put(broadcast.key, number, stamp, {name: np.array(array) for name, array in state.items()})
        setup = self._opened()
        training = self._training_of(setup, broadcast)
        with one_thread():
            buffers, cohort = self._filled(setup, broadcast, clients)
            if common_gradient is not None:
                buffers.common_gradient.copy_(_view(common_gradient))
            integers = _tensors(broadcast.integers, setup.problem.device)
            reports = setup.engine.train_rows(training, broadcast.round, buffers, cohort, integers)
            here = len(clients)
            sums = {} if weights is None else _sums(training, buffers, weights, reports, broadcast.count)
            rows = {} if weights is not None else _rows(buffers, here)
            statistics = _array(buffers.buffers[:here]) if training.own_statistics else None
            states = {
                name: value[:here].detach().to("cpu", copy=True).numpy() for name, value in buffers.client.items()
            }
            reports = [_on_cpu(report) for report in reports]
        if states:
            for row, client in enumerate(clients):
                state = {name: value[row].copy() for name, value in states.items()}
                self._cache.put(broadcast.key, client.number, broadcast.stamp, state)
        seconds = time.perf_counter() - start
        return TrainedClients(reports, states if return_state else {}, statistics, rows, sums, seconds)

    def give(self, training: str, clients: list[int], stamp: int) -> Arrays:
        """The states of some clients after a round, one row per client."""
        states = [self._cache.get(training, client, stamp) for client in clients]
        return {name: np.stack([state[name] for state in states]) for name in states[0]}

    def hand_over(self, training: str, clients: list[tuple[int, int]]) -> StateTransfer:
        """The states of some clients, given with their stamps, for another worker."""
        return [(client, stamp, self._cache.get(training, client, stamp)) for client, stamp in clients]

    def gradients(self, broadcast: Broadcast, clients: list[DispatchedClient]) -> tuple[np.ndarray, int, int]:
        """Full gradients of some clients at z [clients, parameters], with backward passes and samples."""
        setup = self._opened()
        with one_thread():
            buffers, cohort = self._filled(setup, broadcast, clients)
            training = self._training_of(setup, broadcast)
            passes, samples = setup.engine.full_gradients(training, broadcast.round, buffers, cohort)
            return _array(buffers.gradient[: len(clients)]), passes, samples

    def evaluate(
        self, models: list[tuple[np.ndarray, np.ndarray, Arrays]], tasks: list[tuple[int, str, np.ndarray]]
    ) -> list[Arrays]:
        """The task's sums over some batches, each given as (index of the model, held-out set, positions)."""
        problem = self._opened().problem
        results = []
        loaded: dict[int, tuple[Tensor, dict[str, Tensor]]] = {}
        with one_thread():
            for index, name, positions in tasks:
                if index not in loaded:
                    weights, buffers, integers = models[index]
                    vector, statistics = _tensor(weights).to(problem.device), _tensor(buffers).to(problem.device)
                    named = {**problem.buffers.views(statistics), **_tensors(integers, problem.device)}
                    loaded[index] = vector, named
                vector, named = loaded[index]
                part = problem.held_out[name].take(torch.from_numpy(positions.copy()).to(problem.device))
                sums = problem.metric_sums(vector, named, part)
                results.append({name: value.double().cpu().numpy() for name, value in sums.items()})
        return results

    def _opened(self) -> WorkerSetup:
        if self._build_error is not None:
            raise self._build_error
        assert self._setup is not None
        return self._setup

    def _training_of(self, setup: WorkerSetup, broadcast: Broadcast) -> Training:
        """The same training object in every round of a run."""
        if self._training is None or self._training[0] != broadcast.key:
            self._training = broadcast.key, broadcast.training
            setup.engine.buffers = None
        return self._training[1]

    def _filled(
        self, setup: WorkerSetup, broadcast: Broadcast, clients: list[DispatchedClient]
    ) -> tuple[CohortBuffers, list[Client]]:
        """Cohort buffers with what the clients read, copied so that memory layout is the same as without Ray."""
        cohort = [
            Client(
                client.number,
                client.indices,
                state_from_arrays(self._state(broadcast, client), copy=False),
                None if client.statistics is None else _view(client.statistics),
            )
            for client in clients
        ]
        setup.problem.set_training_mode()
        z = _view(broadcast.z).to(setup.problem.device)
        rows = _rows_to_allocate(setup.engine, len(clients), broadcast.count)
        buffers = setup.engine.allocate(self._training_of(setup, broadcast), rows, z)
        server = nested_state({name: _view(array) for name, array in broadcast.server.items()})
        buffers.receive(z, server, _view(broadcast.buffers), cohort)
        return buffers, cohort

    def _state(self, broadcast: Broadcast, client: DispatchedClient) -> Arrays:
        if client.state is not None:
            return client.state
        if client.stamp == FRESH:
            return broadcast.fresh
        return self._cache.get(broadcast.key, client.number, client.stamp)


def own_version() -> str:
    """The version of fedflat in this process, read from the loaded package, which engines must not import."""
    return str(sys.modules["fedflat"].__version__)


def version_mismatch(node: str, theirs: str, ours: str) -> str:
    """The error message for a node with another version of fedflat, whose results might differ."""
    return f"node {node} of the Ray cluster has fedflat {theirs}, not {ours}; install the same version on every node"


def facts(problem: Problem) -> dict[str, Any]:
    """Properties that two processes must agree on to train the same experiment."""
    return {
        "training examples": len(problem.data.train),
        "held-out examples": {name: len(examples) for name, examples in problem.held_out.items()},
        "trained parameters": problem.layout.size,
        "buffers": problem.buffers.size,
        "frozen weights": problem.frozen.fingerprint(),
    }


def check_facts(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    """Reject a node whose data or weights differ from the driver's."""
    for name, value in expected.items():
        if actual[name] != value:
            raise UserError(
                f"node {socket.gethostname()} of the Ray cluster has other {name} than the process that runs the "
                f"experiment ({actual[name]} instead of {value}); put the same data and weights on every node"
            )


def _rows_to_allocate(engine: LoopEngine | LaneEngine, clients: int, cohort: int) -> int:
    """Rows for some clients, rounded up for lanes: growing means new captures, and shares vary between rounds."""
    return clients if isinstance(engine, LoopEngine) else min(cohort, 1 << (clients - 1).bit_length())


def _sums(
    training: Training, buffers: CohortBuffers, weights: CohortWeights, reports: list[ClientReport], count: int
) -> Arrays:
    parts = weighted_rows(training, buffers, weights, reports, count)
    return {name: _array(block_sum(*part)) for name, part in parts.items()}


def _rows(buffers: CohortBuffers, count: int) -> Arrays:
    sent = {f"sent/{name}": _array(rows[:count]) for name, rows in buffers.sent.items()}
    return {"displacement": _array(buffers.displacement[:count]), "buffers": _array(buffers.buffers[:count]), **sent}


def _on_cpu(report: ClientReport) -> ClientReport:
    return report._replace(
        rates=float(report.rates),
        loss=float(report.loss),
        integers={name: value.cpu() for name, value in report.integers.items()},
    )


def _array(tensor: Tensor) -> np.ndarray:
    return tensor.detach().cpu().numpy()


def _tensor(array: np.ndarray) -> Tensor:
    """A copy as a tensor, because arrays in the object store are read-only."""
    return torch.from_numpy(np.array(array))


def _tensors(arrays: Arrays, device: torch.device) -> dict[str, Tensor]:
    return {name: _tensor(array).to(device) for name, array in arrays.items()}


def _view(array: np.ndarray) -> Tensor:
    """A tensor in the object store's memory, to read from once."""
    return torch.from_numpy(np.asarray(array))
