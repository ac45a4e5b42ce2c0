"""Tasks: the training loss, the metrics, and their sums over batches.

Users may supply their own tasks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from fedflat.data import Dataset, Examples
from fedflat.engines.problem.objective import DistillationTask, divergence
from fedflat.errors import UserError, first_line

if TYPE_CHECKING:
    from fedflat.engines.problem.problem import Problem

Metrics = dict[str, float]
ERRORS = frozenset({"loss", "rmse", "mse", "mae", "perplexity"})
"""Metrics that are better if lower."""


@runtime_checkable
class Task(Protocol):
    """A loss to train on, and metrics that are means over examples.

    An optional attribute ``lower_is_better`` says whether lower values of the primary metric are better. Without it,
    lower values are assumed to be better only for the metrics ``loss``, ``rmse``, ``mse``, ``mae`` and ``perplexity``.
    An optional method ``weight(target)`` returns the weight of a batch in a mean of losses over batches, such as its
    number of tokens; by default, this is its number of examples.
    """

    @property
    def metric(self) -> str:
        """Name of the primary metric, by which models are compared."""
        ...

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the mean loss of a batch as a scalar tensor.

        Args:
            output: the model's output on the batch.
            target: the batch's targets; the first dimension is the batch.
        """
        ...

    def sums(self, output: Tensor, target: Tensor) -> dict[str, Tensor]:
        """Return the loss and every metric by name, summed (not averaged) over the examples of a batch."""
        ...


@runtime_checkable
class PooledTask(Task, Protocol):
    """A task with metrics that are not means over examples, such as intersection over union.

    The method ``sums`` may return tensors of any shape. They are added over batches, and ``finish`` computes the
    metrics from the totals. An optional method ``by_class(totals)`` returns the metrics of each class that occurs, by
    its number; ``examples`` is the number of examples with the class. By default, ``sums`` and ``finish`` are applied
    to the examples of each class.
    """

    def finish(self, totals: Mapping[str, Tensor], count: int) -> dict[str, float]:
        """Return the loss and every metric by name, computed from the sums over ``count`` examples."""
        ...


@dataclass(frozen=True)
class Classification:
    """Cross-entropy loss and accuracy. Outputs are logits [batch, classes], targets are labels [batch]."""

    metric: str = "accuracy"
    """Name of the primary metric, by which models are compared."""

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the mean cross-entropy of a batch."""
        return F.cross_entropy(output, target)

    def sums(self, output: Tensor, target: Tensor) -> dict[str, Tensor]:
        """Return the summed losses of a batch, and the number of correct predictions.

        If a subclass overrides ``loss``, its mean over the batch is multiplied by the batch size.
        """
        if type(self).loss is Classification.loss:
            loss = F.cross_entropy(output, target, reduction="sum")
        else:
            loss = self.loss(output, target) * len(target)
        return {"loss": loss, "accuracy": (output.argmax(1) == target).sum()}

    def distillation(self, output: Tensor, teacher_output: Tensor, target: Tensor, temperature: float) -> Tensor:
        """Return the mean KL divergence of a batch from the teacher's predictions."""
        return divergence(output, teacher_output, temperature).mean()


@dataclass(frozen=True)
class CustomLoss(Classification):
    """Classification with a user-supplied loss: a function (outputs, targets) -> mean over the batch."""

    function: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """The user's function applied to logits and targets.

        Raises ``UserError`` if the function fails, or if its result is not a scalar that can be differentiated.
        """
        if torch.compiler.is_compiling():  # compile only the function, not the checks
            return self.function(output, target)
        try:
            loss = self.function(output, target)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError, IndexError, TypeError, AttributeError) as error:
            shapes = f"{tuple(output.shape)} and {tuple(target.shape)}"
            raise UserError(f"the loss fails on outputs and targets of shapes {shapes}: {first_line(error)}") from error
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            kind = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise UserError(f"the loss of a batch is {kind}; expected a scalar tensor, the mean over the batch")
        if output.requires_grad and not loss.requires_grad:
            raise UserError("the loss has no gradient; do not use detach(), item() or torch.no_grad() in it")
        return loss


