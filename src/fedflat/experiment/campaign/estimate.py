"""Estimates of memory, disk space and time; bytes are computed from sizes, seconds from timed rounds.

A probe is a short run that is only timed.
"""

from __future__ import annotations

import gc
import math
import time
import warnings
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import torch

from fedflat import data as datasets
from fedflat.algorithms import algorithm
from fedflat.engines.gpu.engine import LaneEngine
from fedflat.engines.gpu.lane import RESERVE
from fedflat.errors import UserError
from fedflat.experiment.callback import Callback, RunView
from fedflat.experiment.campaign.disk_space import client_scalars, participants, run_disk, state_scalars
from fedflat.experiment.config import Config
from fedflat.experiment.run import Run
from fedflat.experiment.setup.problem import device_of
from fedflat.experiment.setup.timing import policy_of
from fedflat.experiment.store.files import DamagedFile
from fedflat.experiment.store.run_folder import RunFolder
from fedflat.processes import available_cores
from fedflat.text import parse
from fedflat.timing import Asynchronous

PROBED_EXAMPLES = 64
"""Test examples that a probe evaluates."""
SHORT_ROUND = 3.0
"""Longest round, in seconds, that is timed as a whole; for short rounds, estimates from single steps are too high."""
TIMED_ROUNDS = 3
"""Rounds of a probe of whole rounds; the first one is not timed."""
MAX_PROBING = 60.0
"""Seconds after which no further probe starts."""
PROBE_SETTINGS = {"algorithm": "fedavg", "init": None, "init_head": "given", "init_rounds": 0}
"""Settings of all probes: plain SGD from random weights."""
WITHOUT_TIME = {"clock": None, "policy": "wait", "privacy": None}
"""Settings that reduce a round of a probe to training each of its clients once."""


BF16_SPEEDUPS = {"cnn": "1.4 to 1.7", "resnet18": "1.6 to 1.7"}
"""Speed of bf16 relative to TF32 on an H200, by model, as measured in docs/benchmarks.md."""


@dataclass(frozen=True)
class GpuForecast:
    """How a run uses its GPU; memory in bytes."""

    reserved: int
    """The most memory that was reserved so far."""
    total: int
    precision: str
    bf16_speedup: str | None
    """How many times as fast the run would be in bf16; empty if not measured, None if bf16 cannot speed up the run."""
    lanes: int = 0
    """Number of clients that train at once; 0 without the lanes engine."""
    lane: int = 0
    """Memory of a lane."""
    fitting: int = 0
    """Largest number of clients that could train at once."""


@dataclass(frozen=True)
class Forecast:
    """Memory and disk space that a run needs, in bytes, and the time that it will take."""

    data: int
    """Training and held-out examples in memory."""
    model: int
    """One copy of weights and buffers."""
    cohort: int
    """Models, states and messages of the clients of one round."""
    states: int
    """Client states at the end of the run."""
    clients: int
    """Upper bound on the number of distinct clients that participate."""
    disk: int
    """Size of the run's folder; 0 for a run without one."""
    seconds: float
    """Time for the remaining rounds."""
    seconds_per_round: float
    rounds: int
    """Remaining rounds."""
    gpu: GpuForecast | None = None
    """None on a CPU."""


def forecast(run: RunView, seconds_per_round: float) -> Forecast:
    """Predict the memory and disk space (in bytes) of a run, and the time that its remaining rounds will take.

    Args:
        run: the run.
        seconds_per_round: measured time of a round.
    """
    problem, config = run.problem, run.config
    bytes_per_scalar = problem.dtype.itemsize
    size, buffers = problem.layout.size, problem.buffer_layout.size
    all_clients = len(run.partition.clients)
    cohort_size = min(config.federation.clients_per_round, all_clients)
    scalars_per_state = client_scalars(run.algorithm, config, size, buffers)
    scalars_per_message = state_scalars(run.algorithm.message_fields(), size)
    participating_clients = participants(config, all_clients)
    rounds_left = config.training.rounds - run.rounds
    splits = [problem.data.train, *problem.evaluation_sets.values()]
    bytes_per_client = (size + buffers + scalars_per_state + scalars_per_message) * bytes_per_scalar
    return Forecast(
        data=sum(tensor.nbytes for split in splits for tensor in split.tensors().values()),
        model=(size + buffers) * bytes_per_scalar,
        cohort=cohort_size * bytes_per_client,
        states=participating_clients * scalars_per_state * bytes_per_scalar,
        clients=participating_clients,
        disk=run_disk(config, size, buffers, all_clients).total if run.folder else 0,
        seconds=rounds_left * seconds_per_round,
        seconds_per_round=seconds_per_round,
        rounds=rounds_left,
        gpu=_gpu_forecast(run, bytes_per_client) if problem.device.type == "cuda" else None,
    )


