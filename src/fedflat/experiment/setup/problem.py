"""From a config to its problem (data, network and task) and partition."""

from __future__ import annotations

import copy
import warnings

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fedflat import data as datasets
from fedflat import models
from fedflat.data import Dataset, Examples, Partition
from fedflat.engines.problem.problem import Problem
from fedflat.engines.problem.segmentation import Segmentation
from fedflat.engines.problem.task import Classification, NextCharacter, Task, check_metric, task_for
from fedflat.engines.round.plan import generator, seed_torch
from fedflat.errors import UserError
from fedflat.experiment.config import Config
from fedflat.experiment.setup.weights import load_weights
from fedflat.flatness.precision import allow_tf32
from fedflat.models.lstm import CharacterNetwork


def network_of(config: Config, input_shape: tuple[int, ...], classes: int, model: nn.Module | None = None) -> nn.Module:
    """The network of a config, initialised with its seed.

    Args:
        config: the experiment.
        input_shape: shape of one example, without the batch dimension.
        classes: number of classes.
        model: a user-supplied network to copy instead of building ``config.model``.
    """
    parts = models.trained_parts(config.training.train)
    with torch.random.fork_rng(devices=[]):
        seed_torch(config.seed, "weights")
        network = models.build(config.model, input_shape, classes) if model is None else copy.deepcopy(model)
        _check_shapes(network, config.model)
        seed_torch(config.seed, "adapters")
        for part in parts:
            part.extend(network)
    if config.engine.precision == "float64":
        network = network.double()
    if config.init is not None:
        load_weights(network, config.model, config.init, fresh_head=config.init_head == "fresh")
    models.freeze(network, parts)
    if not any(parameter.requires_grad for parameter in network.parameters()):
        raise UserError(f"all parameters of {config.model} are frozen; let at least one require gradients")
    return network


def _check_shapes(network: nn.Module, name: str) -> None:
    tensors = (*network.named_parameters(), *network.named_buffers())
    lazy = next((key for key, tensor in tensors if is_lazy(tensor)), None)
    if lazy is not None:
        raise UserError(
            f"{lazy} of {name} has no shape yet (as in nn.LazyLinear); pass one batch through the model first"
        )


MOST_PIXELS = 2**23
"""Pixels per forward pass when evaluating segmentation: 194 CamVid (180x240) or 16 Cityscapes (512x1024) frames."""
CUSTOM = "custom"
"""Prefix, in a config, of the name of a user-supplied dataset or model."""


def federation(
    config: Config, data: Dataset | None = None, model: nn.Module | None = None, task: Task | None = None
) -> tuple[Problem, Partition]:
    """The problem and the partition of a config; a user-supplied dataset, model and task replace the config's."""
    for given, name, argument in ((data, config.data.dataset, "dataset"), (model, config.model, "model")):
        if given is None and name.partition(":")[0] == CUSTOM:
            raise UserError(
                f"this run used a user-supplied {argument} ({name}); pass it again: fedflat.resume(..., {argument}=...)"
            )
    if task is not None:
        check_metric(task)
    device = device_of(config)  # first, so that a missing GPU is reported before data are loaded
    data = datasets.load(config.data.dataset, config.data.dir) if data is None else data
    partition = datasets.make_partition(
        config.data.partition,
        data.train.targets,
        data.num_classes,
        None if datasets.fixes_clients(config.data.partition) else config.data.clients,
        config.seed if config.data.partition_seed is None else config.data.partition_seed,
        config.data.validation,
        data.train.groups,
        data.train.coarse,
    )
    clients, per_round = len(partition.clients), config.federation.clients_per_round
    if per_round > clients > 1:
        raise UserError(f"federation.clients_per_round={per_round} exceeds the partition's {clients} clients; lower it")
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
        held_out={name: _sample(examples, config.evaluation.examples) for name, examples in held_out.items()},
        batch_statistics=config.training.statistics == "own",
    )
    if config.training.statistics == "own" and not problem.buffers.names:
        warnings.warn(f"training.statistics=own has no effect: {config.model} has no BatchNorm layers", stacklevel=2)
    _check_model(problem, config.model)
    return problem, partition


