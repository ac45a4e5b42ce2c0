"""BatchNorm statistics for a model that has none of its own: the server's, where clients keep theirs (SiLoBN)."""

from __future__ import annotations

import numpy as np
import torch

from fedflat.engines.contract import ModelState
from fedflat.engines.problem import Problem, moved


def with_statistics(problem: Problem, model: ModelState, positions: np.ndarray) -> ModelState:
    """The model, where clients keep their statistics with those estimated on training examples; the loss around it is then fixed."""
    if not problem.batch_statistics or not len(model.buffers):
        return model
    train = problem.data.train
    parts = torch.split(torch.from_numpy(np.ascontiguousarray(positions, dtype=np.int64)), problem.evaluation_batch)
    batches = (problem.normalised(moved(train.take(part.to(train.targets.device)), problem.device).inputs) for part in parts)
    return model._replace(buffers=problem.estimated_buffers(model.weights, model.integers, batches))
