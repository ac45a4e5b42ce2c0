"""Builds the problem (data, network and task) and the partition of a config."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fedflat import data as datasets
from fedflat import models
from fedflat.algorithms import algorithm
from fedflat.data import Dataset, Examples, Partition
from fedflat.engines.problem.multilabel import MultiLabel
from fedflat.engines.problem.problem import Problem
from fedflat.engines.problem.regression import Regression
from fedflat.engines.problem.residuals import has_residuals
from fedflat.engines.problem.task import TASK_TARGETS, Classification, Task, task_for, with_targets_of
from fedflat.engines.problem.token_model import adapt
from fedflat.errors import UserError
from fedflat.experiment.config import Config
from fedflat.experiment.setup.problem_checks import check_network, check_own_task
from fedflat.experiment.setup.weights import load_weights
from fedflat.experiment.stopping import check_target
from fedflat.flatness.precision import gpu_has_tf32
from fedflat.randomness import exclusive_generator, generator, seed_torch
from fedflat.timing.policies import policy_spec

MAX_PIXELS = 2**23
"""Largest number of pixels per forward pass in evaluation: 194 CamVid (180x240) or 16 Cityscapes (512x1024) frames."""
CUSTOM = "custom"
"""Prefix, in a config, of the name of a user-supplied dataset or model."""


@contextmanager
def _float32_by_default() -> Iterator[None]:
    """Build models and data in float32 even if the user has changed torch's default dtype."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)


def build_network(
    config: Config, input_shape: tuple[int, ...], outputs: int, model: nn.Module | None = None
) -> nn.Module:
    """Build the network of a config, initialised with its seed.

    Args:
        config: the experiment.
        input_shape: shape of one example, without the batch dimension.
        outputs: number of outputs, e.g. of classes.
        model: a user-supplied network to copy instead of building ``config.model``.
    """
    parts = models.trained_parts(config.training.train)
    with exclusive_generator(), torch.random.fork_rng(devices=[]), _float32_by_default():
        seed_torch(config.seed, "weights")
        network = models.build(config.model, input_shape, outputs) if model is None else copy.deepcopy(model)
        _check_shapes(network, config.model)
        seed_torch(config.seed, "adapters")
        for part in parts:
            network = part.extend(network)  # adds adapters, such as LoRA, if the part is one
    network = adapt(network)
    if config.engine.precision == "float64":
        network = network.double()
    if config.init is not None:
        load_weights(network, config.model, config.init, fresh_head=config.init_head == "fresh")
    models.freeze(network, parts)
    if not any(parameter.requires_grad for parameter in network.parameters()):
        raise UserError(f"all parameters of {config.model} are frozen; let at least one require gradients")
    return network


def _check_shapes(network: nn.Module, name: str) -> None:
    """Reject a network with lazy parameters or buffers, which have no shape before the first forward pass."""
    for key, tensor in (*network.named_parameters(), *network.named_buffers()):
        if is_lazy(tensor):
            raise UserError(
                f"{key} of {name} has no shape yet (as in nn.LazyLinear); pass one batch through the model first"
            )


