"""Estimates of memory, disk and time: by arithmetic for bytes, from timed rounds or probes for seconds."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

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
from fedflat.experiment.setup.problem import build_network, device_of
from fedflat.experiment.store.cleanup import Keep
from fedflat.experiment.store.client_states import RowStore
from fedflat.experiment.store.run_folder import Awaited
from fedflat.processes import available_cores
from fedflat.text import parse

if TYPE_CHECKING:
    from collections.abc import Callable

TIMED = (1, 3)
"""A run is timed from the end of the first of these rounds, which includes the set-up, to the end of the second."""
PROBED_EXAMPLES = 64
"""Test examples that a probe evaluates."""
SHORT_ROUND = 3.0
"""Longest round, in seconds, that is probed as a whole; single steps overestimate short rounds."""
PATIENCE = 60.0
"""Seconds after which no further probe starts."""
FRESH = {"algorithm": "fedavg", "init": None, "init_head": "given", "init_rounds": 0}
"""What a probe changes: plain SGD from fresh weights."""


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
    item = 8 if config.engine.precision == "float64" else 4
    server = _scalars(built.server_fields(), size)
    model, models = size + buffers, 1 + len(built.averages)
    rounds, every = config.training.rounds, config.evaluation.save_every
    past_models = sum(min(length, rounds) for length in _ring_lengths(built, rounds))
    snapshots = 0 if every is None else rounds // every - (config.init_rounds - 1) // every
    states = participants(config, clients) * _client_scalars(built, config, size, buffers)
    return RunDisk(
        checkpoint=(2 * states + models * model + server + 2 * past_models * model) * item,
        snapshots=snapshots * models * model * item,
        models=models * model * item,
    )


def sweep_disk(configs: Sequence[Config], keep: Keep, at_once: int) -> SweepDisk:
    """What several runs write, ``at_once`` of them at a time, and what remains of it."""
    sizes: dict[tuple[str, ...], tuple[int, int, int]] = {}
    kept, removed = 0, []
    for config in configs:
        key = _size_key(config)
        sizes[key] = sizes.get(key) or _sizes(config)
        parts = vars(run_disk(config, *sizes[key]))
        kept += sum(size for part, size in parts.items() if part not in keep.removed)
        removed.append(sum(size for part, size in parts.items() if part in keep.removed))
    return SweepDisk(kept + sum(sorted(removed)[-at_once:]), kept)


def participants(config: Config, clients: int) -> int:
    """Upper bound on distinct participants in a run (the expected bound, with Bernoulli sampling)."""
    return min(clients, config.federation.clients_per_round * (config.training.rounds - config.init_rounds))


def _scalars(fields: dict[str, Fields], size: int) -> int:
    return sum(field.scalars(size) for field in flat_fields(fields).values())


def _client_scalars(built: Algorithm, config: Config, size: int, buffers: int) -> int:
    """Numbers that a client keeps between rounds."""
    return _scalars(built.client_fields(), size) + (buffers if config.training.statistics == "own" else 0)


def _ring_lengths(built: Algorithm, rounds: int) -> list[int]:
    """The number of past models that each average keeps."""
    lengths: list[int] = []

    def ring(name: str, length: int) -> RowStore:
        lengths.append(length)
        return RowStore()

    empty = torch.zeros(0)
    for average in built.averages:
        average.begin(RunInfo(rounds, built.lr_schedule.cycle, empty.bool(), ring), empty)
    return lengths


def _size_key(config: Config) -> tuple[str, ...]:
    """The settings that sizes depend on."""
    d = config.data
    partition = (d.partition, str(d.partition_seed), str(config.seed)) if datasets.fixes_clients(d.partition) else ()
    return (config.model, config.training.train, d.dataset, str(d.dir), str(d.clients), *partition)


def _sizes(config: Config) -> tuple[int, int, int]:
    """Number of trained parameters, of BatchNorm statistics and of clients."""
    data = datasets.load(config.data.dataset, config.data.dir)
    fresh = config.model_copy(update={"init": None, "init_head": "given"})
    network = build_network(fresh, data.input_shape, data.num_classes)
    trained = sum(parameter.numel() for parameter in network.parameters() if parameter.requires_grad)
    statistics = sum(buffer.numel() for buffer in network.buffers() if buffer.is_floating_point())
    return trained, statistics, _number_of_clients(config, data)


def _number_of_clients(config: Config, data: datasets.Dataset) -> int:
    d = config.data
    if d.clients is not None and not datasets.fixes_clients(d.partition):
        return d.clients
    seed = config.seed if d.partition_seed is None else d.partition_seed
    train = data.train
    partition = datasets.make_partition(
        d.partition, train.targets, data.num_classes, None, seed, d.validation, train.groups, train.coarse
    )
    return len(partition.clients)


@dataclass(frozen=True)
class Forecast:
    """Bytes that a run needs, and how long it will take."""

    data: int
    """Training and held-out examples in memory."""
    model: int
    """One copy of weights and buffers."""
    cohort: int
    """What the clients of one round read and write."""
    states: int
    """Client states at the end of the run."""
    clients: int
    """Upper bound on distinct participants."""
    disk: int
    """What goes to the run's folder; 0 without one."""
    seconds: float
    """For the remaining rounds."""
    seconds_per_round: float
    rounds: int
    """Remaining rounds."""
    gpu: tuple[int, int] | None = None
    """GPU memory: most reserved so far, and in total."""