def _gpu_forecast(run: RunView, bytes_per_client: int) -> GpuForecast:
    """How a run that has trained at least one round uses its GPU.

    Args:
        run: the run.
        bytes_per_client: memory of a client's model, state and message in the cohort, in addition to its lane.
    """
    engine, precision = run.engine, run.config.engine.precision
    reserved = torch.cuda.max_memory_reserved()
    torch.cuda.empty_cache()  # cached blocks would count as used
    free, total = torch.cuda.mem_get_info()
    can_use_bf16 = precision in ("float32", "tf32") and torch.cuda.is_bf16_supported(including_emulation=False)
    speedup = None
    if can_use_bf16:
        speedup = BF16_SPEEDUPS.get(run.config.model, "") if precision == "tf32" else ""
    if not isinstance(engine, LaneEngine):
        return GpuForecast(reserved, total, precision, speedup)
    lanes, lane = len(engine.lanes), max(lane.memory for lane in engine.lanes)
    additional = clients_that_fit(free, lane + bytes_per_client) if not engine.is_short_of_memory else 0
    return GpuForecast(reserved, total, precision, speedup, lanes, lane, lanes + additional)


def clients_that_fit(free: int, bytes_per_client: int) -> int:
    """The number of further clients that can train at once.

    >>> clients_that_fit(free=RESERVE + 100, bytes_per_client=30), clients_that_fit(free=100, bytes_per_client=30)
    (3, 0)
    """
    return max(0, free - RESERVE) // bytes_per_client


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
    """Number of clients that train concurrently."""
    clients: int
    """Number of clients in the partition."""
    examples: int
    """Training examples of all clients."""
    tested: int
    """Test examples."""
    whole_round: float | None = None
    """Seconds of a round of plain SGD; None if rounds are too long to be timed as a whole."""

    def seconds(self, config: Config, rounds: int) -> float:
        """Estimate the seconds for ``rounds`` rounds of a run, including their evaluations."""
        run_algorithm, training, evaluation = algorithm(config.algorithm), config.training, config.evaluation
        if self.whole_round is not None:  # measured with one backward pass per step
            return rounds * self.whole_round * run_algorithm.backward_passes
        steps_per_epoch = math.ceil(self.examples / self.clients / training.batch_size)
        local_steps = training.local_steps or training.local_epochs * steps_per_epoch
        policy, clients = policy_of(config), min(config.federation.clients_per_round, self.clients)
        trained = policy.buffer_size if isinstance(policy, Asynchronous) else clients  # clients in a round
        waves = math.ceil(trained / self.at_once)  # clients train in waves of ``at_once``
        training_seconds = rounds * waves * local_steps * run_algorithm.backward_passes * self.step
        evaluations = (rounds / evaluation.every + min(evaluation.final, rounds)) * (1 + len(run_algorithm.averages))
        tested = min(self.tested, evaluation.examples or self.tested)
        return training_seconds + evaluations * tested * self.example


def is_available(dataset: str, folder: Path | None) -> bool:
    """Whether a dataset needs no download."""
    source = datasets.DATASETS.get(parse(dataset)[0].name)
    return source is not None and not source.missing(datasets.data_dir(folder))


