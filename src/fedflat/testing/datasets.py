"""Properties that a dataset needs for comparable and reproducible runs."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from fedflat.data import IGNORED, Dataset, Examples, load, make_partition, normalise
from fedflat.data.batches import channel_statistics
from fedflat.data.hashing import row_blocks
from fedflat.errors import UserError
from fedflat.testing.broken import verify

TOLERANCE = 0.05
"""Largest allowed error of a channel's declared mean or standard deviation, for pixels from 0 to 1."""
MAX_EXAMPLES, MAX_FEATURES = 256, 1000
"""Maximum numbers of examples, and of features of an example, to which a linear model is fitted."""
SHUFFLES, STEPS = 19, 50
"""Number of random shuffles of the labels, and gradient steps per fit.

If labels did not depend on inputs, the true labels would still fit best of all 20 labelings in 1 of 20 cases.
"""


def check_dataset(data: str | Dataset | Callable[[], Dataset], *, linear: bool = True) -> list[str]:
    """Check a user-defined dataset.

    Args:
        data: the dataset, or its name or a function that loads it; loading is then checked to be deterministic.
        linear: also require that a linear model fits the true labels better than shuffled ones; only checked if every
            example has one class.

    Returns:
        The names of the verified properties.

    Raises:
        Broken: a property does not hold.
        UserError: ``data`` is or returns something else.

    >>> from fedflat.data import from_arrays
    >>> labels = np.arange(90) % 3
    >>> inputs = np.random.default_rng(0).normal(size=(90, 4)) + labels[:, None]
    >>> check_dataset(from_arrays(inputs[:60], labels[:60], inputs[60:], labels[60:]))[0]
    'no training example is in the test set'
    """
    source = partial(load, data) if isinstance(data, str) else data
    dataset = source() if callable(source) else source
    if not isinstance(dataset, Dataset):
        raise UserError(
            f"{dataset!r} is not a dataset; expected the name of a dataset, the result of "
            "fedflat.data.from_arrays, or a function that returns it"
        )
    return verify(dataset.name, _checks(dataset, source, linear))


def _checks(data: Dataset, source: Dataset | Callable[[], Dataset], linear: bool) -> Iterator[tuple[str, str]]:
    """Yield every applicable property with the reason why ``data`` violates it; the reason is empty if it holds.

    Args:
        data: the dataset to check.
        source: the function that loaded the dataset, which is called again, or the dataset itself if there is none.
        linear: whether to check that a linear model fits the true labels better than shuffled ones.
    """
    shared = _hashes(data.train) & _hashes(data.test)
    yield "no training example is in the test set", f"{len(shared)} of {len(data.test)} inputs are" if shared else ""
    train_classes, test_classes = (_classes(split.targets, data) for split in (data.train, data.test))
    absent = [data.classes[label] for label in range(data.num_classes) if label not in train_classes]
    yield "every class has training examples", f"none for {', '.join(absent[:5])}" if absent else ""
    unseen = sorted(test_classes - train_classes)
    reason = f"class {data.classes[unseen[0]]} occurs only in the test set" if unseen else ""
    yield "test classes occur in the training set", reason
    if data.train.inputs.dtype == torch.uint8:
        yield "mean and std match the training pixels", _wrong_statistics(data)
    if data.train.groups is not None:
        yield "every natural client has examples", _empty_group(data.train.groups)
    yield "it can be partitioned", _unassigned(data)
    if linear and data.kind in ("image", "vector") and data.target_type == "classes" and len(train_classes) > 1:
        yield "labels are predictable from inputs", _unpredictable_labels(data)
    if not isinstance(source, Dataset):
        reason = "" if source().content == data.content else "two loads have different contents"
        yield "loading is deterministic", reason


def _hashes(examples: Examples) -> set[bytes]:
    """Return the hashes of all inputs."""
    rows = (row for block in row_blocks(examples.inputs) for row in block)  # images may be decoded on access
    return {hashlib.blake2b(row.numpy().tobytes(), digest_size=16).digest() for row in rows}