def forecast(run: RunView, seconds_per_round: float) -> Forecast:
    """What a run will need from now on."""
    problem, built, config = run.problem, run.algorithm, run.config
    item = torch.finfo(problem.dtype).bits // 8
    size, buffers, everyone = problem.layout.size, problem.buffers.size, len(run.partition.clients)
    examples = [problem.data.train, *problem.held_out.values()]
    kept = _client_scalars(built, config, size, buffers)
    sent = _scalars(built.message_fields(), size)
    clients = participants(config, everyone)
    rounds = config.training.rounds - run.rounds
    on_gpu = problem.device.type == "cuda"
    return Forecast(
        data=sum(tensor.nbytes for split in examples for tensor in split.tensors().values()),
        model=(size + buffers) * item,
        cohort=min(config.federation.clients_per_round, everyone) * (size + buffers + kept + sent) * item,
        states=clients * kept * item,
        clients=clients,
        disk=run_disk(config, size, buffers, everyone).total if run.folder else 0,
        seconds=rounds * seconds_per_round,
        seconds_per_round=seconds_per_round,
        rounds=rounds,
        gpu=(torch.cuda.max_memory_reserved(), torch.cuda.mem_get_info()[1]) if on_gpu else None,
    )


class ForecastCallback(Callback):
    """Calls ``tell`` once, after the first rounds, if the rest of the run takes ``long`` seconds or more."""

    def __init__(self, tell: Callable[[Forecast], None], long: float = 60.0) -> None:
        self._tell, self._long = tell, long
        self._started: float | None = None
        self._rounds = 0

    def round_done(self, run: RunView) -> None:
        self._rounds += 1
        if self._rounds not in TIMED:
            return
        if run.problem.device.type == "cuda":
            torch.cuda.synchronize()
        now = time.monotonic()
        if self._started is None:
            self._started = now
            return
        expected = forecast(run, (now - self._started) / (TIMED[1] - TIMED[0]))
        if expected.seconds >= self._long:
            self._tell(expected)


@dataclass(frozen=True)
class RemainingWork:
    """What is left of several runs."""

    runs: int
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
        """Time for ``rounds`` rounds of a run."""
        built, t, f = algorithm(config.algorithm), config.training, config.federation
        if self.whole_round is not None:
            return rounds * self.whole_round * built.backward_passes
        steps = t.local_steps or t.local_epochs * math.ceil(self.examples / self.clients / t.batch_size)
        waves = math.ceil(min(f.clients_per_round, self.clients) / self.at_once)
        models = 1 + len(built.averages)
        evaluations = rounds / config.evaluation.every + min(config.evaluation.final, rounds)
        tested = min(self.tested, config.evaluation.examples or self.tested)
        return rounds * waves * steps * built.backward_passes * self.step + evaluations * models * tested * self.example


