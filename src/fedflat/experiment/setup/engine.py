"""Which engine runs an experiment."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fedflat.data.files.streamed import StreamedTensor
from fedflat.engines.cpu.engine import LoopEngine
from fedflat.engines.cpu.worker_pool import available_cores
from fedflat.engines.gpu.engine import LaneEngine
from fedflat.engines.gpu.step import compiled, in_place
from fedflat.engines.problem.problem import Problem
from fedflat.engines.round.contract import Engine
from fedflat.errors import UserError
from fedflat.experiment.config import Config

Own = dict[str, Any]
"""Data, model and task by these names: the user's own, or none."""
EVALUATING = 8
"""Workers that have enough to do in evaluations, however few clients train."""
WORTH_COMPILING = 200
"""Rounds from which on compiling, which takes some tens of seconds, pays for itself."""


def engine_for(config: Config, problem: Problem, own: Own | None = None) -> Engine:
    """The engine that a config asks for: by default lanes on a GPU, and the loop on a CPU or for data that are decoded on demand.

    Ray workers build the problem themselves, for which they need what the user brought; where ``own`` is not given, the work is done here.
    """
    wanted = config.engine
    if wanted.name == "ray" and own is not None:
        from fedflat.experiment.setup.ray_workers import ray_engine

        return ray_engine(config, problem, own)
    on_gpu = problem.device.type == "cuda"
    if wanted.precision == "bf16" and not on_gpu:
        raise UserError("engine.precision=bf16 is for a GPU, and this run is on the CPU; use float32")
    if wanted.precision == "tf32" and not on_gpu:
        warnings.warn("engine.precision=tf32 rounds on a GPU alone; on this CPU the run is in float32", stacklevel=2)
    streamed = isinstance(problem.data.train.inputs, StreamedTensor)
    if streamed and wanted.name == "lanes":
        raise UserError(
            f"engine.name=lanes needs all data on its device, and {problem.data.name} is decoded on demand; use engine.name=loop"
        )
    if wanted.name == "loop" or (wanted.name in ("auto", "ray") and (streamed or not on_gpu)):
        if wanted.compile == "on" and not on_gpu:
            problem.compile(config.training.batch_size)
        return LoopEngine(
            problem, wanted.workers or min(available_cores(), max(EVALUATING, config.federation.clients_per_round))
        )
    long = config.training.rounds >= WORTH_COMPILING and on_gpu
    compiling = wanted.compile == "on" or (wanted.compile == "auto" and long)
    return LaneEngine(problem, wanted.lanes, compiled if compiling else in_place)


@contextmanager
def explain_out_of_memory(config: Config) -> Iterator[None]:
    """Turn an overfull GPU into a sentence that says what to change."""
    try:
        yield
    except torch.OutOfMemoryError:
        if config.engine.name == "ray":
            raise UserError(
                f"the memory of a Ray worker's GPU is full; lower training.batch_size (now {config.training.batch_size}) or "
                f"engine.lanes (now {config.engine.lanes}), or use engine.precision=bf16"
            ) from None
        free, whole = (size / 2**30 for size in torch.cuda.mem_get_info())
        t, e = config.training, config.engine
        raise UserError(
            f"the GPU's memory is full: {whole - free:.1f} of {whole:.1f} GB are in use; lower training.batch_size (now {t.batch_size}), "
            f"engine.lanes (now {e.lanes}) or evaluation.batch_size (now {config.evaluation.batch_size}), or use engine.precision=bf16"
        ) from None
