"""Builds the problem (data, network and task) and the partition of a config."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fedflat import data as datasets
from fedflat import models
from fedflat.algorithms import algorithm
from fedflat.data import Dataset, Examples, Partition
from fedflat.display import counted
from fedflat.engines.problem.multilabel import MultiLabel
from fedflat.engines.problem.problem import Problem
from fedflat.engines.problem.regression import Regression
from fedflat.engines.problem.residuals import has_residuals
from fedflat.engines.problem.segmentation import Segmentation
from fedflat.engines.problem.task import TASK_TARGETS, Classification, PooledTask, Task, task_for, with_targets_of
from fedflat.engines.problem.text import F1Classification, TokenPrediction
from fedflat.engines.problem.token_model import adapt, check_tokens, takes_keywords, vocabulary_size
from fedflat.errors import UserError, first_line
from fedflat.experiment.config import Config
from fedflat.experiment.setup.weights import load_weights
from fedflat.experiment.stopping import check_target
from fedflat.flatness.batches import map_tensors
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
    has_user_task, task = task is not None, task or task_for(data, config.training.task)
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
    _check_model(problem, config.model)
    if has_user_task:
        _check_mean_loss(problem)
        _check_sums(problem)
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


def _check_model(problem: Problem, name: str) -> None:
    """Reject a model that does not fit the data, by a forward pass over two test examples."""
    if vocabulary_size(problem.model) and problem.data.kind == "text":
        check_tokens(problem.model, name, problem.data, problem.evaluation_sets)
    data = problem.data
    if not problem.initial_state()[0].isfinite().all():
        raise UserError(f"the initial weights of {name} contain infinite or NaN values; initialise the model again")
    examples = _test_examples(problem)
    try:
        output = _initial_output(problem, examples)
    except torch.OutOfMemoryError:
        raise  # the model may fit the data
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        if problem.arithmetic is not None and isinstance(error, RuntimeError):
            _check_model(replace(problem, arithmetic=None), name)  # raises if the precision is not the reason
            raise UserError(
                f"{name} cannot be used in bf16: {first_line(error)}; use engine.precision=float32"
            ) from error
        dtype = str(examples.inputs.dtype).removeprefix("torch.")
        raise UserError(
            f"{name} cannot be used on {data.name}, which has {dtype} inputs of shape {data.input_shape}: "
            f"{first_line(error)}{'; models get one tensor of inputs' if isinstance(error, TypeError) else ''}"
        ) from error
    expected = _expected_output(problem.task, examples, problem.model)
    if expected is None:
        return
    if not isinstance(output, torch.Tensor):
        raise UserError(f"{name} returns a {type(output).__name__}; expected a tensor with one row per example")
    # For some tasks, the model may have more outputs than the dataset has classes.
    fits = (
        output.ndim in expected.dimensions
        and len(output) == len(examples)
        and (output.ndim == 1 or output.shape[expected.class_axis] >= data.num_outputs)
        and (not expected.exact or output[0].numel() == data.num_outputs)
        and (not expected.per_pixel or output.shape[2:] == examples.targets.shape[1:])
    )
    if not fits:
        raise UserError(
            f"{name} returns an output of shape {tuple(output.shape[1:])} per example, but {data.name} requires "
            f"{counted(data.num_outputs, 'number')}, one per {expected.noun}{expected.hint}"
        )


def _test_examples(problem: Problem) -> Examples:
    """Two test examples for checks."""
    test = problem.evaluation_sets["test"]
    return test.take(torch.arange(min(2, len(test)), device=problem.device))


def _initial_output(problem: Problem, examples: Examples) -> Any:
    """The output of the initial model on examples."""
    weights, buffers, integer_buffers = problem.initial_state()
    with exclusive_generator(), torch.random.fork_rng(devices=[]):
        all_buffers = {**problem.buffer_layout.views(buffers), **integer_buffers}
        return problem.predict(weights, all_buffers, examples.inputs)


def _check_sums(problem: Problem) -> None:
    """Reject a task whose ``sums`` cannot be added over batches."""
    examples, task = _test_examples(problem), problem.task
    try:
        with torch.no_grad():
            sums: Any = task.sums(_initial_output(problem, examples), examples.targets)
    except Exception:  # e.g. a metric that needs more examples; evaluation reports real errors
        return
    method = f"{type(task).__name__}.sums"
    if not isinstance(sums, Mapping):
        raise UserError(f"{method} returns a {type(sums).__name__}; expected a dictionary of tensors")
    pooled = isinstance(task, PooledTask)
    if not pooled and "loss" not in sums:
        raise UserError(f"{method} returns no loss; expected the sum over the batch of the loss and of every metric")
    for metric, value in sums.items():
        if not isinstance(value, torch.Tensor):
            raise UserError(f"{method} returns {metric} as a {type(value).__name__}; expected a tensor")
        if not pooled and value.numel() != 1:
            raise UserError(f"{method} returns {metric} of shape {tuple(value.shape)}; expected its sum over the batch")


def _check_mean_loss(problem: Problem) -> None:
    """Reject a task whose loss is a sum over the batch: it grows with the number of copies of a batch; a mean does not.

    The model is in training mode, in which it may return several outputs.
    """
    examples = problem.train_examples(np.arange(min(2, len(problem.data.train))))
    weights, buffers, integer_buffers = problem.initial_state()
    all_buffers = {**problem.buffer_layout.views(buffers), **integer_buffers}
    devices = [problem.device] if problem.device.type == "cuda" else []
    try:
        with torch.no_grad(), exclusive_generator(), torch.random.fork_rng(devices):
            problem.set_training_mode()
            output = problem.output(weights, all_buffers, problem.normalised(examples.inputs))
            # Three copies, because a contrastive loss such as log(batch size) also doubles from 2 to 4 examples.
            once, thrice = (
                float(problem.task.loss(_repeated(output, copies), _repeated(examples.targets, copies)))
                for copies in (1, 3)
            )
    except Exception:  # e.g. a loss that needs more examples; training reports real errors
        return
    if once and math.isclose(thrice, 3 * once, rel_tol=1e-3):
        raise UserError(
            "the loss is a sum over the batch, so steps would be longer in larger batches; expected the mean over the "
            "batch (reduction='mean')"
        )


def _repeated(value: Any, copies: int) -> Any:
    """Several copies of a batch, a tensor or a nested structure of tensors, as one batch; scalars stay as they are."""
    return map_tensors(value, lambda tensor: torch.cat([tensor] * copies) if tensor.ndim else tensor)


class _ExpectedOutput(NamedTuple):
    """The output that a task expects of a model."""

    dimensions: tuple[int, ...]
    """Valid numbers of dimensions, including the batch dimension."""
    class_axis: int = -1
    """Dimension with one number per class."""
    per_pixel: bool = False
    """Whether the output has the height and width of the masks."""
    exact: bool = False
    """Whether there must be exactly one number per class, label or column; otherwise there may be more."""
    noun: str = "class"
    """What each number stands for, for the error message."""
    hint: str = ""
    """End of the error message."""


def _expected_output(task: Task, examples: Examples, model: nn.Module) -> _ExpectedOutput | None:
    """The output that a built-in task expects of a model; None for a user-defined task."""
    if isinstance(task, Segmentation):
        pixels = "x".join(map(str, examples.targets.shape[1:]))
        hint = f" at each of {pixels} pixels: choose a segmentation model (bisenetv2)"
        return _ExpectedOutput(dimensions=(4,), class_axis=1, per_pixel=True, hint=hint)
    if isinstance(task, TokenPrediction):
        return _ExpectedOutput((3,), hint=" at each token; for a class per text, name the column of classes (target=)")
    if isinstance(task, F1Classification):
        if takes_keywords(model):  # the last position may be padding
            return _ExpectedOutput((2,), hint=": use a model with a classifier, e.g. hf(path=DIR,head=classes)")
        return _ExpectedOutput(dimensions=(2, 3))
    if isinstance(task, Regression):
        hint = " (float targets make a regression; for classification, use integer targets)"
        return _ExpectedOutput(dimensions=(1, 2), exact=True, noun="target column", hint=hint)
    if isinstance(task, MultiLabel):
        return _ExpectedOutput(dimensions=(2,), exact=True, noun="label")
    return _ExpectedOutput(dimensions=(2,)) if isinstance(task, Classification) else None


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
