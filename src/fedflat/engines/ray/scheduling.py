"""How a cohort is divided among workers: by the measured cost of its clients and by where their state is stored."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fedflat.engines.ray.messages import WorkerInfo
from fedflat.engines.round.aggregation import BLOCK

MIN_ITEM_SECONDS = 0.02
"""Seconds of work below which an item is not worth its own message, which takes about 1 ms."""
MAX_REMEMBERED_CLIENTS = 2**16
"""Largest number of clients whose cost is remembered."""
NOISE_FACTOR = 1.25
"""Factor by which a client's cost must differ from the mean to count as a real difference."""


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


@dataclass(eq=False)
class WorkerHandle:
    """A worker as the driver sees it.

    Attributes:
        actor: Ray's actor.
        info_ref: Ray's reference to ``info``.
        info: its identity; None while it starts.
        problem: key of the problem that it was last told to build.
        is_lost: whether its process has ended.
    """

    actor: Any
    info_ref: Any
    info: WorkerInfo | None = None
    problem: str = ""
    is_lost: bool = False

    @property
    def node(self) -> str:
        """Ray's id of its node; empty while it starts."""
        return "" if self.info is None else self.info.node_id


@dataclass(eq=False)
class WorkItem:
    """A call to one worker.

    Attributes:
        call: name of the worker's method.
        arguments: returns the arguments of the method, given the worker.
        rows: what the call is for: rows of the cohort, or the index of a task.
        returns_states: whether the call returns the clients' new states after its result.
        restore: called before the item runs again because a state in its arguments was lost.
        worker: the worker that was last given the item.
        result: what the call returned.
        states_ref: Ray's reference to the returned states.
        losses: number of workers that were lost while they ran the item.
    """

    call: str
    arguments: Callable[[WorkerHandle], tuple[Any, ...]]
    rows: list[int]
    returns_states: bool = False
    restore: Callable[[], None] = lambda: None
    worker: WorkerHandle | None = None
    result: Any = None
    states_ref: Any = None
    losses: int = 0


class WorkQueue:
    """The work of a round that waits for a worker, in groups: single clients, blocks of clients or other tasks.

    A worker that has nothing to do takes some groups as one work item, first those whose states its node has. Items
    become smaller towards the end of the round, so that all workers finish at about the same time.

    Args:
        costs: expected seconds of each group.
        build: returns the work item of some groups, given as indices.
        workers: number of workers.
        homes: for each group the node that has its states, or an empty string; by default no node has any.
        transfer_seconds: seconds to move the states of a group to another node.
        item_groups: number of groups in an item; by default an item gets half of a worker's share of what is left.
        min_seconds: seconds of work that an item gets at least in this case.

    >>> queue = WorkQueue([1.0] * 8, lambda groups: WorkItem("train", lambda _: (), groups), workers=2)
    >>> [queue.take("node", Counter()).rows for _ in range(4)]
    [[0, 1], [2, 3], [4], [5]]
    """

    def __init__(
        self,
        costs: Sequence[float],
        build: Callable[[list[int]], WorkItem],
        workers: int,
        homes: Sequence[str] | None = None,
        transfer_seconds: float = 0.0,
        item_groups: int | None = None,
        min_seconds: float = 0.0,
    ) -> None:
        """Sort the groups by their home, the most expensive ones first."""
        self._costs, self._build, self._workers = costs, build, workers
        self._transfer_seconds, self._item_groups, self._min_seconds = transfer_seconds, item_groups, min_seconds
        self._groups: dict[str, deque[int]] = {}  # by home; without empty ones
        self._seconds: dict[str, float] = {}  # of these groups
        self._length = len(costs)
        for group in sorted(range(len(costs)), key=lambda group: -costs[group]):
            home = homes[group] if homes else ""
            self._groups.setdefault(home, deque()).append(group)
            self._seconds[home] = self._seconds.get(home, 0.0) + costs[group]
        self._left = sum(costs)

    def __len__(self) -> int:
        return self._length

    def take(self, node: str, node_workers: Counter[str]) -> WorkItem | None:
        """Remove groups for a worker and return their work item, or None if the worker should take none.

        Args:
            node: the worker's node.
            node_workers: number of workers by node.
        """
        target = max(self._left / (2 * self._workers), self._min_seconds)
        groups: list[int] = []
        seconds = 0.0
        while self._groups and (len(groups) < self._item_groups if self._item_groups else seconds < target):
            home = self._next_home(node, node_workers)
            if home is None:
                break
            waiting = self._groups[home]
            groups.append(waiting.popleft() if home in (node, "") else waiting.pop())
            cost = self._costs[groups[-1]]
            seconds += cost
            self._seconds[home] -= cost
            if not waiting:
                del self._groups[home], self._seconds[home]
        self._left -= seconds
        self._length -= len(groups)
        return self._build(sorted(groups)) if groups else None

    def _next_home(self, node: str, node_workers: Counter[str]) -> str | None:
        """The home from whose groups a worker on ``node`` takes one: its node, no node, or the one with most work.

        Returns None if the groups of that other node start earlier there than their states could be moved.
        """
        for home in (node, ""):
            if home in self._groups:
                return home
        home = max(self._seconds, key=self._seconds.__getitem__)
        return home if self._seconds[home] >= self._transfer_seconds * node_workers[home] else None


def aggregation_blocks(count: int) -> list[list[int]]:
    """The positions 0..count-1 of a cohort in blocks of ``BLOCK``, over which the aggregation forms partial sums.

    >>> aggregation_blocks(10)
    [[0, 1, 2, 3, 4, 5, 6, 7], [8, 9]]
    """
    return [list(range(start, min(start + BLOCK, count))) for start in range(0, count, BLOCK)]
