"""How a cohort is divided among workers: by the measured cost of its clients and by where their state is stored."""

from __future__ import annotations

from bisect import bisect, insort
from collections import OrderedDict
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import Any, NamedTuple

from fedflat.engines.round.contract import BLOCK

MIN_PIECE_SECONDS = 0.02
"""Seconds of work below which a piece is not worth its own message, which costs a few milliseconds."""
SHARE_TO_SMALLEST_PIECE = 8
"""Ratio of a worker's share to its smallest piece; small last pieces let all workers finish at about the same time."""
MAX_REMEMBERED_CLIENTS = 2**16
"""Largest number of clients whose cost, and the worker that has their state, are remembered."""
NOISE_FACTOR = 1.25
"""Factor by which a client's cost must differ from the mean to count as more than noise."""


class ClientCosts:
    """Expected training time of clients: a mean cost per sample, corrected for clients that are known to differ."""

    def __init__(self) -> None:
        self._ratios: OrderedDict[int, float] = OrderedDict()  # by client: its seconds per sample, relative to the mean
        self._seconds_per_sample = 0.0

    def record(self, clients: Sequence[int], samples: Sequence[int], seconds: float) -> None:
        """Record how long some clients took.

        Updates the mean cost per sample, and for each of these clients the ratio of its cost to that mean; both are
        moving averages. Beyond ``MAX_REMEMBERED_CLIENTS``, the clients recorded longest ago are forgotten.

        Args:
            clients: the clients' numbers.
            samples: number of examples that each client saw.
            seconds: time of all these clients together; they share its cost per sample.
        """
        per_sample = seconds / max(1, sum(samples))
        if self.is_measured:  # an exponential moving average, which follows slow changes
            self._seconds_per_sample = 0.9 * self._seconds_per_sample + 0.1 * per_sample
        else:
            self._seconds_per_sample = per_sample
        ratio = per_sample / self._seconds_per_sample
        for client in clients:
            self._ratios[client] = (self._ratios.get(client, ratio) + ratio) / 2
            self._ratios.move_to_end(client)
        while len(self._ratios) > MAX_REMEMBERED_CLIENTS:
            self._ratios.popitem(last=False)

    def expected_seconds(self, client: int, samples: int) -> float:
        """Expected seconds for ``client`` to see ``samples`` examples.

        Before anything was measured, the result is the number of samples, which suffices to compare clients.
        """
        ratio = self._ratios.get(client, 1.0)
        if 1 / NOISE_FACTOR <= ratio <= NOISE_FACTOR:  # too close to the mean cost to be more than noise
            ratio = 1.0
        return (self._seconds_per_sample or 1.0) * ratio * max(1, samples)

    @property
    def is_measured(self) -> bool:
        """Whether anything has been measured."""
        return self._seconds_per_sample > 0


class Transfer(NamedTuple):
    """Seconds to bring the state of a position (a client or a block of clients) to a worker.

    Attributes:
        elsewhere: seconds for a worker that has none of the state.
        homes: seconds for each worker that has some of it, by the worker's index.
    """

    elsewhere: float
    homes: dict[int, float]

    def seconds(self, worker: int) -> float:
        """Seconds for the worker with this index."""
        return self.homes.get(worker, self.elsewhere)


