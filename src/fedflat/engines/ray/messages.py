"""What the driver and its Ray workers send each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from fedflat.engines.cpu.engine import LoopEngine
from fedflat.engines.gpu.engine import LaneEngine
from fedflat.engines.problem.problem import Problem
from fedflat.engines.round.client import ClientReport
from fedflat.engines.round.cohort_buffers import Arrays
from fedflat.engines.round.contract import Training


class WorkerSetup(NamedTuple):
    """What a worker trains with: a problem on its own device and the engine for that device."""

    problem: Problem
    engine: LoopEngine | LaneEngine


class WorkerInfo(NamedTuple):
    """Identity of a worker: fedflat's version, host name, process id and Ray's id of its node."""

    version: str
    host: str
    process: int
    node_id: str


@dataclass(frozen=True)
class ProblemSource:
    """How a worker builds the problem.

    Attributes:
        key: unique name.
        build: one reference to a function that returns a ``WorkerSetup``; in a list, so that Ray does not resolve it.
        facts: properties of the driver's problem that the worker's must share.
    """

    key: str
    build: list[Any]
    facts: dict[str, Any]


@dataclass(frozen=True)
class Broadcast:
    """What every client of a round reads; sent once per round and node.

    Attributes:
        training_key: unique name of ``training``; the lanes engine reuses its captured steps as long as the key stays
            the same.
        training: how clients train.
        round: number of the round.
        z: the model that clients start from [parameters].
        server: the server's state, as flat arrays.
        buffers: BatchNorm statistics [buffers].
        integer_buffers: integer buffers by name.
        count: number of clients in the whole cohort.
        initial_state: the state of clients that participate for the first time.
    """

    training_key: str
    training: Training
    round: int
    z: np.ndarray
    server: Arrays
    buffers: np.ndarray
    integer_buffers: Arrays
    count: int
    initial_state: Arrays


class DispatchedClient(NamedTuple):
    """The message that assigns a client to a worker; its state is sent separately.

    Attributes:
        number: index of the client in the federation.
        indices: positions of its examples [examples].
        statistics: its own BatchNorm statistics [buffers], if any.
        state: where its state is: index of the argument and row; None for the initial state.
    """

    number: int
    indices: np.ndarray
    statistics: np.ndarray | None
    state: tuple[int, int] | None


@dataclass(frozen=True)
class TrainedClients:
    """What a worker returns for the clients it trained: either their rows, or weighted sums of their rows.

    Attributes:
        reports: one per client.
        rows: what the clients send [clients, ...], by name. If sums are returned, it only has the clients' BatchNorm
            statistics (``buffers``), and these only if clients keep their own.
        sums: weighted sums of the rows over the clients [...], by name; empty if rows are returned.
        seconds: time spent training.
    """

    reports: list[ClientReport]
    rows: Arrays
    sums: Arrays
    seconds: float
