"""Client sizes, for partitioners that do not determine them."""

from __future__ import annotations

import numpy as np

from fedflat.data.partitioners.partitioner import IntArray

SIGMA_HELP = "standard deviation of the logarithm of client sizes; 0: equal sizes"


def equal_sizes(total: int, parts: int) -> IntArray:
    """``total`` as ``parts`` integers that differ by at most one, larger ones first.

    >>> equal_sizes(11, 4).tolist()
    [3, 3, 3, 2]
    """
    return total // parts + (np.arange(parts) < total % parts)


def client_sizes(total: int, parts: int, sigma: float, rng: np.random.Generator) -> IntArray:
    """``total`` as ``parts`` integers in proportion to exp(sigma * N(0, 1)) (Acar et al. 2021); equal for sigma = 0.

    Every client gets one example first, so none is empty; the rest is apportioned by largest remainders.
    """
    if sigma == 0:
        return equal_sizes(total, parts)
    logs = sigma * rng.standard_normal(parts)
    weights = np.exp(logs - logs.max())
    exact = (total - parts) * weights / weights.sum()
    sizes: IntArray = np.floor(exact).astype(np.int64) + 1
    by_remainder = np.argsort(np.floor(exact) - exact, kind="stable")
    sizes[by_remainder[: total - sizes.sum()]] += 1
    return sizes