def remaining_work(runs: Iterable[PlannedRun], at_once: int = 1, probing: bool = True) -> RemainingWork:
    """Count the remaining rounds of several runs, and estimate their time by a short probe of each kind of run.

    Args:
        runs: planned runs.
        at_once: number of concurrent runs.
        probing: whether to probe; otherwise the estimated ``seconds`` are None.
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
    """Estimate how many seconds all remaining rounds of several runs take, by timing a short probe of each run.

    Runs with the same probe are timed once. Raises a ``UserError`` if a probe fails or takes too long.

    Args:
        remaining: for each run its config and number of remaining rounds.
        at_once: number of concurrent runs.
    """
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
    return seconds / max(1, min(at_once, available_cores()))  # more runs than cores are not faster


def _probe_config(config: Config, at_once: int) -> Config:
    """A config that times a run by its first rounds, with plain SGD; runs that differ only in seed or lr share it.

    If several runs execute concurrently (``at_once``), each trains in one process, and so does its probe.
    """
    return config.changed(
        **PROBE_SETTINGS,
        seed=0,
        training={"lr": 0.01, "lr_decay": 1.0},
        evaluation={"final": 0, "save_every": None},
        engine={"workers": 1 if at_once > 1 else config.engine.workers},
    )


def measure_speed(config: Config) -> ProbedSpeed:
    """Time single steps and, if rounds are short, whole rounds, because fixed costs then matter.

    Both probes are compiled if the run would be. Only one run at a time is in memory, with its data and model.
    """
    speed = probe(config.changed(engine=_build_quietly(config)[0].config.engine))
    if speed.seconds(config, 1) > SHORT_ROUND:
        return speed
    gc.collect()  # lanes refer to themselves
    run, times = _build_quietly(config)
    _execute_quietly(run, TIMED_ROUNDS)
    round_ends = times.rounds
    if len(round_ends) < 2:  # the run diverged in its first round
        return speed
    return replace(speed, whole_round=(round_ends[-1] - round_ends[0]) / (len(round_ends) - 1))


def probe(config: Config) -> ProbedSpeed:
    """Time one local step of plain SGD and one evaluation.

    The probe has two rounds with one local step each; the second one is timed.
    """
    on_gpu = device_of(config).type != "cpu"
    # A GPU trains several clients at once; a CPU trains one in each worker, and the probe measures a single worker.
    at_once = min(config.federation.clients_per_round, config.engine.lanes) if on_gpu else 1
    workers = 1 if on_gpu else min(config.engine.workers or available_cores(), config.federation.clients_per_round)
    probe_config = config.changed(
        **PROBE_SETTINGS,
        training={"rounds": 2, "local_epochs": 1, "local_steps": 1},
        federation={"clients_per_round": at_once, "sampling": "fixed", **WITHOUT_TIME},
        evaluation={"every": 2, "final": 0, "examples": PROBED_EXAMPLES},
        engine={"workers": 1},
    )
    run, times = _build_quietly(probe_config)
    _execute_quietly(run, rounds=2)
    tested = len(run.problem.data.test)
    evaluation_seconds = times.evaluations[-1] - times.rounds[-1]
    return ProbedSpeed(
        step=times.rounds[-1] - times.rounds[0],
        example=evaluation_seconds / min(PROBED_EXAMPLES, tested) / workers,
        at_once=at_once * workers,
        clients=len(run.partition.clients),
        examples=sum(len(indices) for indices in run.partition.summarised_clients),
        tested=tested,
    )


def _build_quietly(config: Config) -> tuple[Run, _Timestamps]:
    """Build a run without showing its warnings; returns the run and the times of its rounds."""
    times = _Timestamps()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Run(config, callbacks=(times,)), times


def _execute_quietly(run: Run, rounds: int) -> None:
    """Execute the first rounds of a run without showing its warnings."""
    with warnings.catch_warnings(), closing(run.train_rounds()) as steps:
        warnings.simplefilter("ignore")
        for _ in islice(steps, rounds):
            pass


class _Timestamps(Callback):
    """The times at which rounds and evaluations end, in seconds."""

    def __init__(self) -> None:
        self.rounds: list[float] = []
        self.evaluations: list[float] = []

    def round_done(self, run: RunView) -> None:
        self.rounds.append(time.monotonic())

    def evaluated(self, run: RunView) -> None:
        self.evaluations.append(time.monotonic())


@dataclass(frozen=True)
class PlannedRun:
    """An experiment with the folder that it has or will have."""

    config: Config
    folder: Path

    @property
    def done(self) -> bool:
        """Whether the run has ended."""
        return RunFolder(self.folder).has_ended

    @property
    def rounds_left(self) -> int:
        """Number of rounds left to run, counted from the last evaluation; all rounds if the metrics are damaged."""
        if self.done:
            return 0
        folder = RunFolder(self.folder)
        try:
            history = folder.metrics() if folder.exists else []
        except DamagedFile:
            history = []
        rounds_done = int(history[-1]["round"]) if history else self.config.init_rounds
        return self.config.training.rounds - rounds_done
