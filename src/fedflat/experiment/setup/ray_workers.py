"""An experiment on Ray: what its workers build for themselves, from the config and what the user brought."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from fedflat.data.data_dir import data_dir
from fedflat.engines.problem.problem import Problem
from fedflat.engines.ray.cluster import Device
from fedflat.engines.ray.engine import RayEngine
from fedflat.engines.ray.messages import WorkerSetup
from fedflat.experiment.config import Config
from fedflat.experiment.setup.engine import engine_for
from fedflat.experiment.setup.problem import federation


def ray_engine(config: Config, problem: Problem, own: dict[str, Any]) -> RayEngine:
    """The Ray engine of a config; with looks at flatness, the driver sees what single clients send."""
    wanted = config.engine
    return RayEngine(
        problem,
        partial(builder, config, own),
        address=wanted.ray_address,
        workers=wanted.workers,
        device=wanted.device,
        shows_rows=config.flatness.every is not None,
    )


def builder(config: Config, own: dict[str, Any], device: Device) -> Callable[[], WorkerSetup]:
    """What a worker calls. Datasets that the config names are read from each node's own files, and only what the user brought travels."""
    here = config.engine.model_copy(update={"name": "auto", "device": device, "workers": 1, "ray_address": None})
    folder = data_dir(config.data.dir).absolute()
    data = config.data.model_copy(update={"dir": folder})
    return partial(local, config.model_copy(update={"engine": here, "data": data}), own)


def local(config: Config, own: dict[str, Any]) -> WorkerSetup:
    """The problem of a config on this process's device, with the engine that is best there."""
    problem, _ = federation(config, **own)
    engine: Any = engine_for(config, problem)
    return WorkerSetup(problem, engine)
