"""Checks of a problem before training: the network fits the data, and a user-supplied task follows its protocol."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from fedflat.data import Examples
from fedflat.display import counted
from fedflat.engines.problem.multilabel import MultiLabel
from fedflat.engines.problem.problem import Problem
from fedflat.engines.problem.regression import Regression
from fedflat.engines.problem.segmentation import Segmentation
from fedflat.engines.problem.task import Classification, PooledTask, Task
from fedflat.engines.problem.text import F1Classification, TokenPrediction
from fedflat.engines.problem.token_model import check_tokens, takes_keywords, vocabulary_size
from fedflat.errors import UserError, first_line
from fedflat.flatness.batches import map_tensors
from fedflat.randomness import exclusive_generator


def check_network(problem: Problem, name: str) -> None:
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
            check_network(replace(problem, arithmetic=None), name)  # raises if the precision is not the reason
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


def check_own_task(problem: Problem) -> None:
    """Reject a user-supplied task whose loss is no mean, or whose metrics cannot be added over batches."""
    _check_mean_loss(problem)
    _check_sums(problem)


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
            "the loss is a sum over the batch, so gradients would grow with the batch size; expected the mean over the "
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
