"""Arriving updates: their content, and how to keep and sum them.

Large ones wait on disk, and are summed one at a time, so that memory does not grow with the number of sites.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryFile

import numpy as np
import torch
from torch import Tensor

from fedflat.algorithms.algorithm import flat_fields
from fedflat.deploy.flower.wire import BUFFERS, DISPLACEMENT, INTEGERS
from fedflat.deploy.trust.inspection import LR_SUM, ArraySpec, Update
from fedflat.engines.problem.problem import Problem
from fedflat.engines.round.aggregation import BLOCK, block_sum
from fedflat.engines.round.client import ClientReport
from fedflat.engines.round.cohort import WeightedRows
from fedflat.engines.round.contract import Cost, Training
from fedflat.experiment.store.files import explain_os_error

ALIGNMENT = 64
"""Arrays start at multiples of this number of bytes."""
LARGE = 2**16
"""Bytes from which an array waits on disk."""


def keep_on_disk(arrays: Mapping[str, np.ndarray], folder: Path) -> dict[str, np.ndarray]:
    """Return the arrays, with large ones mapped from a file in ``folder``, which needs as much space.

    The file has no name, so it disappears with the arrays, even if the process is killed.
    """
    result = dict(arrays)
    large = {name: array for name, array in arrays.items() if array.nbytes >= LARGE}
    if not large:
        return result
    with explain_os_error(folder), TemporaryFile(dir=folder) as file:
        starts = {}
        for name, array in large.items():
            file.seek(-file.tell() % ALIGNMENT, os.SEEK_CUR)
            starts[name] = file.tell()
            file.write(np.ascontiguousarray(array).data)
        file.flush()
        # One mapping for all arrays, because each needs a file descriptor. Copy on write: torch warns of arrays that
        # it cannot write to.
        mapped = np.memmap(file, np.uint8, "c")
        for name, array in large.items():
            content = mapped[starts[name] : starts[name] + array.nbytes]
            result[name] = content.view(array.dtype).reshape(array.shape)
    return result


def sum_one_by_one(count: int, weighted: Callable[[int], WeightedRows]) -> dict[str, Tensor]:
    """Return weighted sums over clients, bit-identical to ``weighted_sum`` of all rows on a CPU.

    Each row is read again for each name, so that beside the results only one partial sum is in memory.

    Args:
        count: number of clients.
        weighted: returns the row [1, ...] and the weight [1] of a client for each name, given its position.
    """
    totals: dict[str, Tensor] = {}
    for start in range(0, count, BLOCK):
        for name in weighted(start):
            partial = block_sum(*weighted(start)[name])
            for position in range(start + 1, min(start + BLOCK, count)):
                partial += block_sum(*weighted(position)[name])
            # Starting from zero, as sum_of_blocks does, turns -0.0 into 0.0.
            totals[name] = totals[name].add_(partial) if name in totals else partial.add_(0.0)
    return totals


def expected_arrays(problem: Problem, training: Training) -> dict[str, ArraySpec]:
    """Return shape and dtype of every array that a client sends after training, by name."""
    size, dtype = problem.layout.size, torch.empty(0, dtype=problem.dtype).numpy().dtype
    specs = {DISPLACEMENT: ArraySpec((size,), dtype)}
    for name, field in flat_fields(training.algorithm.message_fields()).items():
        specs[name] = ArraySpec((size,) if field.vector else (), dtype)
    if not training.own_statistics:
        _, buffers, integer_buffers = problem.initial_state()
        if len(buffers):
            specs[BUFFERS] = ArraySpec((len(buffers),), dtype)
        for name, value in integer_buffers.items():
            specs[INTEGERS + name] = ArraySpec(tuple(value.shape), value.cpu().numpy().dtype)
    return specs


def total_gradient_cost(updates: Iterable[Update]) -> Cost:
    """Return the cost of the gradients that clients computed before training."""
    numbers = [update.numbers for update in updates]
    return Cost(sum(int(n["backward_passes"]) for n in numbers), sum(int(n["samples"]) for n in numbers))


def report_of(update: Update, device: torch.device) -> ClientReport:
    """Convert a received update to the report of a simulated client, with its integer buffers on ``device``."""
    numbers = update.numbers
    integer_buffers = {
        name.removeprefix(INTEGERS): torch.from_numpy(array).to(device)
        for name, array in update.arrays.items()
        if name.startswith(INTEGERS)
    }
    return ClientReport(
        numbers[LR_SUM],
        numbers["loss"],
        int(numbers["steps"]),
        int(numbers["backward_passes"]),
        int(numbers["samples"]),
        integer_buffers,
    )