def assign_shares(costs: Sequence[float], transfers: Sequence[Transfer], workers: int) -> list[list[int]]:
    """Divide the work of a round among workers so that the slowest worker ends early.

    The work is a list of positions, each a client or a block of clients. First, each position goes to the worker that
    has its state, or to the least loaded worker if none has. Then the most loaded worker passes positions to the least
    loaded one as long as this shortens the longer of the two loads. A load is the seconds of work and transfers of a
    worker's share.

    Args:
        costs: seconds of work at each position.
        transfers: seconds to bring the state of each position to a worker.
        workers: number of workers.

    Returns:
        For each worker its positions, most expensive first.

    >>> assign_shares([1.0, 5.0, 1.0, 1.0, 2.0], [Transfer(0, {})] * 5, 2)
    [[1], [4, 0, 2, 3]]
    >>> assign_shares([1.0] * 4, [Transfer(9, {0: 0})] * 4, 2)
    [[0, 1, 2, 3], []]
    >>> assign_shares([1.0] * 4, [Transfer(9, {0: 0, 1: 0.1})] * 4, 2)  # two workers have the states
    [[1, 2], [0, 3]]
    """
    loads = [0.0] * workers
    # For each worker its positions as (seconds of work, position), sorted, by their transfers. There are few different
    # transfers, because states have the same size.
    shares: list[dict[Any, list[tuple[float, int]]]] = [{} for _ in loads]
    idlest = [(0.0, worker) for worker in range(workers)]  # a heap; entries whose load has changed are ignored
    busiest = idlest.copy()  # the same, with negative loads

    def set_load(worker: int, load: float) -> None:
        loads[worker] = load
        heappush(idlest, (load, worker))
        heappush(busiest, (-load, worker))

    def add(position: int, worker: int, insert: Callable[[list[Any], Any], None]) -> None:
        transfer = transfers[position]
        insert(shares[worker].setdefault(_key(transfer), []), (costs[position], position))
        set_load(worker, loads[worker] + costs[position] + transfer.seconds(worker))

    # Positions whose state a worker has come first, since the others then even out the loads.
    for position in sorted(range(len(costs)), key=lambda p: (not transfers[p].homes, -costs[p])):
        homes = transfers[position].homes
        worker = min(homes, key=lambda home: (homes[home], home)) if homes else _first_valid(idlest, loads, 1)
        add(position, worker, list.append)
    for share in shares:
        for positions in share.values():
            positions.sort()
    while True:
        giver, taker = _first_valid(busiest, loads, -1), _first_valid(idlest, loads, 1)
        moves = []  # the longer load after the move, and which position to move
        for key, positions in shares[giver].items():
            transfer = transfers[positions[0][1]]
            rest, start = loads[giver] - transfer.seconds(giver), loads[taker] + transfer.seconds(taker)
            # The loads are even after a move of half their difference; the best positions are those next to it.
            middle = bisect(positions, ((rest - start) / 2,))
            for index in range(max(0, middle - 1), min(middle + 1, len(positions))):
                cost, _ = positions[index]
                moves.append((max(rest - cost, start + cost), key, index))
        if not moves or min(moves)[0] >= loads[giver] * (1 - 1e-6):  # no move helps by more than rounding
            break
        _, key, index = min(moves)
        _, position = shares[giver][key].pop(index)
        if not shares[giver][key]:
            del shares[giver][key]
        set_load(giver, loads[giver] - costs[position] - transfers[position].seconds(giver))
        add(position, taker, insort)
    return [
        sorted((p for positions in share.values() for _, p in positions), key=lambda p: (-costs[p], p))
        for share in shares
    ]


def _key(transfer: Transfer) -> tuple[float, tuple[tuple[int, float], ...]]:
    """A hashable form of a transfer."""
    return transfer.elsewhere, tuple(sorted(transfer.homes.items()))


def _first_valid(heap: list[tuple[float, int]], loads: Sequence[float], sign: int) -> int:
    """The worker at the top of a heap of (``sign`` * load, worker), after removing entries with an old load."""
    while heap[0][0] != sign * loads[heap[0][1]]:
        heappop(heap)
    return heap[0][1]


def split_share(
    share: Sequence[int],
    costs: Sequence[float],
    ratio: int = SHARE_TO_SMALLEST_PIECE,
    min_seconds: float = MIN_PIECE_SECONDS,
) -> list[list[int]]:
    """Split a worker's share of the work into pieces of decreasing size: half of it, then a quarter, and so on.

    Each piece becomes a work item. Workers that finish early take over the last, small pieces of others.

    Args:
        share: the worker's positions (clients or blocks of clients).
        costs: seconds of work at every position.
        ratio: ratio of the share's seconds to the target for its smallest piece.
        min_seconds: shortest target for a piece in seconds; the last piece may be shorter.

    >>> split_share(range(5), [1.0] * 5), split_share(range(5), [1.0] * 5, ratio=1)
    ([[0, 1, 2], [3], [4]], [[0, 1, 2, 3, 4]])
    """
    remaining = sum(costs[position] for position in share)  # seconds not yet in a piece
    smallest = max(remaining / ratio, min_seconds)
    pieces: list[list[int]] = []
    load = target = 0.0  # seconds of the last piece so far, and how many it should get
    for position in share:
        if not pieces or load >= target:
            pieces.append([])
            load, target = 0.0, max(remaining / 2, smallest)
        pieces[-1].append(position)
        load, remaining = load + costs[position], remaining - costs[position]
    return pieces


def aggregation_blocks(count: int, size: int = BLOCK) -> list[list[int]]:
    """The positions 0..count-1 of a cohort in blocks of ``size``, over which the aggregation forms partial sums.

    >>> aggregation_blocks(10)
    [[0, 1, 2, 3, 4, 5, 6, 7], [8, 9]]
    """
    return [list(range(start, min(start + size, count))) for start in range(0, count, size)]
