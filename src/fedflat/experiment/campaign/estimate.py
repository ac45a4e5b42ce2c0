"""Estimates of memory, disk and time: by arithmetic for bytes, from timed rounds or probes for seconds."""

from __future__ import annotations

import heapq
import math
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from fedflat import data as datasets
from fedflat.algorithms import Algorithm, algorithm
from fedflat.algorithms.algorithm import flat_fields
from fedflat.algorithms.slot import Fields
from fedflat.averaging import RunInfo
from fedflat.errors import UserError
from fedflat.experiment.callback import Callback, RunView
from fedflat.experiment.config import Config
from fedflat.experiment.run import Run
from fedflat.experiment.setup.problem import build_network, build_partition, device_of, load_data
from fedflat.experiment.store.cleanup import Keep
from fedflat.experiment.store.client_states import RowStore
from fedflat.experiment.store.run_folder import PlannedRun
from fedflat.processes import available_cores
from fedflat.text import parse

FIRST_TIMED, LAST_TIMED = 1, 3
"""A run is timed from the end of round 1, which includes the set-up, to the end of round 3."""
PROBED_EXAMPLES = 64
"""Test examples that a probe evaluates."""
SHORT_ROUND = 3.0
"""Longest round, in seconds, that is probed as a whole; single steps overestimate short rounds."""
MAX_PROBING = 60.0
"""Seconds after which no further probe starts."""
PROBE_SETTINGS = {"algorithm": "fedavg", "init": None, "init_head": "given", "init_rounds": 0}
"""A probe trains with plain SGD from random weights."""


@dataclass(frozen=True)
class RunDisk:
    """Bytes in a run's folder by purpose, without the small logs."""

    checkpoint: int
    """All server and client vectors; rows that change are stored twice."""
    snapshots: int
    """Models saved during the run."""
    models: int
    """Final models."""

    @property
    def total(self) -> int:
        """All of them."""
        return self.checkpoint + self.snapshots + self.models


@dataclass(frozen=True)
class SweepDisk:
    """Bytes of several runs."""

    most: int
    """Peak: as many unfinished runs as can run at the same time, and the rest finished."""
    kept: int
    """Once all runs are finished."""


def run_disk(config: Config, size: int, buffers: int, clients: int) -> RunDisk:
    """What a run writes.

    Args:
        config: the experiment.
        size: number of trained parameters.
        buffers: number of BatchNorm statistics.
        clients: number of clients in the partition.
    """
    built = algorithm(config.algorithm)
    bytes_per_scalar = 8 if config.engine.precision == "float64" else 4
    model, models = size + buffers, 1 + len(built.averages)
    rounds, every = config.training.rounds, config.evaluation.save_every
    snapshots = 0 if every is None else rounds // every - (config.init_rounds - 1) // every
    server_state = _scalars(built.server_fields(), size)
    client_states = participants(config, clients) * _client_scalars(built, config, size, buffers)
    past_models = sum(min(length, rounds) for length in _ring_lengths(built, rounds)) * model
    # Row stores hold two copies of every client state and past model.
    checkpoint = models * model + server_state + 2 * (client_states + past_models)
    return RunDisk(
        checkpoint=checkpoint * bytes_per_scalar,
        snapshots=snapshots * models * model * bytes_per_scalar,
        models=models * model * bytes_per_scalar,
    )


def sweep_disk(configs: Sequence[Config], keep: Keep, at_once: int) -> SweepDisk:
    """What several runs write, ``at_once`` of them at a time, and what remains of it."""
    sizes: dict[tuple[str, ...], tuple[int, int, int]] = {}
    kept = 0
    removed_at_end = []  # bytes of each run that are deleted once it is finished
    for config in configs:
        key = _size_key(config)
        if key not in sizes:
            sizes[key] = _sizes(config)
        disk = run_disk(config, *sizes[key])
        removed = sum(getattr(disk, part) for part in keep.removed)
        kept += disk.total - removed
        removed_at_end.append(removed)
    return SweepDisk(kept + sum(heapq.nlargest(at_once, removed_at_end)), kept)


