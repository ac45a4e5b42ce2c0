"""What some algorithms need to know about a client: gradients of a few of its batches, and its label counts."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from fedflat.algorithms.slot import Pilot
from fedflat.algorithms.state import State
from fedflat.data.batches import Batch
from fedflat.engines.problem.problem import Problem
from fedflat.engines.round.contract import Cost, Training
from fedflat.randomness import generator, seed_torch

_HOST_TARGETS: WeakKeyDictionary[Problem, np.ndarray] = WeakKeyDictionary()
"""Targets of the training examples of each problem in the host's memory, which can be read without waiting for a GPU.
"""


def pilot_gradients(
    problem: Problem,
    training: Training,
    point: Tensor,
    statistics: Tensor,
    round: int,
    client: int,
    indices: np.ndarray,
) -> tuple[Pilot | None, Cost]:
    """Gradients of a few random batches of a client at one model, without augmentation.

    Args:
        problem: model, task and data.
        training: how clients train; its algorithm's perturbation says how many batches are needed.
        point: the model [parameters].
        statistics: the client's BatchNorm statistics [buffers]; left unchanged.
        round: number of the round, from 0.
        client: the client's number in the federation.
        indices: int64 positions of its examples in the training set [examples].

    Returns:
        Mean and mean norm of the gradients, or None if the perturbation does not need them; and their cost. A client
        with few examples has fewer batches.
    """
    size, count = training.plan.batch_size, training.algorithm.perturbation.pilot_batches
    if not count:
        return None, Cost()
    order = generator(training.seed, "pilot", round, client).permutation(len(indices))[: count * size]
    if len(order) > size:
        order = order[: len(order) // size * size]  # BatchNorm needs more than the one example that may be left over
    batches = np.split(indices[order], range(size, len(order), size))
    seed_torch(training.seed, "pilot", round, client)  # for dropout
    mean, norm = torch.zeros_like(point), point.new_zeros(())
    problem.set_training_mode()
    for positions in batches:
        examples = problem.train_examples(positions)
        buffers = {name: b.clone() for name, b in problem.buffer_layout.views(statistics).items()}
        batch = Batch(problem.normalised(examples.inputs), examples.targets)
        _, gradient = problem.loss_and_gradient(point, buffers, batch)
        mean.add_(gradient, alpha=1 / len(batches))
        norm.add_(gradient.norm(), alpha=1 / len(batches))
    return Pilot(mean, norm), Cost(backward_passes=len(batches), samples=len(order))


def label_scalars(problem: Problem, training: Training, indices: np.ndarray) -> State:
    """What the client weights measure of a client's labels, by name; empty unless they need labels.

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