def build_problem(
    config: Config, data: Dataset | None = None, model: nn.Module | None = None, task: Task | None = None
) -> tuple[Problem, Partition]:
    """Build the problem (data, network and task) and the partition of a config.

    Args:
        config: the experiment.
        data, model, task: user-supplied objects that replace the config's.
    """
    for user_object, name, argument in ((data, config.data.dataset, "dataset"), (model, config.model, "model")):
        if user_object is None and is_user_supplied(name):
            raise UserError(
                f"this run used a user-supplied {argument} ({name}); pass it again: fedflat.resume(..., {argument}=...)"
            )
    if task is not None and config.training.task != "auto":
        raise UserError(
            f"training.task={config.training.task} and a user-defined task are both given; give one of them"
        )
    device = device_of(config)  # first, so that a missing GPU is reported before data are loaded
    data = load_data(config, data)
    has_own_task = task is not None
    task = task or task_for(data, config.training.task)
    _check_targets(task, data)
    _check_labels(config, data)
    partition = build_partition(config, data)
    clients, per_round = len(partition.clients), config.federation.clients_per_round
    is_centralised = datasets.canonical_partition(config.data.partition).startswith("centralised")
    if per_round > clients and not is_centralised:
        raise UserError(
            f"federation.clients_per_round={per_round} exceeds the partition's {clients} clients; "
            f"lower it: --clients-per-round {clients}, in Python clients_per_round={clients}"
        )
    network = build_network(config, data.input_shape, data.num_outputs, model)
    augmentation = datasets.augmentation(config.data.augmentation)
    augmentation.check(data)
    problem = Problem(
        network,
        task,
        data,
        augmentation,
        dtype=torch.float64 if config.engine.precision == "float64" else torch.float32,
        arithmetic=torch.bfloat16 if config.engine.precision == "bf16" else None,
        device=device,
        evaluation_batch=_evaluation_batch(config.evaluation.batch_size, data),
        evaluation_sets=_held_out_sets(data, partition, config.evaluation.examples),
        batch_statistics=config.training.statistics == "own",
        tf32=device.type == "cuda" and decide_precision(config).engine.precision == "tf32",
    )
    if has_residuals(problem):
        _check_exact_averages(config)
    if config.training.statistics == "own" and not problem.buffer_layout.names:
        warnings.warn(f"training.statistics=own has no effect: {config.model} has no BatchNorm layers", stacklevel=2)
    if any(isinstance(m, nn.modules.batchnorm._BatchNorm) and m.running_mean is None for m in network.modules()):
        warnings.warn(
            f"{config.model} has BatchNorm layers without running statistics, so test metrics depend on the test "
            "batches; use track_running_stats=True",
            stacklevel=2,
        )
    check_network(problem, config.model)
    if has_own_task:
        check_own_task(problem)
    return problem, partition


def _check_exact_averages(config: Config) -> None:
    """Raise a ``UserError`` if a setting prevents exact averages of adapters (``lora(exact=true)``)."""
    federation = config.federation
    conflicts = {
        "training.statistics=own": config.training.statistics == "own",
        "evaluation.statistics=estimated": config.evaluation.statistics == "estimated",
        f"federation.aggregation={federation.aggregation}": federation.aggregation != "mean",
        f"federation.policy={federation.policy}": policy_spec(federation.policy).is_asynchronous,
        f"federation.privacy={federation.privacy}": federation.privacy is not None,
    }
    for setting, is_set in conflicts.items():
        if is_set:
            raise UserError(
                f"lora(exact=true) does not work with {setting}; change it, or use lora(only_b=true), whose averages "
                "are exact, too"
            )


def load_data(config: Config, data: Dataset | None = None, download: bool = True) -> Dataset:
    """The dataset of a config, or the user-supplied one; for regression, integer targets become real numbers.

    Args:
        config: the experiment.
        data: a user-supplied dataset that replaces the config's.
        download: whether to download missing files.
    """
    if data is None:
        is_regression = TASK_TARGETS.get(config.training.task) == "numbers"
        with _float32_by_default():
            data = datasets.load(config.data.dataset, config.data.dir, download, numbers=is_regression)
    return with_targets_of(data, config.training.task)


def task_of(config: Config) -> Task:
    """The built-in task of a config; this loads the dataset, whose targets determine the task."""
    return task_for(load_data(config), config.training.task)


def _check_targets(task: Task, data: Dataset) -> None:
    """Raise a ``UserError`` if the task is, or derives from, a built-in task for another type of targets."""
    tasks = {"classes": Classification, "numbers": Regression, "labels": MultiLabel}
    suitable = tasks[data.target_type]
    for targets, unsuitable in tasks.items():
        if isinstance(task, unsuitable) and not isinstance(task, suitable):
            raise UserError(
                f"the task {type(task).__name__} predicts {targets}, but the targets of {data.name} are "
                f"{data.target_type}; use a task derived from fedflat.{suitable.__name__}"
            )


def _check_labels(config: Config, data: Dataset) -> None:
    """Raise a ``UserError`` if the algorithm needs the labels of examples, but these do not have one class each."""
    has_labels = data.target_type == "classes" and data.train.targets.ndim == 1
    if not has_labels and algorithm(config.algorithm).weights.needs_labels:
        raise UserError(
            f"{config.algorithm} weights clients by their labels, but the examples of {data.name} do not have one "
            "class each; use another algorithm, such as fedavg"
        )