def participants(config: Config, clients: int) -> int:
    """Upper bound on distinct participants in a run (the expected bound, with Bernoulli sampling)."""
    return min(clients, config.federation.clients_per_round * (config.training.rounds - config.init_rounds))


def _scalars(fields: dict[str, Fields], size: int) -> int:
    """The number of scalars in the given state fields of a model with ``size`` parameters."""
    return sum(field.scalars(size) for field in flat_fields(fields).values())


def _client_scalars(built: Algorithm, config: Config, size: int, buffers: int) -> int:
    """The number of scalars that a client keeps between rounds."""
    return _scalars(built.client_fields(), size) + (buffers if config.training.statistics == "own" else 0)


def _ring_lengths(built: Algorithm, rounds: int) -> list[int]:
    """The number of past models that each average stores, learnt from the row stores that it requests."""
    lengths: list[int] = []

    def record_length(name: str, length: int) -> RowStore:
        lengths.append(length)
        return RowStore()

    no_weights = torch.zeros(0)
    for average in built.averages:
        average.begin(RunInfo(rounds, built.lr_schedule.cycle, no_weights.bool(), record_length), no_weights)
    return lengths


def _size_key(config: Config) -> tuple[str, ...]:
    """The settings that determine ``_sizes``; the partition only if it decides the number of clients."""
    data, training = config.data, config.training
    settings = (config.model, training.train, training.task, data.dataset, str(data.dir), str(data.clients))
    fixes_clients = datasets.fixes_clients(data.partition)
    return (*settings, data.partition, str(data.partition_seed), str(config.seed)) if fixes_clients else settings


def _sizes(config: Config) -> tuple[int, int, int]:
    """The numbers of trained parameters, of BatchNorm statistics and of clients."""
    data = load_data(config)
    fresh = config.model_copy(update={"init": None, "init_head": "given"})
    network = build_network(fresh, data.input_shape, data.num_outputs)
    trained = sum(parameter.numel() for parameter in network.parameters() if parameter.requires_grad)
    statistics = sum(buffer.numel() for buffer in network.buffers() if buffer.is_floating_point())
    clients = config.data.clients
    if clients is None or datasets.fixes_clients(config.data.partition):
        clients = len(build_partition(config, data).clients)
    return trained, statistics, clients


@dataclass(frozen=True)
class Forecast:
    """Bytes that a run needs, and how long it will take."""

    data: int
    """Training and held-out examples in memory."""
    model: int
    """One copy of weights and buffers."""
    cohort: int
    """Models, states and messages of the clients of one round."""
    states: int
    """Client states at the end of the run."""
    clients: int
    """Upper bound on distinct participants."""
    disk: int
    """Size of the run's folder; 0 without one."""
    seconds: float
    """For the remaining rounds."""
    seconds_per_round: float
    rounds: int
    """Remaining rounds."""
    gpu: tuple[int, int] | None = None
    """GPU memory: most reserved so far, and in total."""


def forecast(run: RunView, seconds_per_round: float) -> Forecast:
    """Predict the memory, disk space and time that a run will need from now on."""
    problem, built, config = run.problem, run.algorithm, run.config
    bytes_per_scalar = problem.dtype.itemsize
    size, buffers = problem.layout.size, problem.buffers.size
    all_clients = len(run.partition.clients)
    cohort_size = min(config.federation.clients_per_round, all_clients)
    state = _client_scalars(built, config, size, buffers)
    message = _scalars(built.message_fields(), size)
    clients = participants(config, all_clients)
    rounds = config.training.rounds - run.rounds
    splits = [problem.data.train, *problem.held_out.values()]
    gpu = None
    if problem.device.type == "cuda":
        _, total_memory = torch.cuda.mem_get_info()
        gpu = torch.cuda.max_memory_reserved(), total_memory
    return Forecast(
        data=sum(tensor.nbytes for split in splits for tensor in split.tensors().values()),
        model=(size + buffers) * bytes_per_scalar,
        cohort=cohort_size * (size + buffers + state + message) * bytes_per_scalar,
        states=clients * state * bytes_per_scalar,
        clients=clients,
        disk=run_disk(config, size, buffers, all_clients).total if run.folder else 0,
        seconds=rounds * seconds_per_round,
        seconds_per_round=seconds_per_round,
        rounds=rounds,
        gpu=gpu,
    )