def is_available(dataset: str, folder: Path | None) -> bool:
    """Whether a dataset needs no download."""
    source = datasets.DATASETS.get(parse(dataset)[0].name)
    return source is not None and not source.missing(datasets.data_dir(folder))


def remaining_work(runs: Iterable[Awaited], at_once: int = 1, probing: bool = True) -> RemainingWork:
    """Remaining rounds of several runs, and the time they take by a probe of each kind of run.

    Args:
        runs: planned runs.
        at_once: runs at the same time.
        probing: whether to measure; without it ``seconds`` is None.
    """
    runs = list(runs)
    left = [(run.config, rounds) for run in runs if (rounds := run.rounds_left)]
    seconds, reason = 0.0, "" if probing or not left else "not probed"
    begin, speeds = time.monotonic(), dict[Config, ProbedSpeed]()
    for config, rounds in left if probing else ():
        kind = _kind(config, at_once)
        if kind not in speeds:
            if not is_available(config.data.dataset, config.data.dir):
                reason = f"{config.data.dataset} is not downloaded"
            elif time.monotonic() - begin > PATIENCE:
                reason = f"probes took more than {PATIENCE:.0f} s"
            else:
                try:
                    speeds[kind] = measure_speed(kind)
                except UserError as error:
                    reason = str(error)
            if reason:
                break
        seconds += speeds[kind].seconds(config, rounds)
    seconds /= max(1, min(at_once, available_cores()))
    done = sum(run.done for run in runs)
    return RemainingWork(len(runs), done, sum(rounds for _, rounds in left), None if reason else seconds, reason)


def _kind(config: Config, at_once: int) -> Config:
    """A config to probe: three rounds of plain SGD, the same for runs that differ only in seed or learning rate."""
    training = config.training.model_copy(update={"rounds": 3, "lr": 0.01, "lr_decay": 1.0})
    evaluation = config.evaluation.model_copy(update={"final": 0, "save_every": None})
    engine = config.engine.model_copy(update={"compile": "off", "workers": 1 if at_once > 1 else config.engine.workers})
    return config.model_copy(
        update={**FRESH, "seed": 0, "training": training, "evaluation": evaluation, "engine": engine}
    )


def measure_speed(config: Config) -> ProbedSpeed:
    """Probe single steps and, if rounds are short, whole rounds as well."""
    speed = probe(config)
    if speed.seconds(config, 1) > SHORT_ROUND:
        return speed
    times = _run_quietly(config)[1].rounds
    return replace(speed, whole_round=(times[-1] - times[0]) / (len(times) - 1)) if len(times) > 1 else speed


def probe(config: Config) -> ProbedSpeed:
    """Time the second of two rounds with one local step of plain SGD."""
    on_gpu = device_of(config).type != "cpu"
    at_once = min(config.federation.clients_per_round, config.engine.lanes) if on_gpu else 1
    workers = 1 if on_gpu else min(config.engine.workers or available_cores(), config.federation.clients_per_round)
    tiny = config.model_copy(
        update={
            **FRESH,
            "training": config.training.model_copy(update={"rounds": 2, "local_epochs": 1, "local_steps": 1}),
            "federation": config.federation.model_copy(update={"clients_per_round": at_once, "sampling": "fixed"}),
            "evaluation": config.evaluation.model_copy(update={"every": 2, "final": 0, "examples": PROBED_EXAMPLES}),
            "engine": config.engine.model_copy(update={"workers": 1, "compile": "off"}),
        }
    )
    run, times = _run_quietly(tiny)
    tested = len(run.problem.data.test)
    step, evaluation = times.rounds[-1] - times.rounds[0], times.evaluations[-1] - times.rounds[-1]
    examples = sum(len(indices) for indices in run.partition.described_clients)
    return ProbedSpeed(
        step,
        evaluation / min(PROBED_EXAMPLES, tested) / workers,
        at_once * workers,
        len(run.partition.clients),
        examples,
        tested,
    )


def _run_quietly(config: Config) -> tuple[Run, _Timestamps]:
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
