"""A Ray worker: a process with one device that builds the problem once and trains the clients it is sent."""

from __future__ import annotations

import os
import socket
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedflat.algorithms.algorithm import nested_state
from fedflat.engines.cpu.engine import LoopEngine, evaluate_batch, one_thread
from fedflat.engines.gpu.engine import LaneEngine
from fedflat.engines.problem.problem import Problem
from fedflat.engines.ray.messages import (
    Broadcast,
    DispatchedClient,
    ProblemSource,
    TrainedClients,
    WorkerInfo,
    WorkerSetup,
)
from fedflat.engines.round.aggregation import CohortWeights, block_sum
from fedflat.engines.round.client import ClientReport
from fedflat.engines.round.cohort import weighted_rows
from fedflat.engines.round.cohort_buffers import Arrays, CohortBuffers, state_from_arrays, to_arrays, to_tensors
from fedflat.engines.round.contract import Client, Cost, Training
from fedflat.engines.round.privacy import protect_rows
from fedflat.errors import UserError
from fedflat.operating_system import keep_freed_memory


class Worker:
    """A Ray actor that trains clients of a problem, i.e. a model with its task and data.

    All that it stores exists elsewhere or can be recomputed, so another worker can replace it.
    """

    def __init__(self) -> None:
        """Start without a problem; ``build_problem`` follows. One thread, because every core has its own worker."""
        torch.set_num_threads(1)
        keep_freed_memory()
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # such arrays are only read
        self._setup: WorkerSetup | None = None
        self._build_error: Exception | None = None
        self._training: tuple[str, Training] | None = None  # the current ``Training``, after its key

    def identify(self) -> WorkerInfo:
        """Return this worker's version of fedflat, host name, process id and Ray's id of its node."""
        import ray

        node = str(ray.get_runtime_context().get_node_id())
        return WorkerInfo(fedflat_version(), socket.gethostname(), os.getpid(), node)

    def build_problem(self, source: ProblemSource) -> None:
        """Build the problem and its engine; an error is raised again by every later call that needs the problem.

        Raises a ``UserError`` if the data or weights on this node differ from the driver's.
        """
        import ray

        # Release the old problem first, so that two are never in memory at once.
        self._setup = self._build_error = None
        try:
            build: Callable[[], WorkerSetup] = ray.get(source.build[0])  # Ray resolves no references within lists
            setup = build()
            check_facts(problem_facts(setup.problem), source.facts)
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
        *states: Arrays,
    ) -> TrainedClients | list[Any]:
        """Train some clients for one round.

        A client's row is what it sends to the server: displacement, BatchNorm statistics and the algorithm's messages.

        Args:
            broadcast: what every client of the round reads.
            common_gradient: the cohort's mean gradient at z, the model that clients start from [parameters]; None if
                the drift correction does not need it.
            clients: the clients to train.
            weights: if given, return weighted sums of the clients' rows instead of the rows.
            states: states of these and other clients, as arrays with one row per client.

        Returns:
            The result; if clients keep states, a list of the result and their new states, with one row per client.
        """
        start = time.perf_counter()
        setup = self._built_setup()
        count = len(clients)
        with one_thread():
            training, cohort_buffers, cohort = self._prepare(setup, broadcast, clients, states)
            if common_gradient is not None:
                cohort_buffers.common_gradient.copy_(_read_only_tensor(common_gradient))
            integer_buffers = to_tensors(broadcast.integer_buffers, setup.problem.device)
            reports = setup.engine.train_rows(training, broadcast.round, cohort_buffers, cohort, integer_buffers)
            protect_rows(training, broadcast.round, cohort_buffers, [client.number for client in cohort])
            sums: Arrays = {}
            if weights is None:
                rows = _sent_rows(cohort_buffers, count)
            else:  # clients that keep their own BatchNorm statistics still return them
                rows = {"buffers": _array(cohort_buffers.statistics[:count])} if training.own_statistics else {}
                weighted = weighted_rows(training, cohort_buffers, weights, reports, broadcast.count)
                sums = to_arrays({name: block_sum(values, factors) for name, (values, factors) in weighted.items()})
            new_states = to_arrays(cohort_buffers.client_states)
            reports = [_sendable(report) for report in reports]
        trained = TrainedClients(reports, rows, sums, time.perf_counter() - start)
        return [trained, {name: values[:count] for name, values in new_states.items()}] if new_states else trained

    def full_gradients(
        self, broadcast: Broadcast, clients: list[DispatchedClient], *states: Arrays
    ) -> tuple[np.ndarray, Cost]:
        """Gradients of some clients' whole datasets at z, the model of the broadcast; arguments as in ``train``.

        Returns:
            The gradients [clients, parameters] and their cost.
        """
        setup = self._built_setup()
        with one_thread():
            training, cohort_buffers, cohort = self._prepare(setup, broadcast, clients, states)
            cost = setup.engine.compute_full_gradients(training, broadcast.round, cohort_buffers, cohort)
            return _array(cohort_buffers.gradient[: len(clients)]), cost

    def evaluate(
        self, models: list[tuple[np.ndarray, Arrays]], batches: list[tuple[int, str, np.ndarray]]
    ) -> list[Arrays]:
        """Sums of the task's metrics over the examples of each batch, by metric.

        Args:
            models: for each model its weights and floating-point buffers [parameters + buffers], and its integer
                buffers by name.
            batches: for each batch the index of the model to evaluate, the name of the evaluation set, and the
                positions of the batch's examples in that set [batch].
        """
        problem = self._built_setup().problem
        device = problem.device
        vectors = [torch.tensor(vector, device=device) for vector, _ in models]
        integer_buffers = [to_tensors(arrays, device) for _, arrays in models]
        shared = {"problem": problem, "models": (vectors, integer_buffers), "examples": problem.evaluation_sets}
        with one_thread():
            return [evaluate_batch(shared, i, name, torch.tensor(at, device=device)) for i, name, at in batches]

    def _built_setup(self) -> WorkerSetup:
        """The problem and its engine; raises the error with which building it failed."""
        if self._build_error is not None:
            raise self._build_error
        assert self._setup is not None
        return self._setup

    def _current_training(self, setup: WorkerSetup, broadcast: Broadcast) -> Training:
        """The broadcast's ``Training``, as the same object in every round of a run, so that engines reuse their memory.

        Every broadcast contains its own copy of the ``Training``; the first copy is kept. If the key differs, another
        run has begun, and the engine's cohort buffers are dropped.
        """
        if self._training is None or self._training[0] != broadcast.training_key:
            self._training = broadcast.training_key, broadcast.training
            setup.engine.cohort_buffers = None
        return self._training[1]

    def _prepare(
        self, setup: WorkerSetup, broadcast: Broadcast, clients: list[DispatchedClient], states: tuple[Arrays, ...]
    ) -> tuple[Training, CohortBuffers, list[Client]]:
        """The current training, cohort buffers with all that the clients read, and the clients in order of rows."""
        training = self._current_training(setup, broadcast)
        cohort = []
        for client in clients:
            arrays = broadcast.initial_state
            if client.state is not None:
                argument, row = client.state
                arrays = {name: rows[row] for name, rows in states[argument].items()}
            state = state_from_arrays(arrays, copy=False)
            statistics = None if client.statistics is None else _read_only_tensor(client.statistics)
            cohort.append(Client(client.number, client.indices, state, statistics))
        setup.problem.set_training_mode()
        z = _read_only_tensor(broadcast.z).to(setup.problem.device)
        rows = _rows_to_allocate(setup.engine, len(clients), broadcast.count)
        cohort_buffers = setup.engine.allocate(training, rows, z)
        server = nested_state({name: _read_only_tensor(array) for name, array in broadcast.server.items()})
        cohort_buffers.copy_inputs(z, server, _read_only_tensor(broadcast.buffers), cohort)
        return training, cohort_buffers, cohort