class ForecastCallback(Callback):
    """Calls ``report`` once, after the first rounds, if the rest of the run takes ``min_seconds`` or more."""

    def __init__(self, report: Callable[[Forecast], None], min_seconds: float = 60.0) -> None:
        self._report, self._min_seconds = report, min_seconds
        self._start = 0.0
        self._rounds = 0

    def round_done(self, run: RunView) -> None:
        self._rounds += 1
        if self._rounds not in (FIRST_TIMED, LAST_TIMED):
            return
        if run.problem.device.type == "cuda":
            torch.cuda.synchronize()
        now = time.monotonic()
        if self._rounds == FIRST_TIMED:
            self._start = now
            return
        expected = forecast(run, (now - self._start) / (LAST_TIMED - FIRST_TIMED))
        if expected.seconds >= self._min_seconds:
            self._report(expected)


@dataclass(frozen=True)
class RemainingWork:
    """Remaining rounds of several runs, and the time that they take."""

    runs: int
    """All runs, finished or not."""
    done: int
    """Finished runs."""
    rounds: int
    """Remaining rounds."""
    seconds: float | None
    """Time for them on this machine; None if it could not be probed, for the given ``reason``."""
    reason: str = ""


@dataclass(frozen=True)
class ProbedSpeed:
    """How fast this machine trains one model on one dataset."""

    step: float
    """Seconds of a local step with one backward pass, for ``at_once`` clients together."""
    example: float
    """Seconds to evaluate one example."""
    at_once: int
    """Clients trained at the same time."""
    clients: int
    examples: int
    """Training examples of all clients."""
    tested: int
    """Test examples."""
    whole_round: float | None = None
    """Seconds of a round of plain SGD, where rounds are short enough to be measured."""

    def seconds(self, config: Config, rounds: int) -> float:
        """Estimate the seconds for ``rounds`` rounds of a run, including their evaluations."""
        built, training, evaluation = algorithm(config.algorithm), config.training, config.evaluation
        if self.whole_round is not None:
            return rounds * self.whole_round * built.backward_passes
        steps_per_epoch = math.ceil(self.examples / self.clients / training.batch_size)
        local_steps = training.local_steps or training.local_epochs * steps_per_epoch
        waves = math.ceil(min(config.federation.clients_per_round, self.clients) / self.at_once)  # of parallel clients
        training_seconds = rounds * waves * local_steps * built.backward_passes * self.step
        evaluations = (rounds / evaluation.every + min(evaluation.final, rounds)) * (1 + len(built.averages))
        tested = min(self.tested, evaluation.examples or self.tested)
        return training_seconds + evaluations * tested * self.example


def is_available(dataset: str, folder: Path | None) -> bool:
    """Whether a dataset needs no download."""
    source = datasets.DATASETS.get(parse(dataset)[0].name)
    return source is not None and not source.missing(datasets.data_dir(folder))


def remaining_work(runs: Iterable[PlannedRun], at_once: int = 1, probing: bool = True) -> RemainingWork:
    """Remaining rounds of several runs, and the time they take by a probe of each kind of run.

    Args:
        runs: planned runs.
        at_once: runs at the same time.
        probing: whether to measure; without it ``seconds`` is None.
    """
    runs = list(runs)
    rounds_left = [run.rounds_left for run in runs]
    remaining = [(run.config, rounds) for run, rounds in zip(runs, rounds_left, strict=True) if rounds]
    work = RemainingWork(len(runs), sum(run.done for run in runs), sum(rounds_left), seconds=0.0)
    if not remaining:
        return work
    if not probing:
        return replace(work, seconds=None, reason="not probed")
    try:
        return replace(work, seconds=_probed_seconds(remaining, at_once))
    except UserError as error:
        return replace(work, seconds=None, reason=str(error))


