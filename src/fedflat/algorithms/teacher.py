"""Distillation: a slot may add the mismatch between the client's model and a fixed teacher to the client's loss."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

from torch import Tensor


class Teacher(NamedTuple):
    """A fixed model whose predictions the client's model should match, and the term that measures the mismatch.

    The term is the mean over a batch of KL(p_e, p_y) with p = softmax(logits / temperature), for the client's model y
    and the teacher e, which receives no gradient. It costs one forward pass of the teacher.
    """

    model: Tensor
    """Weights of the teacher, shape (P,)."""
    temperature: float
    weight: float = 1.0
    """Weight of the term."""
    with_loss: bool = True
    """Whether the term is added to the loss; otherwise it replaces the loss."""


class BatchGradient(Protocol):
    """Computes gradients of the current batch; one backward pass per call."""

    def __call__(self, point: Tensor, teacher: Teacher | None = None) -> Tensor:
        """Return the gradient of the loss at ``point``, shape (P,); a ``teacher`` changes the loss by its term."""
        ...


def with_teacher(gradient: BatchGradient, teacher: Teacher | None) -> Callable[[Tensor], Tensor]:
    """Return ``gradient`` as a function of the point only, with the term of ``teacher`` if there is one.

    >>> import torch
    >>> def gradient(point, teacher=None):
    ...     return 2 * point if teacher is None else 2 * point + teacher.weight * (point - teacher.model)
    >>> with_teacher(gradient, Teacher(torch.tensor([1.0, 1.0]), temperature=1.0, weight=0.5))(torch.tensor([2.0, 3.0]))
    tensor([4.5000, 7.0000])
    """
    return gradient if teacher is None else partial(gradient, teacher=teacher)