def _evaluation_batch(wanted: int, data: Dataset) -> int:
    """Examples per forward pass, limited for segmentation so that the masks fit into memory."""
    return wanted if data.kind != "segmentation" else max(1, min(wanted, MOST_PIXELS // data.train.targets[0].numel()))


def _sample(examples: Examples, most: int | None) -> Examples:
    """At most ``most`` examples, the same for every seed, so that runs are compared on the same ones."""
    if most is None or most >= len(examples):
        return examples
    chosen = generator(0, "evaluated examples").choice(len(examples), most, replace=False)
    return examples.take(np.sort(chosen))


def _check_model(problem: Problem, name: str) -> None:
    """Reject a model that does not fit the data, before anything is written."""
    if isinstance(problem.model, CharacterNetwork):
        _check_tokens(problem, name, problem.model.embedding.num_embeddings)
    test = problem.held_out["test"]
    two = test.take(torch.arange(min(2, len(test)), device=problem.device))
    weights, buffers, integers = problem.initial()
    try:
        with torch.random.fork_rng(devices=[]):
            output = problem.predict(weights, {**problem.buffers.views(buffers), **integers}, two.inputs)
    except (RuntimeError, ValueError, IndexError) as error:
        inputs = f"{str(two.inputs.dtype).removeprefix('torch.')} inputs of shape {problem.data.input_shape}"
        raise UserError(
            f"{name} cannot be used on {problem.data.name}, which has {inputs}: {str(error).splitlines()[0]}"
        ) from error
    expected = _expected_output(problem.task, two)
    if expected is None:
        return
    if not isinstance(output, torch.Tensor):
        raise UserError(f"{name} returns a {type(output).__name__}; expected a tensor with one row per example")
    dimensions, axis, where = expected
    fits = output.ndim in dimensions and len(output) == len(two) and output.shape[axis] >= problem.data.num_classes
    if not fits or (axis == 1 and output.shape[2:] != two.targets.shape[1:]):
        raise UserError(
            f"{name} returns an output of shape {tuple(output.shape[1:])} per example, but {problem.data.name} has "
            f"{problem.data.num_classes} classes; expected one number per class{where}"
        )


def _check_tokens(problem: Problem, name: str, vocabulary: int) -> None:
    """Reject tokens outside a text model's vocabulary; the two examples tried out need not contain one."""
    for examples in (problem.data.train, *problem.held_out.values()):
        lowest, highest = (int(token) for token in torch.aminmax(examples.inputs))
        if lowest < 0 or highest >= vocabulary:
            raise UserError(
                f"{problem.data.name} contains the token {lowest if lowest < 0 else highest}, but {name} accepts 0 to "
                f"{vocabulary - 1}, one per class; renumber the tokens, or name all classes"
            )


def _expected_output(task: Task, examples: Examples) -> tuple[tuple[int, ...], int, str] | None:
    """For a built-in task: the valid numbers of output dimensions, the class dimension, and a hint for the message."""
    if isinstance(task, Segmentation):
        pixels = "x".join(map(str, examples.targets.shape[1:]))
        return (4,), 1, f" at each of {pixels} pixels: choose a segmentation model (bisenetv2)"
    if isinstance(task, NextCharacter):
        return (2, 3), -1, ""
    return ((2,), -1, "") if isinstance(task, Classification) else None


def device_of(config: Config) -> torch.device:
    """The device of a config; also sets whether float32 arithmetic may be rounded to TF32."""
    if config.engine.name == "ray":
        return torch.device("cpu")  # of the driver; workers have their own devices
    wanted = config.engine.device
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UserError("engine.device=cuda, but torch finds no GPU here; use engine.device=cpu")
    if wanted == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    allow_tf32(config.engine.precision == "tf32")
    torch.backends.cudnn.benchmark = True
    return torch.device("cuda")


def custom(config: Config, data: Dataset | None, model: nn.Module | None) -> Config:
    """A copy of a config that names the user-supplied dataset and model."""
    if model is not None:
        config = config.model_copy(update={"model": f"{CUSTOM}:{type(model).__name__}"})
    if data is not None:
        config = config.model_copy(update={"data": config.data.model_copy(update={"dataset": f"{CUSTOM}:{data.name}"})})
    return config
