"""BatchNorm statistics for a server model whose clients keep their own (SiLoBN)."""

from __future__ import annotations

from math import ceil

import numpy as np
import torch
from torch import Tensor

from fedflat.engines.problem.problem import Problem, moved
from fedflat.engines.round.contract import ModelState


def with_statistics(problem: Problem, model: ModelState, positions: np.ndarray) -> ModelState:
    """With SiLoBN, the model with statistics estimated on training examples, so that its loss is well defined."""
    if not problem.batch_statistics or not len(model.buffers):
        return model
    return model._replace(buffers=estimated_on(problem, model, positions))


def estimated_on(problem: Problem, model: ModelState, positions: np.ndarray) -> Tensor:
    """BatchNorm statistics of a model on training examples, as flat buffers.

    Batches have equal sizes: they are weighted equally, and BatchNorm rejects a batch of one example.
    """
    train, whole = problem.data.train, torch.from_numpy(np.ascontiguousarray(positions, dtype=np.int64))
    parts = torch.tensor_split(whole, ceil(len(whole) / problem.evaluation_batch))
    batches = (
        problem.normalised(moved(train.take(part.to(train.targets.device)), problem.device).inputs) for part in parts
    )
    return problem.estimated_buffers(model.weights, model.integers, batches)