def lower_is_better(task: Task) -> bool:
    """Whether lower values of a task's primary metric are better: as the task says, or by the metric's name.

    >>> lower_is_better(Classification()), lower_is_better(Classification(metric="loss"))
    (False, True)
    """
    return bool(getattr(task, "lower_is_better", is_error(task.metric)))


TASK_TARGETS = {
    "classification": "classes",
    "f1": "classes",
    "perplexity": "classes",
    "exact_match": "classes",
    "mse": "numbers",
    "huber": "numbers",
    "bce": "labels",
}
"""Tasks by name, with the type of targets that each needs (``Dataset.target_type``)."""
TOKEN_TASKS = ("perplexity", "exact_match")
"""Tasks that need a class for each token, named after their primary metric."""
_TARGETS_IN_WORDS = {
    "classes": "classes: integers or words, one per example",
    "numbers": "numbers: floats [n] or [n, columns]",
    "labels": "labels: 0 or 1 for each, [n, labels]",
}


def with_targets_of(data: Dataset, name: str) -> Dataset:
    """Return ``data`` with the targets of the task ``name``: for regression, integer targets become real numbers."""
    return data.as_numbers() if TASK_TARGETS.get(name) == "numbers" and data.target_type == "classes" else data


def task_for(data: Dataset, name: str = "auto") -> Task:
    """The task of a dataset.

    Args:
        data: its targets and kind decide what ``auto`` means: numbers are regressed, labels predicted one by one, and
            classes predicted per example, token (``text``) or pixel (``segmentation``).
        name: ``auto``, or the name of a task; raises ``UserError`` if it does not suit the targets.
    """
    from fedflat.engines.problem.multilabel import MultiLabel
    from fedflat.engines.problem.regression import Huber, Regression
    from fedflat.engines.problem.segmentation import Segmentation
    from fedflat.engines.problem.text import F1Classification, TokenPrediction

    targets = data.target_type
    if name != "auto" and TASK_TARGETS[name] != targets:
        suitable = " or ".join(task for task, needed in TASK_TARGETS.items() if needed == targets)
        raise UserError(
            f"the task {name} needs {_TARGETS_IN_WORDS[TASK_TARGETS[name]]}, but the targets of {data.name} are "
            f"{_TARGETS_IN_WORDS[targets]}; use task {suitable}, or convert the targets"
        )
    if targets == "numbers":
        # Several columns have different units, so their metrics stay in standard deviations.
        scale = data.target_std[0] if len(data.target_std) == 1 else 1.0
        return Huber(scale=scale) if name == "huber" else Regression(scale=scale)
    if targets == "labels":
        return MultiLabel()
    per_token = data.kind == "text" and data.train.targets.ndim == 2
    if (name in TOKEN_TASKS and not per_token) or (name == "f1" and data.train.targets.ndim > 1):
        needed = "a class for each token of a text" if name in TOKEN_TASKS else "one class per example"
        raise UserError(f"the task {name} needs {needed}, which {data.name} does not have; use task auto")
    if data.kind == "segmentation":
        return Segmentation()
    if per_token:
        return TokenPrediction(metric=name if name in TOKEN_TASKS else "accuracy")
    if name == "f1":
        return F1Classification(metric="f1")
    return F1Classification() if data.kind == "text" else Classification()


def require_distillation(task: Task, algorithm: str) -> None:
    """Raise ``UserError`` if a task cannot compare a model with a teacher, as ``algorithm`` requires."""
    is_custom = isinstance(task, CustomLoss)  # its outputs may be anything
    if isinstance(task, DistillationTask) and not is_custom:
        return
    name = "a user-supplied loss" if is_custom else f"the task {type(task).__name__}"
    raise UserError(
        f"{algorithm} compares class probabilities with those of a teacher, but the outputs of {name} need not be "
        "logits of classes; use a built-in task for classes, add a method distillation(output, teacher_output, target, "
        "temperature) to your own task, or choose another algorithm"
    )


