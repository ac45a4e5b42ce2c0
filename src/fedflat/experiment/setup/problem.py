"""From a config to the problem and the partition it names."""

from __future__ import annotations

import warnings

import numpy as np
import torch
from torch import nn

from fedflat import data as datasets
from fedflat.data import Dataset, Examples, Partition
from fedflat.engines.problem.problem import Problem
from fedflat.engines.problem.segmentation import Segmentation
from fedflat.engines.problem.task import Classification, NextCharacter, Task, check_metric, task_for
from fedflat.engines.round.randomness import generator
from fedflat.errors import UserError
from fedflat.experiment.config import Config
from fedflat.experiment.setup.network import network_of
from fedflat.flatness.precision import allow_tf32
from fedflat.models.lstm import CharacterNetwork

MOST_PIXELS = 2**23
"""Pixels with masks in one forward pass of an evaluation: 194 frames of CamVid at 180x240, 16 of Cityscapes at 512x1024."""
CUSTOM = "custom"
"""The name, in a config, of what the user brought in Python."""


def federation(
    config: Config, data: Dataset | None = None, model: nn.Module | None = None, task: Task | None = None
) -> tuple[Problem, Partition]:
    """The problem and the partition of a config; data, model and task may be the user's own."""
    for own, name, what in ((data, config.data.dataset, "data"), (model, config.model, "model")):
        if own is None and name.partition(":")[0] == CUSTOM:
            raise UserError(
                f"this run used {what} of your own ({name}); pass it again in Python: fedflat.resume(folder, {what}=...)"
            )
    if task is not None:
        check_metric(task)
    device = device_of(config)  # first, so that nobody waits for data to hear that there is no GPU
    data = datasets.load(config.data.dataset, config.data.dir) if data is None else data
    seed = config.seed if config.data.partition_seed is None else config.data.partition_seed
    partition = datasets.make_partition(
        config.data.partition,
        data.train.targets,
        data.num_classes,
        None if datasets.fixes_clients(config.data.partition) else config.data.clients,
        seed,
        config.data.validation,
        data.train.groups,
        data.train.coarse,
    )
    if config.federation.clients_per_round > len(partition.clients) > 1:
        raise UserError(
            f"federation.clients_per_round={config.federation.clients_per_round} is more than the {len(partition.clients)} clients of the partition"
        )
    network = network_of(config, data.input_shape, data.num_classes, model)
    augmentation = datasets.augmentation(config.data.augmentation)
    augmentation.check(data)
    held_out = {"test": data.test}
    if len(partition.validation):
        held_out["validation"] = data.train.take(torch.from_numpy(partition.validation))
    if partition.unseen:
        held_out["unseen"] = data.train.take(torch.from_numpy(np.concatenate(partition.unseen)))
    problem = Problem(
        network,
        task or task_for(data.kind),
        data,
        augmentation,
        dtype=torch.float64 if config.engine.precision == "float64" else torch.float32,
        arithmetic=torch.bfloat16 if config.engine.precision == "bf16" else None,
        device=device,
        evaluation_batch=_evaluation_batch(config.evaluation.batch_size, data),
        held_out={name: _some(examples, config.evaluation.examples) for name, examples in held_out.items()},
        batch_statistics=config.training.statistics == "own",
    )
    if config.training.statistics == "own" and not problem.buffers.names:
        warnings.warn(
            f"training.statistics=own keeps BatchNorm statistics, and {config.model} has none: nothing is kept",
            stacklevel=2,
        )
    _try_out(problem, config.model)
    return problem, partition


def _evaluation_batch(wanted: int, data: Dataset) -> int:
    """As many examples per forward pass as are wanted, but of masks no more than memory is sure to hold."""
    return wanted if data.kind != "segmentation" else max(1, min(wanted, MOST_PIXELS // data.train.targets[0].numel()))


def _some(examples: Examples, most: int | None) -> Examples:
    """A sample of a held-out set, the same for every seed, so that runs are compared on the same examples."""
    if most is None or most >= len(examples):
        return examples
    chosen = generator(0, "evaluated examples").choice(len(examples), most, replace=False)
    return examples.take(np.sort(chosen))


def _try_out(problem: Problem, name: str) -> None:
    """Refuse a model that cannot take these data, before anything is written."""
    if isinstance(problem.model, CharacterNetwork):
        _check_tokens(problem, name, problem.model.embedding.num_embeddings)
    two = problem.held_out["test"].take(torch.arange(min(2, len(problem.held_out["test"])), device=problem.device))
    weights, buffers, integers = problem.initial()
    what = f"{problem.data.name}, whose inputs are {str(two.inputs.dtype).removeprefix('torch.')} of shape {problem.data.input_shape}"
    try:
        with torch.random.fork_rng(devices=[]):
            output = problem.predicted(weights, {**problem.buffers.views(buffers), **integers}, two.inputs)
    except (RuntimeError, ValueError, IndexError) as error:
        raise UserError(f"{name} cannot be used on {what}: {str(error).splitlines()[0]}") from error
    expected = _expected_output(problem.task, two)
    if expected is None:
        return
    if not isinstance(output, torch.Tensor):
        raise UserError(f"{name} gives a {type(output).__name__}; expected a tensor with a row for each example")
    dimensions, axis, where = expected
    fits = output.ndim in dimensions and len(output) == len(two) and output.shape[axis] >= problem.data.num_classes
    if not fits or (axis == 1 and output.shape[2:] != two.targets.shape[1:]):
        raise UserError(
            f"{name} gives an output of shape {tuple(output.shape[1:])} for each example, "
            f"but {problem.data.name} has {problem.data.num_classes} classes; expected a number for each of them{where}"
        )


def _check_tokens(problem: Problem, name: str, known: int) -> None:
    """Refuse tokens that a text model does not know; two examples need not hold one."""
    for examples in (problem.data.train, *problem.held_out.values()):
        lowest, highest = (int(token) for token in torch.aminmax(examples.inputs))
        if lowest < 0 or highest >= known:
            raise UserError(
                f"{problem.data.name} has the token {lowest if lowest < 0 else highest}, and {name} knows those from 0 to {known - 1}, "
                "one for each class; number tokens so, or name all classes"
            )


def _expected_output(task: Task, examples: Examples) -> tuple[tuple[int, ...], int, str] | None:
    """How many dimensions a known task's output may have, which of them is the classes, and where they are told apart."""
    if isinstance(task, Segmentation):
        return (
            (4,),
            1,
            f" at each of {'x'.join(map(str, examples.targets.shape[1:]))} pixels: choose a model for segmentation (bisenetv2)",
        )
    if isinstance(task, NextCharacter):
        return (2, 3), -1, ""
    return ((2,), -1, "") if isinstance(task, Classification) else None


def device_of(config: Config) -> torch.device:
    """The device that a config asks for; also sets whether float32 arithmetic there may be rounded to TF32."""
    if config.engine.name == "ray":
        return torch.device("cpu")  # of the process that runs the experiment: workers have devices of their own
    wanted = config.engine.device
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UserError("engine.device=cuda was asked for, but torch sees no GPU here; use engine.device=cpu")
    if wanted == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    allow_tf32(config.engine.precision == "tf32")
    torch.backends.cudnn.benchmark = True
    return torch.device("cuda")


def custom(config: Config, data: Dataset | None, model: nn.Module | None) -> Config:
    """A config that says which parts are the user's own."""
    if model is not None:
        config = config.model_copy(update={"model": f"{CUSTOM}:{type(model).__name__}"})
    if data is not None:
        config = config.model_copy(update={"data": config.data.model_copy(update={"name": f"{CUSTOM}:{data.name}"})})
    return config
