"""What must be known of the labels before anything is divided."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from fedflat.data.partitioners.partitioner import IntArray
from fedflat.data.partitioners.recipe import Recipe
from fedflat.errors import UserError


def one_label_each(targets: IntArray, num_classes: int, recipe: Recipe) -> tuple[IntArray, int]:
    """One label per example and how many classes there are; sequences of labels count as one class, where no label is looked at."""
    if targets.ndim == 1:
        return targets.astype(np.int64), num_classes
    if recipe.partitioner.by_label or recipe.longtail:
        raise UserError(
            f"partition {recipe.text} needs one label per example, but here each has {targets[0].size}; choose iid, natural or centralised"
        )
    return np.zeros(len(targets), dtype=np.int64), 1


def class_counter(targets: torch.Tensor | IntArray, num_classes: int) -> Callable[[IntArray], IntArray]:
    """A function that says how often each class occurs in the examples at some positions.

    Masks are counted one by one and once only, since all of them together may be larger than memory; ids beyond the classes are ignored.
    """
    labels = np.asarray(targets)
    if labels.ndim < 3:
        return lambda rows: np.bincount(labels[rows].ravel(), minlength=num_classes)
    each = np.stack([np.bincount(mask.ravel(), minlength=num_classes)[:num_classes] for mask in labels])
    return lambda rows: each[rows].sum(0)


def coarse_of_class(labels: IntArray, coarse: IntArray, num_classes: int) -> IntArray:
    """The superclass of each class, numbered from 0, and -1 for classes that do not occur."""
    numbers = np.unique(coarse, return_inverse=True)[1]
    of_class = np.full(num_classes, -1)
    of_class[labels] = numbers
    wrong = of_class[labels] != numbers
    if wrong.any():
        raise UserError(
            f"class {labels[wrong.argmax()]} has examples of two coarse labels; expected every class to lie within one"
        )
    return of_class


def held_out_share(labels: IntArray, share: float, rng: np.random.Generator) -> IntArray:
    """A share of every class, to the nearest whole number, drawn at random."""
    if not 0 <= share < 1:
        raise UserError(f"the share held out for validation must be at least 0 and below 1, not {share}")
    shuffled = [rng.permutation(np.flatnonzero(labels == label)) for label in np.unique(labels)]
    return (
        np.sort(np.concatenate([members[: round(share * len(members))] for members in shuffled]))
        if shuffled
        else labels
    )