class Totals:
    """A task's sums over any number of batches, in float64. Only ``metrics`` waits for the device."""

    def __init__(self, task: Task) -> None:
        """Start with no examples; ``task`` turns sums into metrics."""
        self._task = task
        self.sums: dict[str, Tensor] = {}
        self.count = 0

    def add(self, sums: Mapping[str, Tensor], count: int) -> None:
        """Add the sums of a batch of ``count`` examples."""
        for name, value in sums.items():
            batch_sum = torch.as_tensor(value).double()
            self.sums[name] = self.sums[name] + batch_sum if name in self.sums else batch_sum
        self.count += count

    def merge(self, other: Totals) -> None:
        """Add everything that ``other`` has summed."""
        self.add(other.sums, other.count)

    def metric_tensors(self) -> dict[str, Tensor]:
        """The metrics as float64 tensors; waits for the device only if the task is a ``PooledTask``."""
        if isinstance(self._task, PooledTask):
            return {name: torch.tensor(value, dtype=torch.float64) for name, value in self.metrics().items()}
        return {name: value / self.count for name, value in self.sums.items()}

    def metrics(self) -> Metrics:
        """The metrics as numbers: means over examples, or the result of a ``PooledTask``'s ``finish``."""
        totals = {name: value.cpu() for name, value in self.sums.items()}
        if isinstance(self._task, PooledTask):
            return self._task.finish(totals, self.count)
        return {name: float(value) / self.count for name, value in totals.items()}


class EvaluationBatch(NamedTuple):
    """One batch to evaluate: index of the model, name of the set of examples, positions in it [batch]."""

    model: int
    examples: str
    positions: Tensor


def evaluation_plan(problem: Problem, models: int, examples: Mapping[str, Examples]) -> list[EvaluationBatch]:
    """All batches of an evaluation, in the order in which their sums must be added.

    Args:
        problem: decides how a set is divided into batches.
        models: number of models.
        examples: the sets to evaluate on, by name.
    """
    return [
        EvaluationBatch(model, name, positions)
        for model in range(models)
        for name, examples_of_set in examples.items()
        for positions in problem.evaluation_batches(len(examples_of_set))
    ]


def evaluation_result(
    task: Task,
    plan: Sequence[EvaluationBatch],
    sums: Sequence[Mapping[str, Tensor]],
    models: Sequence[str],
    examples: Collection[str],
) -> dict[str, dict[str, Metrics]]:
    """Metrics by model and set of examples: model -> set -> metric -> value.

    Args:
        task: turns sums into metrics.
        plan: the evaluated batches, from ``evaluation_plan``.
        sums: the task's sums over each batch of the plan, in the same order.
        models: names of the models.
        examples: names of the sets.
    """
    totals = {model: {name: Totals(task) for name in examples} for model in models}
    for batch, batch_sums in zip(plan, sums, strict=True):
        totals[models[batch.model]][batch.examples].add(batch_sums, len(batch.positions))
    return {model: {name: total.metrics() for name, total in sets.items()} for model, sets in totals.items()}


def added_means(totals: Mapping[str, Tensor], known: Collection[str], count: int) -> Metrics:
    """The means over ``count`` examples of the scalars that a subclass's ``sums`` adds to the ``known`` ones.

    >>> added_means({"squared": torch.ones(2), "late": torch.tensor(3.0)}, {"squared"}, count=4)
    {'late': 0.75}
    """
    return {name: float(total) / count for name, total in totals.items() if name not in known and total.ndim == 0}


def is_error(metric: str) -> bool:
    """Whether lower values of a metric are better, unless its task says otherwise.

    >>> is_error("rmse"), is_error("r2")
    (True, False)
    """
    return metric in ERRORS


def finite_or_none(value: Tensor | float) -> float | None:
    """A number for JSON: None if it is infinite or NaN."""
    number = float(value)
    return number if math.isfinite(number) else None


def finite_values(values: Tensor) -> list[float | None]:
    """A vector for JSON: None in place of infinite and NaN values."""
    return [finite_or_none(value) for value in values.tolist()]
