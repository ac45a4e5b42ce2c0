"""How a cohort is divided among workers: by what its clients have been measured to cost, dearest first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from fedflat.engines.aggregation import BLOCK

LEAST = 0.02
"""Seconds of work below which a unit is not worth a message of its own, which costs driver and worker some milliseconds."""
PIECES = 8
"""The smallest unit is this part of a worker's share, so that all end at about the same time."""
REMEMBERED = 2**16
"""Clients whose own cost is remembered."""


class Costs:
    """What clients cost: each its last measurement, and those not seen yet the mean cost of an example."""

    def __init__(self) -> None:
        self._seconds: OrderedDict[int, float] = OrderedDict()
        self._per_sample = 0.0

    def measured(self, clients: Sequence[int], samples: Sequence[int], seconds: float) -> None:
        """Take note that some clients took so long together; each has its share by its samples."""
        rate = seconds / max(1, sum(samples))
        self._per_sample = rate if not self._per_sample else 0.9 * self._per_sample + 0.1 * rate
        for client, count in zip(clients, samples, strict=True):
            self._seconds[client] = rate * count
            self._seconds.move_to_end(client)
        while len(self._seconds) > REMEMBERED:
            self._seconds.popitem(last=False)

    def expected(self, client: int, samples: int) -> float:
        """Seconds; before anything was measured, samples."""
        return self._seconds.get(client, (self._per_sample or 1.0) * samples)

    @property
    def known(self) -> bool:
        """Whether anything was measured."""
        return self._per_sample > 0


def units_of(costs: Sequence[float], workers: int, pieces: int = PIECES, least: float = LEAST) -> list[list[int]]:
    """Positions in groups, dearest group first: for each worker half of its share, then a quarter, and so on down to the smallest piece.

    So workers end within a smallest piece of each other whatever the measurements missed, and there are few messages all the same.

    >>> units_of([1.0] * 16, workers=1, pieces=8)
    [[0, 1, 3, 4, 8, 9, 11, 12], [2, 5, 10, 13], [6, 14], [7, 15]]
    >>> units_of([1.0, 5.0, 1.0, 1.0, 2.0], workers=2, pieces=1)
    [[1], [4, 0, 2, 3]]
    """
    parts = [part for part in halves(min(pieces, int(sum(costs) / workers / least))) for _ in range(workers)]
    groups: list[list[int]] = [[] for _ in parts]
    loads = [0.0] * len(parts)
    for position in sorted(range(len(costs)), key=lambda p: -costs[p]):
        group = min(range(len(parts)), key=lambda g: (loads[g] + costs[position]) / parts[g])
        groups[group].append(position)
        loads[group] += costs[position]
    return [groups[group] for group in sorted(range(len(parts)), key=lambda g: -loads[g]) if groups[group]]


def halves(pieces: int) -> list[int]:
    """A whole of so many pieces, rounded down to a power of two, in halves, of which the last are single.

    >>> halves(8), halves(3), halves(0)
    ([4, 2, 1, 1], [1, 1], [1])
    """
    found = [1]
    while 2 * sum(found) <= pieces:
        found.insert(0, sum(found))
    return found


def blocks_of(costs: Sequence[float], size: int = BLOCK) -> list[list[int]]:
    """Positions in blocks of a fixed size, that of the aggregation, dearest block first.

    >>> blocks_of([1.0] * 8 + [20.0, 1.0])
    [[8, 9], [0, 1, 2, 3, 4, 5, 6, 7]]
    """
    blocks = [list(range(start, min(start + size, len(costs)))) for start in range(0, len(costs), size)]
    return sorted(blocks, key=lambda block: -sum(costs[position] for position in block))
