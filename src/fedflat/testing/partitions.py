"""Properties of every partition of a dataset among clients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from fedflat.data import fixes_clients, make_partition
from fedflat.errors import UserError
from fedflat.testing.broken import verify

PartitionFunction = Callable[[npt.NDArray[np.int64], int, int], Sequence[npt.NDArray[np.int64]]]
"""Maps labels of shape (n,), a number of clients and a seed to the example indices of each client."""


def check_partition(
    partition: str | PartitionFunction,
    *,
    examples: int = 600,
    classes: int = 10,
    clients: int = 12,
    covers: bool = True,
) -> list[str]:
    """Check a user-defined partition.

    Args:
        partition: function of labels, number of clients and seed, or the name of a partition with parameters, e.g.
            ``dirichlet(alpha=0.1)``.
        examples: number of examples n to partition.
        classes: number of classes among the labels.
        clients: number of clients.
        covers: require every example to be assigned.

    Returns:
        The names of the verified properties.

    Raises:
        Broken: a property does not hold.
        UserError: the partition is neither such a function nor a name, or determines the number of clients.

    >>> def stripes(labels, clients, seed):
    ...     order = np.random.default_rng(seed).permutation(len(labels))
    ...     return [order[i::clients] for i in range(clients)]
    >>> check_partition(stripes)[0]
    'the number of clients is as requested'
    """
    name = partition if isinstance(partition, str) else getattr(partition, "__name__", "the partition")
    if isinstance(partition, str):
        partition = _by_name(partition, classes)
    if not callable(partition):
        raise UserError(
            f"{partition!r} is not a partition; expected a function of labels, number of clients and "
            "seed, or a name such as 'dirichlet(alpha=0.1)'"
        )
    labels = np.arange(examples, dtype=np.int64) % classes
    checks = _checks(partition, labels, clients, covers)
    return verify(name, ((property_name, "" if holds else reason) for property_name, holds, reason in checks))


def _by_name(text: str, classes: int) -> PartitionFunction:
    """Return the function that a partition's name describes; held-out clients count as clients."""
    if fixes_clients(text):
        raise UserError(
            f"the partition {text} determines the number of clients; expected one that divides examples among any "
            "number of clients, such as dirichlet(alpha=0.1)"
        )

    def divide(labels: npt.NDArray[np.int64], clients: int, seed: int) -> Sequence[npt.NDArray[np.int64]]:
        made = make_partition(text, labels, classes, clients, seed)
        return [*made.clients, *made.unseen]

    return divide


def _checks(
    partition: PartitionFunction, labels: npt.NDArray[np.int64], clients: int, covers: bool
) -> Iterator[tuple[str, bool, str]]:
    """Yield every property, whether it holds, and the reason to report if it does not."""
    original_labels, examples = labels.copy(), len(labels)
    indices = list(partition(labels, clients, 0))
    repeated = list(partition(labels, clients, 0))
    other_seed = list(partition(labels, clients, 1))
    yield "the number of clients is as requested", len(indices) == clients, f"{len(indices)} instead of {clients}"
    empty = [client for client, rows in enumerate(indices) if not len(rows)]
    yield "no client is empty", not empty, f"clients {empty[:5]} have no examples"
    assigned = np.concatenate([np.asarray(rows) for rows in indices])
    low, high, distinct = assigned.min(), assigned.max(), len(np.unique(assigned))
    yield "indices are within the data", bool(low >= 0 and high < examples), f"{low} to {high} of {examples}"
    duplicates = len(assigned) - distinct
    yield "no example is assigned twice", not duplicates, f"{duplicates} are"
    if covers:
        yield "every example is assigned", distinct == examples, f"{examples - distinct} of {examples} are not"
    is_same = len(indices) == len(repeated) and all(map(np.array_equal, indices, repeated))
    yield "the same seed gives the same partition", is_same, "two calls with seed 0 differ"
    is_other = not all(map(np.array_equal, map(np.sort, indices), map(np.sort, other_seed)))
    yield "another seed gives another partition", is_other, "seeds 0 and 1 give the same one"
    yield "labels are not modified", np.array_equal(labels, original_labels), "they were changed in place"