def _probed_seconds(remaining: Sequence[tuple[Config, int]], at_once: int) -> float:
    """Seconds for configs with their remaining rounds; raises a ``UserError`` if a probe fails or takes too long."""
    start, seconds = time.monotonic(), 0.0
    speeds: dict[Config, ProbedSpeed] = {}
    for config, rounds in remaining:
        probed = _probe_config(config, at_once)
        if probed not in speeds:
            if not is_available(config.data.dataset, config.data.dir):
                raise UserError(f"{config.data.dataset} is not downloaded")
            if time.monotonic() - start > MAX_PROBING:
                raise UserError(f"probes took more than {MAX_PROBING:.0f} s")
            speeds[probed] = measure_speed(probed)
        seconds += speeds[probed].seconds(config, rounds)
    return seconds / max(1, min(at_once, available_cores()))


def _probe_config(config: Config, at_once: int) -> Config:
    """A config to probe: three rounds of plain SGD, the same for runs that differ only in seed or learning rate."""
    training = config.training.model_copy(update={"rounds": 3, "lr": 0.01, "lr_decay": 1.0})
    evaluation = config.evaluation.model_copy(update={"final": 0, "save_every": None})
    engine = config.engine.model_copy(update={"compile": "off", "workers": 1 if at_once > 1 else config.engine.workers})
    return config.model_copy(
        update={**PROBE_SETTINGS, "seed": 0, "training": training, "evaluation": evaluation, "engine": engine}
    )


def measure_speed(config: Config) -> ProbedSpeed:
    """Probe single steps and, if rounds are short, whole rounds as well."""
    speed = probe(config)
    if speed.seconds(config, 1) > SHORT_ROUND:
        return speed
    ends = _run_quietly(config)[1].rounds
    if len(ends) < 2:  # the run diverged in its first round
        return speed
    return replace(speed, whole_round=(ends[-1] - ends[0]) / (len(ends) - 1))


def probe(config: Config) -> ProbedSpeed:
    """Time the second of two rounds with one local step of plain SGD."""
    on_gpu = device_of(config).type != "cpu"
    at_once = min(config.federation.clients_per_round, config.engine.lanes) if on_gpu else 1
    workers = 1 if on_gpu else min(config.engine.workers or available_cores(), config.federation.clients_per_round)
    tiny = config.model_copy(
        update={
            **PROBE_SETTINGS,
            "training": config.training.model_copy(update={"rounds": 2, "local_epochs": 1, "local_steps": 1}),
            "federation": config.federation.model_copy(update={"clients_per_round": at_once, "sampling": "fixed"}),
            "evaluation": config.evaluation.model_copy(update={"every": 2, "final": 0, "examples": PROBED_EXAMPLES}),
            "engine": config.engine.model_copy(update={"workers": 1, "compile": "off"}),
        }
    )
    run, times = _run_quietly(tiny)
    tested = len(run.problem.data.test)
    evaluation_seconds = times.evaluations[-1] - times.rounds[-1]
    return ProbedSpeed(
        step=times.rounds[-1] - times.rounds[0],
        example=evaluation_seconds / min(PROBED_EXAMPLES, tested) / workers,
        at_once=at_once * workers,
        clients=len(run.partition.clients),
        examples=sum(len(indices) for indices in run.partition.described_clients),
        tested=tested,
    )


def _run_quietly(config: Config) -> tuple[Run, _Timestamps]:
    """Run a config without showing its warnings; returns the run and the times of its rounds."""
    times = _Timestamps()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = Run(config, callbacks=(times,))
        run.go()
    return run, times


class _Timestamps(Callback):
    """The times at which rounds and evaluations end, in seconds."""

    def __init__(self) -> None:
        self.rounds: list[float] = []
        self.evaluations: list[float] = []

    def round_done(self, run: RunView) -> None:
        self.rounds.append(time.monotonic())

    def evaluated(self, run: RunView) -> None:
        self.evaluations.append(time.monotonic())
