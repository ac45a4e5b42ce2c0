"""The loss that a backward pass differentiates, with or without the term of a teacher, and the result of a pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast, runtime_checkable

import torch.nn.functional as F
from torch import Tensor

from fedflat.algorithms.teacher import Teacher
from fedflat.data.batches import Batch

if TYPE_CHECKING:
    from fedflat.engines.problem.task import Task


class PassResult(NamedTuple):
    """Result of one forward and backward pass.

    ``gradient`` is [parameters] and ``loss`` a scalar. ``statistics`` [buffers] are the updated BatchNorm statistics.
    ``integer_buffers`` (by name) are the updated batch counters, without those that training does not change.
    """

    gradient: Tensor
    loss: Tensor
    statistics: Tensor
    integer_buffers: dict[str, Tensor]


@runtime_checkable
class DistillationTask(Protocol):
    """A task with a term that measures how far a model's predictions are from those of a teacher."""

    def distillation(self, output: Any, teacher_output: Any, target: Tensor, temperature: float) -> Tensor:
        """Return the mean term of a batch as a scalar tensor.

        Args:
            output: the model's output on the batch.
            teacher_output: the teacher's output on the same inputs.
            target: the batch's targets, in case some predictions do not count.
            temperature: divides the logits of both models.
        """
        ...


def divergence(logits: Tensor, teacher_logits: Tensor, temperature: float) -> Tensor:
    """KL(p_e, p_y) of each prediction, where p = softmax(logits / temperature) over dimension 1.

    Args:
        logits: logits of the model y [n, classes, ...].
        teacher_logits: logits of the teacher e, of the same shape.
        temperature: larger values make both distributions more uniform.

    Returns:
        The divergences [n, ...], without the dimension of the classes.

    >>> from torch import tensor
    >>> divergence(tensor([[0.0, 2.0], [1.0, 1.0]]), tensor([[1.0, 1.0], [1.0, 1.0]]), temperature=2.0)
    tensor([0.1201, 0.0000])
    """
    log_p, teacher_log_p = (F.log_softmax(each / temperature, 1) for each in (logits, teacher_logits))
    return F.kl_div(log_p, teacher_log_p, reduction="none", log_target=True).sum(1)


def batch_loss(task: Task, output: Any, batch: Batch) -> Tensor:
    """Mean loss of a batch; with mixup, the weighted mean of the losses for both targets."""
    loss = task.loss(output, batch.targets)
    if batch.mixed_targets is None:
        return loss
    return batch.share * loss + (1 - batch.share) * task.loss(output, batch.mixed_targets)


def distillation_loss(
    task: Task, loss: Tensor, output: Any, teacher_output: Any, batch: Batch, teacher: Teacher
) -> Tensor:
    """Return the loss plus the distillation term or, if ``teacher.with_loss`` is False, the term alone.

    Args:
        task: the task, a ``DistillationTask``.
        loss: mean loss of the batch, scalar.
        output: the model's output on the batch.
        teacher_output: the teacher's output on the batch.
        batch: the batch.
        teacher: temperature and weight of the term.
    """
    distillation = cast("DistillationTask", task).distillation
    term = teacher.weight * distillation(output, teacher_output, batch.targets, teacher.temperature)
    return loss + term if teacher.with_loss else term