def _classes(targets: Tensor, data: Dataset) -> set[int]:
    """Return the classes that occur in ``targets``; empty for regression.

    The value ``IGNORED`` marks unlabelled pixels. In a dataset with more classes than ``IGNORED``, it is a class.
    """
    if data.target_type == "numbers":
        return set()
    if data.target_type == "labels":
        return set(targets.any(0).nonzero().flatten().tolist())  # one column of targets per label
    labels = map(int, np.unique(targets))
    return {label for label in labels if label >= 0 and (label != IGNORED or data.num_classes > IGNORED)}


def _wrong_statistics(data: Dataset) -> str:
    """Return how the dataset's mean or std differs from that of the training pixels; empty if neither does."""
    mean, std = channel_statistics(data.train.inputs)
    for name, declared, actual in (("mean", data.mean, mean), ("std", data.std, std)):
        if not np.allclose(declared, actual, rtol=0, atol=TOLERANCE):
            declared_text = ", ".join(f"{value:.3f}" for value in declared)
            actual_text = ", ".join(f"{value:.3f}" for value in actual)
            return f"{name} is {declared_text}, but the pixels have {actual_text} (on the scale from 0 to 1)"
    return ""


def _empty_group(groups: Tensor) -> str:
    """Return a message with the first natural client that has no examples; empty if all have some.

    ``groups`` holds the number of the natural client of every example.
    """
    # Negative numbers are reported like a client 0 without examples.
    sizes = np.bincount(groups.numpy()) if int(groups.min()) >= 0 else np.zeros(1)
    empty = np.flatnonzero(sizes == 0)
    return f"client {empty[0]} has none; number clients 0, 1, ... without gaps" if len(empty) else ""


def _unassigned(data: Dataset) -> str:
    """Return a message if the partition ``iid`` or ``natural`` does not assign every training example; else empty."""
    train = data.train
    partitions: dict[str, int | None] = {"iid": min(10, len(train))}  # with the number of clients
    if train.groups is not None:
        partitions["natural"] = None  # one client per group
    for text, clients in partitions.items():
        partition = make_partition(text, train.targets, data.num_classes, clients, seed=0, groups=train.groups)
        assigned = sum(map(len, partition.clients))
        if assigned != len(train):
            return f"the partition {text} assigns {assigned} of {len(train)} examples"
    return ""


def _unpredictable_labels(data: Dataset) -> str:
    """Return a message if a linear model fits shuffled labels as well as the true ones; otherwise empty.

    The model is fitted to at most ``MAX_EXAMPLES`` evenly spaced examples and ``MAX_FEATURES`` of their features.
    """
    sample = np.unique(np.linspace(0, len(data.train) - 1, MAX_EXAMPLES).astype(np.int64))
    mean, std = torch.tensor(data.mean), torch.tensor(data.std)
    inputs = normalise(data.train.inputs[torch.from_numpy(sample)], mean, std, torch.float32).flatten(1)
    inputs = inputs[:, :: math.ceil(inputs.shape[1] / MAX_FEATURES)]
    targets = data.train.targets[sample]
    rng = np.random.default_rng(0)
    shuffled = min(
        _linear_loss(inputs, targets[rng.permutation(len(targets))], data.num_classes) for _ in range(SHUFFLES)
    )
    true = _linear_loss(inputs, targets, data.num_classes)
    if true < shuffled:
        return ""
    return (
        f"a linear model fits shuffled labels as well (loss {shuffled:.3g}, true labels {true:.3g}); "
        "are inputs and labels in the same order?"
    )


@torch.no_grad()
def _linear_loss(inputs: Tensor, targets: Tensor, classes: int) -> float:
    """Return the training loss of a linear classifier after ``STEPS`` gradient steps."""
    inputs = torch.cat([inputs, torch.ones(len(inputs), 1)], 1)  # the last feature is the bias
    weights, one_hot = torch.zeros(inputs.shape[1], classes), nn.functional.one_hot(targets, classes)
    # One over ||inputs||^2 / (2 n), a bound on the Hessian's largest eigenvalue, so that no step overshoots.
    lr = 2 * len(inputs) / float(torch.linalg.matrix_norm(inputs, 2)) ** 2
    for _ in range(STEPS):
        weights -= lr * inputs.T @ ((inputs @ weights).softmax(1) - one_hot) / len(inputs)
    return float(nn.functional.cross_entropy(inputs @ weights, targets))