def build_partition(config: Config, data: Dataset) -> Partition:
    """Distribute the training examples over clients."""
    settings = config.data
    partition_fixes_clients = datasets.fixes_clients(settings.partition)
    return datasets.make_partition(
        settings.partition,
        data.train.targets,
        data.num_classes,
        clients=None if partition_fixes_clients else settings.clients,
        seed=config.seed if settings.partition_seed is None else settings.partition_seed,
        validation=settings.validation,
        groups=data.train.groups,
        coarse=data.train.coarse,
    )


def check_new_run(config: Config, metric: str, partition: Partition) -> None:
    """Raise a ``UserError`` if the target is out of range or the partition has another number of clients than given.

    Args:
        config: the experiment; those of existing run folders are not checked, because they may store unused numbers.
        metric: name of the primary metric.
        partition: the config's partition.
    """
    if config.stop.target is not None:
        check_target(config.stop.target, metric)
    given_clients, clients = config.data.clients, len(partition.clients) + len(partition.unseen)
    if datasets.fixes_clients(config.data.partition) and given_clients not in (None, clients):
        raise UserError(
            f"data.clients={given_clients} contradicts the partition {config.data.partition}, which has {clients} "
            "clients on this dataset; leave it out or set it to null: --clients null, in Python clients=None"
        )


def _held_out_sets(data: Dataset, partition: Partition, limit: int | None) -> dict[str, Examples]:
    """The sets to evaluate on: test, validation and the data of held-out clients, at most ``limit`` examples each."""
    sets = {"test": data.test}
    if len(partition.validation):
        sets["validation"] = data.train.take(torch.from_numpy(partition.validation))
    if partition.unseen:
        sets["unseen"] = data.train.take(torch.from_numpy(np.concatenate(partition.unseen)))
    return {name: _sample(examples, limit) for name, examples in sets.items()}


def _sample(examples: Examples, limit: int | None) -> Examples:
    """At most ``limit`` of the examples, the same for every seed, so that runs with different seeds are comparable."""
    if limit is None or limit >= len(examples):
        return examples
    chosen = generator(0, "evaluated examples").choice(len(examples), limit, replace=False)
    return examples.take(np.sort(chosen))


def _evaluation_batch(batch_size: int, data: Dataset) -> int:
    """Examples per forward pass, limited for segmentation so that the masks fit into memory."""
    if data.kind != "segmentation":
        return batch_size
    pixels = data.train.targets[0].numel()
    return max(1, min(batch_size, MAX_PIXELS // pixels))


def decide_precision(config: Config, recorded: Config | None = None) -> Config:
    """Replace ``engine.precision=auto`` by tf32 if clients train on a GPU that has it, otherwise by float32.

    The decision depends only on the config and on the GPU. A run records it and keeps it when it is resumed. A Ray
    cluster with GPUs counts as having TF32; one of its GPUs that lacks TF32 computes in float32.

    Args:
        config: the experiment.
        recorded: the config that a resumed run recorded.
    """
    engine = config.engine
    if engine.precision != "auto":
        return config
    if recorded is not None and recorded.engine.precision in ("tf32", "float32"):
        precision = recorded.engine.precision
    elif engine.name == "ray":
        from fedflat.engines.ray.cluster import choose_device, connect

        device = choose_device(connect(engine.ray_address, engine.workers), engine.device)
        precision = "tf32" if device == "cuda" else "float32"
    else:
        uses_gpu = engine.device != "cpu" and torch.cuda.is_available()
        precision = "tf32" if uses_gpu and gpu_has_tf32() else "float32"
    return config.changed(engine={"precision": precision})


def device_of(config: Config) -> torch.device:
    """The device to train on; on a GPU, this also turns on cuDNN's autotuner."""
    if config.engine.name == "ray":
        return torch.device("cpu")  # of the driver; workers have their own devices
    device = config.engine.device
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("engine.device=cuda, but torch finds no GPU here; use engine.device=cpu")
    if device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    torch.backends.cudnn.benchmark = True
    return torch.device("cuda")


def is_user_supplied(name: str) -> bool:
    """Whether a config's dataset or model is a user-supplied object, which cannot be built from its name."""
    return name.partition(":")[0] == CUSTOM


def name_user_objects(config: Config, data: Dataset | None, model: nn.Module | None) -> Config:
    """Copy a config and put the names of the user-supplied dataset and model into it."""
    if model is not None:
        config = config.changed(model=f"{CUSTOM}:{type(model).__name__}")
    if data is not None:
        config = config.changed(data={"dataset": f"{CUSTOM}:{data.name}"})
    return config
