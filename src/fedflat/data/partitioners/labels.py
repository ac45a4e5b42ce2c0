"""Operations on labels before a partition."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from fedflat.data.partitioners.partitioner import IntArray
from fedflat.errors import UserError


def class_counter(targets: torch.Tensor | IntArray, num_classes: int) -> Callable[[IntArray], IntArray]:
    """A function from positions to class counts [classes].

    Masks are counted once, one by one, since together they may exceed memory; ignored pixels are left out.
    """
    labels = np.asarray(targets)
    if labels.ndim < 3:
        return lambda rows: np.bincount(labels[rows].ravel(), minlength=num_classes)
    counts = np.stack([np.bincount(mask.ravel(), minlength=num_classes)[:num_classes] for mask in labels])
    return lambda rows: counts[rows].sum(0)


def coarse_of_class(labels: IntArray, coarse: IntArray, num_classes: int) -> IntArray:
    """Superclass of each class [classes], numbered from 0; -1 for classes without examples."""
    numbers = np.unique(coarse, return_inverse=True)[1]
    of_class = np.full(num_classes, -1)
    of_class[labels] = numbers
    wrong = of_class[labels] != numbers
    if wrong.any():
        raise UserError(f"class {labels[wrong.argmax()]} has examples of two coarse labels; expected one per class")
    return of_class


def validation_positions(labels: IntArray, share: float, rng: np.random.Generator) -> IntArray:
    """Sorted positions of a random ``share`` of every class, rounded to the nearest integer."""
    if not 0 <= share < 1:
        raise UserError(f"the validation share is {share}; expected at least 0 and below 1")
    shuffled = [rng.permutation(np.flatnonzero(labels == label)) for label in np.unique(labels)]
    if not shuffled:
        return labels
    return np.sort(np.concatenate([members[: round(share * len(members))] for members in shuffled]))
