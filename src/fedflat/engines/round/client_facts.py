"""Facts about a client that some algorithms need: gradients at the model from which it starts, and label counts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import ceil
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from fedflat.algorithms.slot import Pilot
from fedflat.algorithms.state import State
from fedflat.data.batches import Batch
from fedflat.engines.problem.problem import Problem
from fedflat.engines.round.cohort_buffers import CohortBuffers
from fedflat.engines.round.contract import ClientRound, Cost, Training
from fedflat.errors import UserError
from fedflat.flatness.precision import at_own_precision
from fedflat.randomness import generator, seed_torch

BATCH_TOO_SMALL = "Expected more than 1 value per channel"
"""torch's error for a batch that BatchNorm cannot normalise."""
_HOST_TARGETS: WeakKeyDictionary[Problem, np.ndarray] = WeakKeyDictionary()
"""Targets of the training examples of each problem in the host's memory, which can be read without waiting for a GPU.
"""


@contextmanager
def explain_small_batches(client_round: ClientRound, setting: str = "training.batch_size") -> Iterator[None]:
    """Raise a ``UserError`` if BatchNorm cannot normalise a client's batch because it has a single example.

    ``setting`` is the setting of the batch size.
    """
    try:
        yield
    except ValueError as error:
        if BATCH_TOO_SMALL not in str(error):
            raise
        client, examples = client_round.client, len(client_round.indices)
        if examples == 1:
            raise UserError(
                f"client {client} has one example, which BatchNorm cannot normalise; choose a partition with at least "
                "two examples per client or another normalisation, e.g. norm=group"
            ) from None
        raise UserError(
            f"client {client} has {examples} examples, so one of its batches has a single example, which BatchNorm "
            f"cannot normalise; choose another {setting} or another normalisation, e.g. norm=group"
        ) from None


def full_gradient_positions(training: Training, client_round: ClientRound) -> np.ndarray:
    """The positions of the examples that ``full_gradient`` uses: all of the client's, or a random part of them."""
    max_batches = training.algorithm.drift.full_gradient_batches
    if not max_batches:  # no limit
        return client_round.indices
    round, client, indices = client_round
    order = generator(training.seed, "whole gradient", round, client).permutation(len(indices))
    return indices[order[: max_batches * training.plan.batch_size]]


def pilot_positions(training: Training, client_round: ClientRound) -> list[np.ndarray]:
    """The positions of the examples in each batch of ``pilot_gradients``; a client with few examples has fewer."""
    (round, client, indices), size = client_round, training.plan.batch_size
    count = training.algorithm.perturbation.pilot_batches
    if not count:
        return []
    order = generator(training.seed, "pilot", round, client).permutation(len(indices))[: count * size]
    if len(order) > size:
        order = order[: len(order) // size * size]  # BatchNorm needs more than the one example that may be left over
    return np.split(indices[order], range(size, len(order), size))


@at_own_precision
def full_gradient(
    problem: Problem, training: Training, cohort_buffers: CohortBuffers, row: int, client_round: ClientRound
) -> tuple[Tensor, Cost]:
    """The gradient of a client's whole dataset at the model from which it starts, without augmentation.

    If the drift limits the number of batches, the gradient uses a random part of the dataset. ``cohort_buffers`` is
    left unchanged; the client has row ``row``.

    Returns:
        The gradient [parameters] and its cost. Backward passes are counted as if batches had the size used in training.
    """
    indices = full_gradient_positions(training, client_round)
    size = len(indices)
    point = training.algorithm.local_start(cohort_buffers.z, cohort_buffers.client_state(row))
    mean = torch.zeros_like(point)
    problem.set_training_mode()
    for start in range(0, size, problem.evaluation_batch):
        positions = indices[start : start + problem.evaluation_batch]
        with explain_small_batches(client_round, "evaluation.batch_size"):
            gradient = _gradient(problem, cohort_buffers, row, point, positions)
        mean.add_(gradient, alpha=len(positions) / size)
    return mean, Cost(backward_passes=ceil(size / training.plan.batch_size), samples=size)


def pilot_gradients(
    problem: Problem, training: Training, cohort_buffers: CohortBuffers, row: int, client_round: ClientRound
) -> tuple[Pilot | None, Cost]:
    """Gradients of a few random batches of a client at the model from which it starts, without augmentation.

    The algorithm's perturbation says how many batches are needed. ``cohort_buffers`` is left unchanged; the client has
    row ``row``.

    Returns:
        Mean and mean norm of the gradients, or None if the perturbation does not need them; and their cost.
    """
    batches = pilot_positions(training, client_round)
    if not batches:
        return None, Cost()
    seed_torch(training.seed, "pilot", client_round.round, client_round.client)  # for dropout
    point = training.algorithm.local_start(cohort_buffers.z, cohort_buffers.client_state(row))
    mean, norm = torch.zeros_like(point), point.new_zeros(())
    problem.set_training_mode()
    for positions in batches:
        with explain_small_batches(client_round):
            gradient = _gradient(problem, cohort_buffers, row, point, positions)
        mean.add_(gradient, alpha=1 / len(batches))
        norm.add_(gradient.norm(), alpha=1 / len(batches))
    return Pilot(mean, norm), Cost(backward_passes=len(batches), samples=sum(map(len, batches)))


def _gradient(
    problem: Problem, cohort_buffers: CohortBuffers, row: int, point: Tensor, positions: np.ndarray
) -> Tensor:
    """The gradient at ``point`` of the training examples at ``positions``, with a copy of the client's statistics."""
    examples = problem.train_examples(positions)
    buffers = {name: b.clone() for name, b in problem.buffer_layout.views(cohort_buffers.statistics[row]).items()}
    batch = Batch(problem.normalised(examples.inputs), examples.targets)
    return problem.loss_and_gradient(point, buffers, batch)[1]


def label_scalars(problem: Problem, training: Training, indices: np.ndarray) -> State:
    """The scalars that the client weights compute from a client's labels, by name; empty unless they need labels.

    ``indices`` are the int64 positions of the client's examples in the training set [examples].
    """
    weights = training.algorithm.weights
    if not weights.needs_labels:
        return {}
    if problem not in _HOST_TARGETS:
        _HOST_TARGETS[problem] = problem.data.train.targets.cpu().numpy()
    counts = np.bincount(_HOST_TARGETS[problem][indices], minlength=problem.data.num_classes)
    scalars = weights.measure(torch.from_numpy(counts).to(problem.dtype))
    # A fill, unlike a copy, does not wait for the device.
    return {name: torch.full_like(value, float(value), device=problem.device) for name, value in scalars.items()}
