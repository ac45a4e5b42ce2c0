"""Updates as they arrive: large ones wait on disk, and are summed one at a time, so memory does not grow with sites."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryFile

import numpy as np
from torch import Tensor

from fedflat.engines.round.cohort import WeightedRows
from fedflat.engines.round.contract import BLOCK, block_sum
from fedflat.experiment.store.files import explain_os_error

ALIGNMENT = 64
"""Arrays start at multiples of this number of bytes."""
LARGE = 2**16
"""Bytes from which an array waits on disk."""


def keep_on_disk(arrays: Mapping[str, np.ndarray], folder: Path) -> dict[str, np.ndarray]:
    """Return the arrays with large ones mapped from a file in a folder, which needs as much space.

    The file has no name, so it disappears with the arrays, even if the process is killed.
    """
    kept = dict(arrays)
    large = {name: array for name, array in arrays.items() if array.nbytes >= LARGE}
    if not large:
        return kept
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
            kept[name] = content.view(array.dtype).reshape(array.shape)
    return kept


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
