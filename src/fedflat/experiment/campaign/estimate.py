"""What a run will take: memory and disk by arithmetic, time from its first rounds."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fedflat.algorithms import Algorithm, algorithm
from fedflat.algorithms.algorithm import flat_fields
from fedflat.averaging import RunInfo
from fedflat.experiment.callback import Callback
from fedflat.experiment.config import Config
from fedflat.experiment.store.row_store import RowStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from fedflat.experiment.callback import RunView

TIMED = (1, 3)
"""Time is taken from the end of the first of these rounds of a session, which has the set-up in it, to the end of the second."""


@dataclass(frozen=True)
class Forecast:
    """Bytes that a run needs, and how long it will take."""

    data: int
    """Training and held-out examples, as they lie in memory."""
    model: int
    """One copy of the weights and buffers."""
    cohort: int
    """What the clients of a round read and write."""
    states: int
    """What clients keep between rounds, in the end."""
    clients: int
    """That take part once or more, at most."""
    disk: int
    """What of it goes to the run's folder: two places for each client's state and each past model of an average, checkpoint, models."""
    seconds: float
    """For the rounds that are left."""
    seconds_per_round: float
    rounds: int
    gpu: tuple[int, int] | None = None
    """What is reserved on the GPU, steps and all, and what it has."""


@dataclass(frozen=True)
class Disk:
    """Bytes of a run's folder, by what they are for; logs, which are small, aside."""

    checkpoint: int
    """The checkpoint with all vectors of the server and of clients, two places for each of those that change by rows."""
    snapshots: int
    """Models kept on the way."""
    models: int
    """The models at the end."""


def disk_use(config: Config, size: int, buffers: int, clients: int) -> Disk:
    """What a run writes, with as many clients as can take part, for a model of ``size`` trained numbers and ``buffers`` statistics."""
    built = algorithm(config.algorithm)
    item = 8 if config.engine.precision == "float64" else 4
    kept = sum(field.scalars(size) for field in flat_fields(built.client_fields()).values())
    kept += buffers if config.training.statistics == "own" else 0
    server = sum(field.scalars(size) for field in flat_fields(built.server_fields()).values())
    whole, models = size + buffers, 1 + len(built.averages)
    rounds, every = config.training.rounds, config.evaluation.save_every
    rings = sum(min(length, rounds) for length in _rings(built, rounds))
    snapshots = 0 if every is None else rounds // every - (config.init_rounds - 1) // every
    return Disk(
        checkpoint=(2 * taking_part(config, clients) * kept + models * whole + server + 2 * rings * whole) * item,
        snapshots=snapshots * models * whole * item,
        models=models * whole * item,
    )


def taking_part(config: Config, clients: int) -> int:
    """How many of the clients take part in a run at all, at most: none comes twice; with Bernoulli sampling about so many."""
    return min(clients, config.federation.clients_per_round * (config.training.rounds - config.init_rounds))


def _rings(built: Algorithm, rounds: int) -> list[int]:
    """How many past models each average keeps."""
    lengths: list[int] = []

    def ring(name: str, length: int) -> RowStore:
        lengths.append(length)
        return RowStore()

    nothing = torch.zeros(0)
    for average in built.averages:
        average.begin(RunInfo(rounds, built.lr_schedule.cycle, nothing.bool(), ring), nothing)
    return lengths


def forecast(run: RunView, seconds_per_round: float) -> Forecast:
    """What a run will take from here on."""
    problem, built, config = run.problem, run.algorithm, run.config
    item = torch.finfo(problem.dtype).bits // 8
    size = problem.layout.size
    examples = [problem.data.train, *problem.held_out.values()]
    kept = sum(field.scalars(size) for field in flat_fields(built.client_fields()).values())
    kept += problem.buffers.size if config.training.statistics == "own" else 0
    sent = sum(field.scalars(size) for field in flat_fields(built.message_fields()).values())
    everyone = len(run.partition.clients)
    disk = disk_use(config, size, problem.buffers.size, everyone)
    whole = size + problem.buffers.size
    clients = taking_part(config, everyone)
    left = config.training.rounds - run.rounds
    on_gpu = problem.device.type == "cuda"
    return Forecast(
        data=sum(tensor.nbytes for some in examples for tensor in some.tensors().values()),
        model=whole * item,
        cohort=min(config.federation.clients_per_round, everyone) * (whole + kept + sent) * item,
        states=clients * kept * item,
        clients=clients,
        disk=disk.checkpoint + disk.snapshots + disk.models if run.folder else 0,
        seconds=left * seconds_per_round,
        seconds_per_round=seconds_per_round,
        rounds=left,
        gpu=(torch.cuda.max_memory_reserved(), torch.cuda.mem_get_info()[1]) if on_gpu else None,
    )


class Foretell(Callback):
    """Says once, after the first rounds of a run, what it will take, where that is long."""

    def __init__(self, tell: Callable[[Forecast], None], long: float = 60.0) -> None:
        self._tell, self._long = tell, long
        self._begun: float | None = None
        self._rounds = 0

    def round_done(self, run: RunView) -> None:
        self._rounds += 1
        if self._rounds not in TIMED:
            return
        if run.problem.device.type == "cuda":
            torch.cuda.synchronize()
        now = time.monotonic()
        if self._begun is None:
            self._begun = now
            return
        found = forecast(run, (now - self._begun) / (TIMED[1] - TIMED[0]))
        if found.seconds >= self._long:
            self._tell(found)
