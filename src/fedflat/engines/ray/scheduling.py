"""How a cohort is divided among workers: by what its clients have been measured to cost, and by where their state lies."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from fedflat.engines.round.aggregation import BLOCK

LEAST = 0.02
"""Seconds of work below which a piece is not worth a message of its own, which costs driver and worker some milliseconds."""
PIECES = 8
"""The smallest piece is this part of a worker's share, so that all end at about the same time."""
REMEMBERED = 2**16
"""Clients whose own cost is remembered."""
NOTICED = 1.25
"""By what factor a client must differ from the others before that is taken for more than noise."""


class Costs:
    """What clients cost: the mean cost of a sample, for as many as a client sees in a round, unless it has been measured to differ."""

    def __init__(self) -> None:
        self._ratios: OrderedDict[int, float] = OrderedDict()
        self._per_sample = 0.0

    def measured(self, clients: Sequence[int], samples: Sequence[int], seconds: float) -> None:
        """Take note that some clients took so long together."""
        lr = seconds / max(1, sum(samples))
        self._per_sample = 0.9 * self._per_sample + 0.1 * lr if self.known else lr
        ratio = lr / self._per_sample
        for client in clients:
            self._ratios[client] = (self._ratios.get(client, ratio) + ratio) / 2
            self._ratios.move_to_end(client)
        while len(self._ratios) > REMEMBERED:
            self._ratios.popitem(last=False)

    def expected(self, client: int, samples: int) -> float:
        """Seconds; before anything was measured, samples."""
        ratio = self._ratios.get(client, 1.0)
        usual = 1 / NOTICED <= ratio <= NOTICED
        return (self._per_sample or 1.0) * (1.0 if usual else ratio) * max(1, samples)

    @property
    def known(self) -> bool:
        """Whether anything was measured."""
        return self._per_sample > 0


def shares_of(costs: Sequence[float], moving: Sequence[Sequence[float]]) -> list[list[int]]:
    """Positions for each worker, dearest first: where their state lies, unless the round ends earlier when it is moved.

    ``moving`` has the seconds that it takes to bring the state of each position to each worker.

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
    lies = [min(row) < max(row) for row in moving]
    for position in sorted(range(len(costs)), key=lambda p: (not lies[p], -costs[p])):
        worker = min(workers, key=(moving[position] if lies[position] else loads).__getitem__)
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
    """When two workers end if one gives a position to the other."""
    return loads[full] - cost - moving[full], loads[empty] + cost + moving[empty]


def pieces_of(
    share: Sequence[int], costs: Sequence[float], pieces: int = PIECES, least: float = LEAST
) -> list[list[int]]:
    """A worker's share in pieces: half of it, then a quarter, and so on; the last ones are what others take who are done earlier.

    >>> pieces_of(range(5), [1.0] * 5), pieces_of(range(5), [1.0] * 5, pieces=1)
    ([[0, 1, 2], [3], [4]], [[0, 1, 2, 3, 4]])
    """
    left = sum(costs[position] for position in share)
    smallest = max(left / pieces, least)
    found: list[list[int]] = []
    load = aim = 0.0
    for position in share:
        if not found or load >= aim:
            found.append([])
            load, aim = 0.0, max(left / 2, smallest)
        found[-1].append(position)
        load, left = load + costs[position], left - costs[position]
    return found


def blocks_of(count: int, size: int = BLOCK) -> list[list[int]]:
    """Positions in blocks of a fixed size, that of the aggregation.

    >>> blocks_of(10)
    [[0, 1, 2, 3, 4, 5, 6, 7], [8, 9]]
    """
    return [list(range(start, min(start + size, count))) for start in range(0, count, size)]