def fedflat_version() -> str:
    """The version of fedflat in this process, read from the loaded package, which engines must not import."""
    return str(sys.modules["fedflat"].__version__)


def version_mismatch(node: str, theirs: str, ours: str) -> str:
    """The error message for a node whose version of fedflat, ``theirs``, is not ``ours``: results might differ."""
    return f"node {node} of the Ray cluster has fedflat {theirs}, not {ours}; install the same version on every node"


def problem_facts(problem: Problem) -> dict[str, Any]:
    """Properties of model and data that two processes must agree on to train the same experiment."""
    return {
        "training examples": len(problem.data.train),
        "held-out examples": {name: len(examples) for name, examples in problem.evaluation_sets.items()},
        "trained parameters": problem.layout.size,
        "buffers": problem.buffer_layout.size,
        "frozen weights": problem.frozen.fingerprint(),
    }


def check_facts(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    """Raise ``UserError`` if the data or weights of this node differ from the driver's."""
    for name, value in expected.items():
        if actual[name] != value:
            raise UserError(
                f"node {socket.gethostname()} of the Ray cluster has different {name} from the process that runs "
                f"the experiment ({actual[name]} instead of {value}); put the same data and weights on every node"
            )


def _rows_to_allocate(engine: LoopEngine | LaneEngine, clients: int, cohort: int) -> int:
    """Number of rows of ``CohortBuffers`` to allocate for the ``clients`` of a worker, out of ``cohort`` clients.

    The lanes engine captures its CUDA graphs again whenever it needs more rows. The number of clients varies between
    rounds, so the lanes engine gets the next power of two, but at most ``cohort`` rows.
    """
    if isinstance(engine, LoopEngine):
        return clients
    power_of_two = 1 << (clients - 1).bit_length()
    return min(cohort, power_of_two)


def _sent_rows(cohort_buffers: CohortBuffers, count: int) -> Arrays:
    """What the first ``count`` clients in ``cohort_buffers`` send, by name: arrays with one row per client."""
    sent = {f"sent/{name}": rows for name, rows in cohort_buffers.sent.items()}
    all_rows = {"displacement": cohort_buffers.displacement, "buffers": cohort_buffers.statistics, **sent}
    return to_arrays({name: rows[:count] for name, rows in all_rows.items()})


def _sendable(report: ClientReport) -> ClientReport:
    """A client's report with plain numbers and CPU tensors, which any other process can unpickle."""
    integer_buffers = {name: value.cpu() for name, value in report.integer_buffers.items()}
    return report.with_numbers()._replace(integer_buffers=integer_buffers)


def _array(tensor: Tensor) -> np.ndarray:
    return tensor.detach().cpu().numpy()


def _read_only_tensor(array: np.ndarray) -> Tensor:
    """A tensor in the object store's memory, which must not be written to."""
    return torch.from_numpy(np.asarray(array))
