"""Builds the engine, local training, client sampler and averages of a config."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median_low
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fedflat.algorithms import Algorithm
from fedflat.algorithms.descent import Descent
from fedflat.algorithms.lr_schedule import Schedule
from fedflat.averaging import AverageState, Ring, RunInfo, average_name
from fedflat.data import Partition
from fedflat.data.files.streamed import StreamedTensor
from fedflat.data.sources.source import data_dir
from fedflat.engines.cpu.engine import LoopEngine
from fedflat.engines.gpu.engine import LaneEngine
from fedflat.engines.gpu.step import compiled_step, eager_step
from fedflat.engines.problem.kernels import KernelError, compiler
from fedflat.engines.problem.problem import Problem
from fedflat.engines.problem.task import require_distillation
from fedflat.engines.round.aggregation import Aggregation
from fedflat.engines.round.contract import Engine, Training
from fedflat.engines.round.plan import Plan, Sampler
from fedflat.errors import GpuFailed, UserError, first_line
from fedflat.experiment.config import Config
from fedflat.experiment.setup.privacy import mechanism_of
from fedflat.experiment.setup.problem import build_problem, device_of
from fedflat.experiment.setup.timing import step_limit
from fedflat.experiment.store.checkpoint import newest_checkpoint
from fedflat.experiment.store.run_folder import RunFolder
from fedflat.flatness.precision import gpu_has_tf32, has_bf16
from fedflat.models import classifier_parameters
from fedflat.models.mlp import Mlp
from fedflat.operating_system import KEEPS_FREED_MEMORY
from fedflat.processes import available_cores, is_sendable, start_fork_server
from fedflat.registry import load_plugins, loaded_plugins

if TYPE_CHECKING:
    from fedflat.engines.ray.cluster import Device
    from fedflat.engines.ray.engine import RayEngine
    from fedflat.engines.ray.messages import WorkerSetup

UserObjects = dict[str, Any]
"""User-supplied objects under the keys ``data``, ``model`` and ``task``; None for each that the config builds."""
EVALUATION_WORKERS = 8
"""Number of workers that are useful for evaluation, even if fewer clients train per round."""
SMALL_MODEL = 250_000
"""Largest number of parameters for which parallel runs beat sequential ones that use all cores."""
MIN_STEPS_FOR_PROCESSES = 10_000
"""Smallest number of local steps of a small model for which starting processes pays off: it takes as long as about
5,000 steps.
"""
MIN_ROUNDS_TO_COMPILE = 200
"""Smallest number of rounds for which compiling pays off on a GPU, because it takes tens of seconds."""
MIN_STEPS_TO_COMPILE = 5000
"""Smallest number of local steps, over all rounds and clients, for which compiling kernels pays off on a CPU: it takes
seconds, once for each model and batch size, and saves milliseconds per step.
"""


def engine_for(config: Config, problem: Problem, user_objects: UserObjects | None = None) -> Engine:
    """Build the engine of a config.

    The loop engine trains clients one after another in each worker process, the lane engine several at a time on a
    GPU. ``auto`` selects lanes on a GPU, and the loop on a CPU or for streamed data.

    Args:
        config: the experiment, as ``decide_compile`` returned it; ``engine.compile=auto`` counts as off.
        problem: its problem, on the device to train on.
        user_objects: user-supplied objects, which Ray workers need to build the problem. Without them, as in a Ray
            worker, the engine is local even if the config names Ray.
    """
    settings = config.engine
    if settings.name == "ray" and user_objects is not None:
        return ray_engine(config, problem, user_objects)
    if settings.ray_address is not None and settings.name != "ray":
        warnings.warn(
            f"engine.ray_address={settings.ray_address} has no effect with engine.name={settings.name}; use "
            "engine.name=ray",
            stacklevel=2,
        )
    check_precision(settings.precision, problem.device.type == "cuda")
    if settings.name == "lanes" and isinstance(problem.data.train.inputs, StreamedTensor):
        raise UserError(
            f"engine.name=lanes needs all data on the device, but {problem.data.name} is streamed; use engine.name=loop"
        )
    if _uses_lanes(config, problem):
        return LaneEngine(problem, settings.lanes, compiled_step if settings.compile == "on" else eager_step)
    return LoopEngine(problem, settings.workers or _default_workers(config, problem))


def _uses_lanes(config: Config, problem: Problem) -> bool:
    """Whether clients train in lanes: by default, if the problem and all of its data are on a GPU."""
    on_gpu = problem.device.type == "cuda" and not isinstance(problem.data.train.inputs, StreamedTensor)
    return config.engine.name == "lanes" or (config.engine.name != "loop" and on_gpu)


def prepare_workers(config: Config, user_objects: UserObjects) -> None:
    """Start the process that forks the workers if a run will likely use them; it imports torch in the background.

    A run calls this before it loads its data, so that both overlap.
    """
    settings = config.engine
    # The sizes of these models are not known here; if such a model is large, its workers start later.
    may_be_small = user_objects["model"] is not None or config.model.startswith(Mlp.name)
    workers = settings.workers or (1 if may_be_small else available_cores())
    is_local_loop = settings.name in ("auto", "loop") and device_of(config).type == "cpu"
    if workers > 1 and is_local_loop and is_sendable(user_objects):
        start_fork_server(KEEPS_FREED_MEMORY)


def _default_workers(config: Config, problem: Problem) -> int:
    """One worker per core that it can use, or one, i.e. this process, for a short run of a small model.

    A model is small if it has few parameters and only linear layers; steps of convolutions or LSTMs take longer.
    """
    model = problem.model
    is_small = sum(parameter.numel() for parameter in model.parameters()) <= SMALL_MODEL
    is_linear = all(isinstance(m, nn.Linear) for m in model.modules() if list(m.parameters(recurse=False)))
    if is_small and is_linear and total_steps(config, len(problem.data.train)) < MIN_STEPS_FOR_PROCESSES:
        return 1
    return min(available_cores(), max(EVALUATION_WORKERS, config.federation.clients_per_round))


def total_steps(config: Config, examples: int) -> int:
    """The local steps of a run over all rounds and clients, if the training ``examples`` are divided evenly."""
    training, clients_per_round = config.training, config.federation.clients_per_round
    steps_per_epoch = math.ceil(examples / (config.data.clients or clients_per_round) / training.batch_size)
    local_steps = training.local_steps or training.local_epochs * steps_per_epoch
    return training.rounds * clients_per_round * local_steps


def check_precision(precision: str, on_gpu: bool, alternative: str = "engine.precision=float32") -> None:
    """Reject bf16 and warn about TF32 on a device that does not have them; the error suggests the alternative."""
    device = torch.cuda.get_device_name() if on_gpu else "this CPU"
    if precision == "bf16" and not has_bf16("cuda" if on_gpu else "cpu"):
        raise UserError(
            f"{device} does not compute in bf16, which needs a recent GPU or an x86 CPU with AMX or AVX-512 BF16; "
            f"use {alternative}"
        )
    if precision == "tf32" and not (on_gpu and gpu_has_tf32()):
        warnings.warn(f"engine.precision=tf32 has no effect on {device}; this run uses float32", stacklevel=3)


def decide_compile(
    config: Config,
    problem: Problem,
    partition: Partition,
    recorded: Config | None = None,
    path: Path | None = None,
) -> Config:
    """Replace ``engine.compile=auto`` by on or off, and let the problem use its CPU kernels if it is on.

    The decision depends only on the config, the device and whether there is a C++ compiler, so it is the same whenever
    a run is repeated on the same machine. If the kernels do not work, a new run warns and trains with torch's; the
    returned config then has ``off``. A run records the returned value and keeps it when it is resumed.

    Args:
        config: the experiment.
        problem: its problem, on the device to train on.
        partition: its partition.
        recorded: the config that a resumed run recorded.
        path: the folder of the resumed run.

    Raises:
        KernelError: a resumed run began with kernels that do not work now, or with another value than ``config`` has.
    """
    if config.engine.name == "ray":  # workers of a Ray cluster decide by themselves
        return config
    if recorded is not None:
        require_same_compile(path, config, recorded)
    should_compile = _should_compile(config, problem, partition, recorded)
    uses_loop_on_cpu = problem.device.type == "cpu" and config.engine.name != "lanes"
    if should_compile and uses_loop_on_cpu and problem.suits_kernels(config.training.batch_size):
        try:
            problem.use_kernels(config.training.batch_size)
        except KernelError as error:
            if recorded is not None and recorded.engine.compile == "on" and _began_with_kernels(path):
                raise KernelError(
                    f"cannot resume the run in {path}: it began with fedflat's kernels (engine.compile=on), with which "
                    f"results differ from torch's, but {error}; restore the C++ compiler with which it began, or start "
                    "again in another folder with engine.compile=off"
                ) from None
            warnings.warn(f"{error}; training continues with torch's kernels, which are slower", stacklevel=3)
    if uses_loop_on_cpu:  # without kernels, there is nothing to compile
        should_compile = problem.kernel_source is not None
    return config.changed(engine={"compile": "on" if should_compile else "off"})


def require_same_compile(path: Path | None, config: Config, recorded: Config) -> None:
    """Raise a ``KernelError`` if ``engine.compile`` contradicts the value that the run in ``path`` recorded.

    Compiled and uncompiled results differ by rounding. On a GPU, so do repeated runs, so there the value may change.
    """
    ours, theirs = config.engine.compile, recorded.engine.compile
    may_use_gpu = config.engine.device == "cuda" or (config.engine.device == "auto" and torch.cuda.is_available())
    if may_use_gpu or theirs != "on" or ours != "off":  # a run that began without kernels continues without them
        return
    raise KernelError(
        f"the run in {path} recorded engine.compile={theirs}, but engine.compile={ours} is given, with which results "
        f"differ on a CPU; use engine.compile={theirs} to continue, or choose another folder"
    )


def _began_with_kernels(path: Path | None) -> bool:
    """Whether the run in ``path`` used CPU kernels up to its last checkpoint, or has none; a GPU uses other kernels."""
    checkpoint = None if path is None else newest_checkpoint(RunFolder(path))
    return checkpoint is None or "compile" in checkpoint.header


def _should_compile(config: Config, problem: Problem, partition: Partition, recorded: Config | None) -> bool:
    """Whether to compile, according to the config, the resumed run's ``recorded`` config or the length of the run."""
    engine, training = config.engine, config.training
    if recorded is not None and recorded.engine.compile != "auto":
        return recorded.engine.compile == "on"
    if engine.compile != "auto":
        return engine.compile == "on"
    on_gpu = problem.device.type == "cuda"
    uses_lanes = _uses_lanes(config, problem)
    if uses_lanes or on_gpu:
        return uses_lanes and on_gpu and training.rounds >= MIN_ROUNDS_TO_COMPILE
    sizes = [len(indices) for indices in partition.summarised_clients]
    full_batches = training.local_epochs * (median_low(sizes) // training.batch_size)
    cohort = min(config.federation.clients_per_round, len(partition.clients))
    return (
        bool(full_batches)
        and training.rounds * cohort * (training.local_steps or full_batches) >= MIN_STEPS_TO_COMPILE
        and problem.suits_kernels(training.batch_size)
        and compiler() is not None
    )


def ray_engine(config: Config, problem: Problem, user_objects: UserObjects) -> RayEngine:
    """Build the Ray engine of a config; if flatness is measured during the run, the driver receives every upload."""
    from fedflat.engines.ray.engine import RayEngine

    return RayEngine(
        problem,
        partial(_worker_setup, config, user_objects),
        address=config.engine.ray_address,
        workers=config.engine.workers,
        device=config.engine.device,
        shows_rows=config.flatness.every is not None,
    )


def _worker_setup(config: Config, user_objects: UserObjects, device: Device) -> Callable[[], WorkerSetup]:
    """The function that a Ray worker on ``device`` calls to set up; it reads a named dataset on the worker's node."""
    worker_config = config.changed(
        engine={"name": "auto", "device": device, "workers": 1, "ray_address": None},
        data={"dir": data_dir(config.data.dir).absolute()},  # a worker has another working directory and environment
    )
    return partial(_set_up_worker, worker_config, user_objects, tuple(loaded_plugins()))


def _set_up_worker(config: Config, user_objects: UserObjects, plugins: tuple[str, ...]) -> WorkerSetup:
    """Load the plugins, and build the problem and the engine of a Ray worker."""
    from fedflat.engines.ray.messages import WorkerSetup

    load_plugins(plugins)
    problem, partition = build_problem(config, **user_objects)
    engine: Any = engine_for(decide_compile(config, problem, partition), problem)
    return WorkerSetup(problem, engine)


def training_of(
    config: Config, algorithm: Algorithm, clients: int, problem: Problem, is_deployed: bool = False
) -> Training:
    """The settings of local training and aggregation for a federation of ``clients`` clients.

    ``is_deployed`` says whether they are real sites, which draw the noise of differential privacy securely.

    Raises a ``UserError`` if the algorithm does not suit the config: if it requires the mean of updates, but the config
    uses robust aggregation; if its local optimiser does not suit the settings or the model; if it needs a teacher, but
    the task has no logits to compare; or if differential privacy does not suit it.
    """
    training, federation = config.training, config.federation
    if algorithm.needs_teacher:
        require_distillation(problem.task, config.algorithm)
    conflicts = [slot.robust_aggregation_conflict() for _, slot in algorithm.slots()]
    conflict = next(filter(None, conflicts), None)
    if federation.aggregation != "mean" and conflict:
        raise UserError(
            f"federation.aggregation={federation.aggregation} does not work with {config.algorithm}: {conflict}, "
            "which holds only for the mean; use mean, or an algorithm without client state, such as fedavg or fedmoswa"
        )
    descent = Descent(training.weight_decay, training.momentum, training.clip, training.clip_mode)
    conflict = algorithm.local_optimiser.run_conflict(descent, problem.layout)
    if conflict:
        raise UserError(f"{config.algorithm} cannot be used in this run: {conflict}")
    return Training(
        algorithm,
        descent,
        Schedule(training.lr, training.lr_decay, training.rounds),
        Plan(
            training.batch_size,
            training.local_epochs,
            training.local_steps,
            federation.partial,
            step_limit(config, algorithm, problem),
        ),
        config.seed,
        clients,
        Aggregation(federation.weighting, federation.aggregation, federation.trim, federation.longest),
        own_statistics=training.statistics == "own",
        privacy=mechanism_of(config, algorithm, clients, problem, is_deployed),
    )


def sampler_of(config: Config, clients: int) -> Sampler:
    """The sampler of each round's cohort among ``clients`` clients."""
    federation = config.federation
    return Sampler(clients, min(federation.clients_per_round, clients), federation.sampling, federation.dropout)


def begin_averages(
    algorithm: Algorithm, problem: Problem, config: Config, flat_model: Tensor, open_rows: Callable[[str], Ring]
) -> dict[str, AverageState]:
    """The initial state of every average of an algorithm, by name; warns if the run is too short for an average.

    Args:
        algorithm: the algorithm.
        problem: the problem that it solves.
        config: the experiment.
        flat_model: weights and floating-point buffers of the initial model, as one vector.
        open_rows: opens a named store of past models, which some averages need.
    """
    # Not every model has a recognisable classifier, so look for it only if an average treats it separately.
    needs_classifier = any(getattr(average, "part", "all") != "all" for average in algorithm.averages)
    classifier = classifier_parameters(problem.model) if needs_classifier else set()
    info = RunInfo(
        config.training.rounds,
        algorithm.lr_schedule.cycle,
        classifier=problem.whole_layout.indicator(classifier.__contains__, flat_model),
        ring=lambda name, _: open_rows(name),  # a row store grows, so it ignores the number of models
        first=config.init_rounds,
    )
    for average in algorithm.averages:
        warning = average.warning(info)
        if warning:
            warnings.warn(warning, stacklevel=2)
    return {average_name(average): average.begin(info, flat_model) for average in algorithm.averages}


@contextmanager
def explain_gpu_errors(config: Config) -> Iterator[None]:
    """Turn GPU errors into user errors: ``GpuFailed``, or if memory is short, one that names the settings to lower."""
    try:
        yield
    except torch.OutOfMemoryError:
        symptom = "the GPU of a Ray worker is out of memory"
        if config.engine.name != "ray":
            free, total = (size / 2**30 for size in torch.cuda.mem_get_info())
            symptom = f"the GPU is out of memory ({total - free:.1f} of {total:.1f} GB in use)"
        raise UserError(
            f"{symptom}; lower training.batch_size (now {config.training.batch_size}), engine.lanes (now "
            f"{config.engine.lanes}) or evaluation.batch_size (now {config.evaluation.batch_size}), "
            "or use engine.precision=bf16"
        ) from None
    except RuntimeError as error:
        message = first_line(error)
        if not message.startswith("CUDA error"):
            raise
        raise GpuFailed(
            f"the GPU failed ({message}); resume the run from its last checkpoint. If it fails again, set "
            "engine.compile=off, and report the command as a bug"
        ) from error
