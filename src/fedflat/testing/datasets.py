"""What a dataset must keep so that runs on it can be compared and repeated."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor, nn

from fedflat.data import IGNORED, Dataset, Examples, make_partition, normalise
from fedflat.data.arrays import channel_statistics
from fedflat.testing.broken import Broken

NEAR = 0.05
"""How far a channel's mean and deviation may be from those of the training pixels, on the scale from 0 to 1."""
LOOKED_AT, MOST_NUMBERS = 256, 1000
"""Training examples, and numbers of each, on which it is tried whether anything can be learnt."""
DEALT, STEPS = 19, 50
"""Labels without a meaning beat those of the data in one of twenty cases."""


def check_dataset(data: Dataset | Callable[[], Dataset], *, linear: bool = True) -> list[str]:
    """Check a dataset of your own, or the function that reads it, and return the names of what it keeps.

    With ``linear=False`` it is not asked whether a linear model can learn something.

    >>> from fedflat.data import from_arrays
    >>> labels = np.arange(90) % 3
    >>> inputs = np.random.default_rng(0).normal(size=(90, 4)) + labels[:, None]
    >>> check_dataset(from_arrays(inputs[:60], labels[:60], inputs[60:], labels[60:]))[0]
    'no training example is in the test set'
    """
    made = data if isinstance(data, Dataset) else data()
    kept: list[str] = []
    for identity, how in _checks(made, data, linear):
        if how:
            raise Broken(made.name, identity, how)
        kept.append(identity)
    return kept


def _checks(data: Dataset, source: Dataset | Callable[[], Dataset], linear: bool) -> Iterator[tuple[str, str]]:
    both = _hashes(data.train) & _hashes(data.test)
    yield "no training example is in the test set", f"{len(both)} of {len(data.test)} inputs are" if both else ""
    trained, tested = (_classes(part.targets, data.num_classes) for part in (data.train, data.test))
    absent = [data.classes[label] for label in range(data.num_classes) if label not in trained]
    yield "every class has training examples", f"{', '.join(absent[:5])} has none" if absent else ""
    unknown = sorted(tested - trained)
    yield (
        "what is tested can be learnt",
        f"class {data.classes[unknown[0]]} is in the test set alone" if unknown else "",
    )
    if data.train.inputs.dtype == torch.uint8:
        yield "mean and std are those of the training pixels", _statistics(data)
    if data.train.groups is not None:
        yield "every natural client has examples", _groups(data.train.groups)
    yield "it can be divided", _divided(data)
    if linear and data.kind in ("image", "vector") and len(trained) > 1:
        yield "inputs carry the labels", _learnt(data)
    if not isinstance(source, Dataset):
        yield (
            "reading it again gives the same",
            "" if source().content == data.content else "the contents of two readings differ",
        )


def _hashes(examples: Examples) -> set[bytes]:
    return {hashlib.blake2b(row.numpy().tobytes(), digest_size=16).digest() for row in examples.inputs}


def _classes(targets: Tensor, classes: int) -> set[int]:
    return {int(label) for label in np.unique(targets) if int(label) != IGNORED or classes > IGNORED}


def _statistics(data: Dataset) -> str:
    for name, said, found in zip(
        ("mean", "std"), (data.mean, data.std), channel_statistics(data.train.inputs), strict=True
    ):
        apart = max(abs(one - other) for one, other in zip(said, found, strict=True))
        if apart > NEAR:
            return f"{name} is {_shown(said)}, but the pixels have {_shown(found)} (on the scale from 0 to 1)"
    return ""


def _shown(values: tuple[float, ...]) -> str:
    return ", ".join(f"{value:.3f}" for value in values)


def _groups(groups: Tensor) -> str:
    sizes = np.bincount(groups.numpy()) if int(groups.min()) >= 0 else np.zeros(1)
    empty = np.flatnonzero(sizes == 0)
    return f"client {empty[0]} has none; number them 0, 1, ... without gaps" if len(empty) else ""


def _divided(data: Dataset) -> str:
    train = data.train
    for text in ["iid", *(["natural"] if train.groups is not None else [])]:
        clients = None if text == "natural" else min(10, len(train))
        partition = make_partition(text, train.targets, data.num_classes, clients, 0, groups=train.groups)
        given = sum(map(len, partition.clients))
        if given != len(train):
            return f"{text} gives out {given} of {len(train)} examples"
    return ""


def _learnt(data: Dataset) -> str:
    """Whether a linear model fits some of its inputs better with their labels than with the same labels dealt out at random."""
    some = np.unique(np.linspace(0, len(data.train) - 1, LOOKED_AT).astype(np.int64))
    mean, std = (torch.tensor(values) for values in (data.mean, data.std))
    inputs = normalise(data.train.inputs[torch.from_numpy(some)], mean, std, torch.float32).flatten(1)
    inputs, targets = inputs[:, :: -(-inputs.shape[1] // MOST_NUMBERS)], data.train.targets[some]
    draw = np.random.default_rng(0)
    dealt = min(_fitted(inputs, targets[draw.permutation(len(targets))], data.num_classes) for _ in range(DEALT))
    own = _fitted(inputs, targets, data.num_classes)
    if own < dealt:
        return ""
    return f"a linear model fits labels dealt out at random as well (loss {dealt:.3g}, own {own:.3g}); are both in the same order?"


@torch.no_grad()
def _fitted(inputs: Tensor, targets: Tensor, classes: int) -> float:
    """The loss of a linear model after some steps of gradient descent, of a length that cannot overshoot."""
    inputs = torch.cat([inputs, torch.ones(len(inputs), 1)], 1)
    weights, wanted = torch.zeros(inputs.shape[1], classes), nn.functional.one_hot(targets, classes)
    lr = 2 * len(inputs) / float(torch.linalg.matrix_norm(inputs, 2)) ** 2
    for _ in range(STEPS):
        weights -= lr * inputs.T @ ((inputs @ weights).softmax(1) - wanted) / len(inputs)
    return float(nn.functional.cross_entropy(inputs @ weights, targets))
