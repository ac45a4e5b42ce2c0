"""What every division of a dataset among clients keeps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from fedflat.testing.broken import Broken

Splitting = Callable[[npt.NDArray[np.int64], int, int], Sequence[npt.NDArray[np.int64]]]
"""(labels, clients, seed) to the positions of each client's examples."""


def check_partition(
    divide: Splitting, *, examples: int = 600, classes: int = 10, clients: int = 12, covers: bool = True
) -> list[str]:
    """Check a partition of your own, and return the names of what it keeps; with ``covers=False`` it may leave examples out.

    >>> def stripes(labels, clients, seed):
    ...     order = np.random.default_rng(seed).permutation(len(labels))
    ...     return [order[i::clients] for i in range(clients)]
    >>> check_split(stripes)[0]
    'as many clients as asked for'
    """
    labels = np.arange(examples, dtype=np.int64) % classes
    name = getattr(divide, "__name__", "the partition")
    before = labels.copy()
    found, again, other = (list(divide(labels, clients, seed)) for seed in (0, 0, 1))
    kept: list[str] = []

    def hold(identity: str, holds: bool, how: str) -> None:
        if not holds:
            raise Broken(name, identity, how)
        kept.append(identity)

    hold("as many clients as asked for", len(found) == clients, f"{len(found)} instead of {clients}")
    empty = [number for number, positions in enumerate(found) if not len(positions)]
    hold("no client is empty", not empty, f"clients {empty[:5]} have no examples")
    every = np.concatenate([np.asarray(positions) for positions in found])
    hold(
        "positions lie in the data",
        bool(every.min() >= 0 and every.max() < examples),
        f"{every.min()} to {every.max()} of {examples}",
    )
    twice = len(every) - len(np.unique(every))
    hold("no example is given out twice", not twice, f"{twice} are")
    if covers:
        hold(
            "every example is given out",
            len(np.unique(every)) == examples,
            f"{examples - len(np.unique(every))} of {examples} are not",
        )
    same = all(np.array_equal(one, two) for one, two in zip(found, again, strict=True))
    hold("the same seed gives the same partition", same, "two calls with seed 0 differ")
    differs = any(not np.array_equal(np.sort(one), np.sort(two)) for one, two in zip(found, other, strict=False))
    hold("another seed gives another partition", differs, "seeds 0 and 1 give the same")
    hold("labels are left as they are", np.array_equal(labels, before), "they were changed in place")
    return kept
