"""The engine that executes an experiment."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from fedflat.algorithms import Algorithm
from fedflat.algorithms.algorithm import Descent
from fedflat.algorithms.lr_schedule import Schedule
from fedflat.data.data_dir import data_dir
from fedflat.data.files.streamed import StreamedTensor
from fedflat.engines.cpu.engine import LoopEngine
from fedflat.engines.gpu.engine import LaneEngine
from fedflat.engines.gpu.step import compiled, in_place
from fedflat.engines.problem.problem import Problem
from fedflat.engines.round.contract import Aggregation, Engine, Training
from fedflat.engines.round.plan import Plan, Sampler
from fedflat.errors import UserError
from fedflat.experiment.config import Config
from fedflat.experiment.setup.problem import federation
from fedflat.processes import available_cores

if TYPE_CHECKING:
    from fedflat.engines.ray.cluster import Device
    from fedflat.engines.ray.engine import RayEngine
    from fedflat.engines.ray.messages import WorkerSetup

Own = dict[str, Any]
"""User-supplied ``data``, ``model`` and ``task``, or None for each."""
EVALUATING = 8
"""Number of workers that evaluation keeps busy, however few clients train."""
WORTH_COMPILING = 200
"""Rounds from which compiling, which takes tens of seconds, pays off."""


def engine_for(config: Config, problem: Problem, own: Own | None = None) -> Engine:
    """The engine of a config.

    ``auto`` selects lanes on a GPU, and the loop on a CPU or for streamed data.

    Args:
        config: the experiment.
        problem: its problem, on the device to train on.
        own: user-supplied objects, which Ray workers need to build the problem; if None, Ray is not used.
    """
    settings = config.engine
    if settings.name == "ray" and own is not None:
        return ray_engine(config, problem, own)
    on_gpu = problem.device.type == "cuda"
    if settings.precision == "bf16" and not on_gpu:
        raise UserError("engine.precision=bf16 needs a GPU, but this run is on the CPU; use float32")
    if settings.precision == "tf32" and not on_gpu:
        warnings.warn("engine.precision=tf32 has no effect on the CPU; this run uses float32", stacklevel=2)
    streamed = isinstance(problem.data.train.inputs, StreamedTensor)
    if streamed and settings.name == "lanes":
        raise UserError(
            f"engine.name=lanes needs all data on the device, but {problem.data.name} is streamed; use engine.name=loop"
        )
    if settings.name == "loop" or (settings.name in ("auto", "ray") and (streamed or not on_gpu)):
        if settings.compile == "on" and not on_gpu:
            problem.compile(config.training.batch_size)
        most = max(EVALUATING, config.federation.clients_per_round)
        return LoopEngine(problem, settings.workers or min(available_cores(), most))
    long = config.training.rounds >= WORTH_COMPILING and on_gpu
    compiling = settings.compile == "on" or (settings.compile == "auto" and long)
    return LaneEngine(problem, settings.lanes, compiled if compiling else in_place)


def ray_engine(config: Config, problem: Problem, own: Own) -> RayEngine:
    """The Ray engine of a config; with in-run measurements, the driver sees the uploads of single clients."""
    from fedflat.engines.ray.engine import RayEngine

    return RayEngine(
        problem,
        partial(_worker_setup, config, own),
        address=config.engine.ray_address,
        workers=config.engine.workers,
        device=config.engine.device,
        shows_rows=config.flatness.every is not None,
    )


def _worker_setup(config: Config, own: Own, device: Device) -> Callable[[], WorkerSetup]:
    """What a worker calls to set up. It reads datasets from its own node; only user-supplied objects are sent."""
    engine = config.engine.model_copy(update={"name": "auto", "device": device, "workers": 1, "ray_address": None})
    data = config.data.model_copy(update={"dir": data_dir(config.data.dir).absolute()})
    return partial(_set_up_worker, config.model_copy(update={"engine": engine, "data": data}), own)


def _set_up_worker(config: Config, own: Own) -> WorkerSetup:
    from fedflat.engines.ray.messages import WorkerSetup

    problem, _ = federation(config, **own)
    engine: Any = engine_for(config, problem)
    return WorkerSetup(problem, engine)


@contextmanager
def explain_out_of_memory(config: Config) -> Iterator[None]:
    """Turn a GPU out-of-memory error into a ``UserError`` that names the settings to lower."""
    try:
        yield
    except torch.OutOfMemoryError:
        used = "the GPU of a Ray worker is out of memory"
        if config.engine.name != "ray":
            free, total = (size / 2**30 for size in torch.cuda.mem_get_info())
            used = f"the GPU is out of memory ({total - free:.1f} of {total:.1f} GB in use)"
        raise UserError(
            f"{used}; lower training.batch_size (now {config.training.batch_size}), engine.lanes (now "
            f"{config.engine.lanes}) or evaluation.batch_size (now {config.evaluation.batch_size}), "
            "or use engine.precision=bf16"
        ) from None


def training_of(config: Config, algorithm: Algorithm, clients: int) -> Training:
    """The local training of a config with ``clients`` clients."""
    t, f = config.training, config.federation
    obstacles = [slot.requires_mean() for _, slot in algorithm.slots() if slot.requires_mean()]
    if f.aggregation != "mean" and obstacles:
        raise UserError(
            f"federation.aggregation={f.aggregation} does not work with {config.algorithm}: {obstacles[0]}, which "
            "holds only for the mean; use mean, or an algorithm without client state, such as fedavg or fedmoswa"
        )
    return Training(
        algorithm,
        Descent(t.weight_decay, t.momentum, t.clip, t.clip_mode),
        Schedule(t.lr, t.lr_decay, t.rounds),
        Plan(t.batch_size, t.local_epochs, t.local_steps, f.partial),
        config.seed,
        clients,
        Aggregation(f.weighting, f.aggregation, f.trim, f.longest),
        t.statistics == "own",
    )


def sampler_of(config: Config, clients: int) -> Sampler:
    """The sampler of each round's cohort."""
    f = config.federation
    return Sampler(clients, min(f.clients_per_round, clients), f.sampling, f.dropout)
