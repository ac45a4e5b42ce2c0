"""How a cohort is divided among workers: by the measured cost of its clients and by where their state is stored."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

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


def assign_shares(costs: Sequence[float], transfers: Sequence[Sequence[float]]) -> list[list[int]]:
    """Divide the work of a round among workers so that the slowest worker ends early.

    The work is a list of positions, each a client or a block of clients. First, each position goes to the worker that
    has its state, or to the least loaded worker if none has. Then the most loaded worker passes positions to the least
    loaded one as long as this shortens the longer of the two loads. A load is the seconds of work and transfers of a
    worker's share.

    Args:
        costs: seconds of work at each position.
        transfers: for each position, the seconds to bring its state to each worker.

    Returns:
        For each worker its positions, most expensive first.

    >>> assign_shares([1.0, 5.0, 1.0, 1.0, 2.0], [[0, 0]] * 5)
    [[1], [4, 0, 2, 3]]
    >>> assign_shares([1.0] * 4, [[0, 9]] * 4)
    [[0, 1, 2, 3], []]
    >>> assign_shares([1.0] * 4, [[0, 0.1]] * 4)
    [[2, 3], [0, 1]]
    """
    workers = range(len(transfers[0]))
    loads = [0.0 for _ in workers]
    shares: list[list[int]] = [[] for _ in workers]
    # If a worker has the state of a position, it needs less time for the transfer than the others.
    has_home = [min(seconds) < max(seconds) for seconds in transfers]
    # Positions whose state a worker has come first, since the others then even out the loads.
    for position in sorted(range(len(costs)), key=lambda p: (not has_home[p], -costs[p])):
        preference = transfers[position] if has_home[position] else loads
        worker = min(workers, key=lambda worker: preference[worker])
        shares[worker].append(position)
        loads[worker] += costs[position] + transfers[position][worker]
    while True:
        busiest = max(workers, key=lambda worker: loads[worker])
        idlest = min(workers, key=lambda worker: loads[worker])
        loads_after_move = {
            p: (loads[busiest] - costs[p] - transfers[p][busiest], loads[idlest] + costs[p] + transfers[p][idlest])
            for p in shares[busiest]
        }
        best_move = min(loads_after_move, key=lambda p: max(loads_after_move[p]))
        new_loads = loads_after_move[best_move]
        if max(new_loads) >= loads[busiest] * (1 - 1e-6):  # no move helps by more than rounding
            return [sorted(share, key=lambda p: -costs[p]) for share in shares]
        shares[busiest].remove(best_move)
        shares[idlest].append(best_move)
        loads[busiest], loads[idlest] = new_loads


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
