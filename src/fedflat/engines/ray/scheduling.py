"""How a cohort is divided among workers: by the measured cost of its clients and by where their state is stored."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from fedflat.engines.round.contract import BLOCK

LEAST = 0.02
"""Seconds of work below which a piece is not worth its own message, which costs a few milliseconds."""
PIECES = 8
"""The smallest piece is this fraction of a worker's share, so that all workers finish at about the same time."""
REMEMBERED = 2**16
"""Clients whose cost and location are remembered."""
NOTICED = 1.25
"""Factor by which a client's cost must differ from the mean to count as more than noise."""


class ClientCosts:
    """Expected training time of clients: a mean cost per sample, corrected for clients that are known to differ."""

    def __init__(self) -> None:
        self._ratios: OrderedDict[int, float] = OrderedDict()
        self._per_sample = 0.0

    def measured(self, clients: Sequence[int], samples: Sequence[int], seconds: float) -> None:
        """Record that some clients took ``seconds`` together for ``samples`` examples each."""
        per_sample = seconds / max(1, sum(samples))
        self._per_sample = 0.9 * self._per_sample + 0.1 * per_sample if self.known else per_sample
        ratio = per_sample / self._per_sample
        for client in clients:
            self._ratios[client] = (self._ratios.get(client, ratio) + ratio) / 2
            self._ratios.move_to_end(client)
        while len(self._ratios) > REMEMBERED:
            self._ratios.popitem(last=False)

    def expected(self, client: int, samples: int) -> float:
        """Expected seconds for ``samples`` examples; the number of samples before anything was measured."""
        ratio = self._ratios.get(client, 1.0)
        usual = 1 / NOTICED <= ratio <= NOTICED
        return (self._per_sample or 1.0) * (1.0 if usual else ratio) * max(1, samples)

    @property
    def known(self) -> bool:
        """Whether anything has been measured."""
        return self._per_sample > 0


def shares_of(costs: Sequence[float], moving: Sequence[Sequence[float]]) -> list[list[int]]:
    """Assign positions to workers: where their state is, unless moving it lets the round end earlier.

    Args:
        costs: seconds of work at each position.
        moving: for each position, the seconds to bring its state to each worker.

    Returns:
        For each worker its positions, most expensive first.

    >>> shares_of([1.0, 5.0, 1.0, 1.0, 2.0], [[0, 0]] * 5)
    [[1], [4, 0, 2, 3]]
    >>> shares_of([1.0] * 4, [[0, 9]] * 4)
    [[0, 1, 2, 3], []]
    >>> shares_of([1.0] * 4, [[0, 0.1]] * 4)
    [[2, 3], [0, 1]]
    """
    loads = [0.0] * len(moving[0])
    workers = range(len(loads))
    shares: list[list[int]] = [[] for _ in workers]
    located = [min(row) < max(row) for row in moving]
    for position in sorted(range(len(costs)), key=lambda p: (not located[p], -costs[p])):
        worker = min(workers, key=(moving[position] if located[position] else loads).__getitem__)
        shares[worker].append(position)
        loads[worker] += costs[position] + moving[position][worker]
    while True:
        full, empty = max(workers, key=loads.__getitem__), min(workers, key=loads.__getitem__)
        moves = [(_after_move(costs[p], moving[p], loads, full, empty), p) for p in shares[full]]
        ends, position = min(moves, key=lambda move: max(move[0]))
        if max(ends) >= loads[full] * (1 - 1e-6):
            return [sorted(share, key=lambda p: -costs[p]) for share in shares]
        shares[full].remove(position)
        shares[empty].append(position)
        loads[full], loads[empty] = ends


def _after_move(
    cost: float, moving: Sequence[float], loads: Sequence[float], full: int, empty: int
) -> tuple[float, float]:
    """When two workers finish if one gives a position to the other."""
    return loads[full] - cost - moving[full], loads[empty] + cost + moving[empty]


def pieces_of(
    share: Sequence[int], costs: Sequence[float], pieces: int = PIECES, least: float = LEAST
) -> list[list[int]]:
    """Split a worker's share into pieces of decreasing size: half of it, then a quarter, and so on.

    Workers that finish early take over the last, small pieces of others.

    >>> pieces_of(range(5), [1.0] * 5), pieces_of(range(5), [1.0] * 5, pieces=1)
    ([[0, 1, 2], [3], [4]], [[0, 1, 2, 3, 4]])
    """
    left = sum(costs[position] for position in share)
    smallest = max(left / pieces, least)
    result: list[list[int]] = []
    load = aim = 0.0
    for position in share:
        if not result or load >= aim:
            result.append([])
            load, aim = 0.0, max(left / 2, smallest)
        result[-1].append(position)
        load, left = load + costs[position], left - costs[position]
    return result


def blocks_of(count: int, size: int = BLOCK) -> list[list[int]]:
    """Positions 0..count-1 in the blocks of the aggregation.

    >>> blocks_of(10)
    [[0, 1, 2, 3, 4, 5, 6, 7], [8, 9]]
    """
    return [list(range(start, min(start + size, count))) for start in range(0, count, size)]
