"""The work items of a round that wait for a worker. Every operation takes (amortised) logarithmic time at most."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace
from typing import Any

from fedflat.engines.ray.messages import WorkerInfo


@dataclass(eq=False)
class WorkerHandle:
    """A worker as the driver sees it.

    Attributes:
        actor: Ray's actor.
        info_ref: Ray's reference to ``info``.
        busy: its running items, by Ray reference.
        info: its identity; None while it starts.
        problem: key of the problem that it was last told to build.
        is_lost: whether its process has ended.
    """

    actor: Any
    info_ref: Any
    busy: dict[Any, WorkItem] = field(default_factory=dict)
    info: WorkerInfo | None = None
    problem: str = ""
    is_lost: bool = False

    def running_seconds(self) -> float:
        """Seconds until its running items are expected to end."""
        now = time.monotonic()
        return sum(max(0.0, item.seconds - (now - item.start_time)) for item in self.busy.values())


@dataclass(eq=False)
class WorkItem:
    """A call to one worker.

    Attributes:
        call: name of the worker's method.
        arguments: (worker, ``with_state``) -> arguments of the method.
        rows: rows of the cohort that the item trains.
        planned_worker: the worker for which the item is planned, if any.
        seconds: expected duration.
        transfer_seconds: extra seconds on a worker without the clients' states.
        with_state: whether to send the clients' complete states, because a worker did not have them.
        start_time: when the call was started, as ``time.monotonic()``.
        worker: the worker that was last given the item.
        result: what the call returned.
    """

    call: str
    arguments: Callable[[WorkerHandle, bool], tuple[Any, ...]]
    rows: list[int] = field(default_factory=list)
    planned_worker: WorkerHandle | None = None
    seconds: float = 0.0
    transfer_seconds: float = 0.0
    with_state: bool = False
    start_time: float = 0.0
    worker: WorkerHandle | None = None
    result: Any = None


class WorkQueue:
    """Waiting items: one queue for each worker that items are planned for, and one for all others.

    Args:
        items: the items.
        workers: number of workers of the pool.
    """

    def __init__(self, items: Iterable[WorkItem], workers: int) -> None:
        """Sort the items by the worker for which they are planned."""
        self._workers = workers
        self._planned: dict[WorkerHandle, deque[WorkItem]] = {}
        self._unplanned: deque[WorkItem] = deque()  # planned for no worker, or for a lost one
        self._seconds: dict[WorkerHandle, float] = {}  # of the items planned for each worker
        self._length = 0
        for item in items:
            worker = item.planned_worker
            if worker is None or worker.is_lost:
                self._unplanned.append(item)
            else:
                self._planned.setdefault(worker, deque()).append(item)
                self._seconds[worker] = self._seconds.get(worker, 0.0) + item.seconds
            self._length += 1
        # Workers by planned seconds, the longest first; the numbers keep handles from being compared. Planned seconds
        # decrease when items are taken, so an entry may be too long; it is corrected once it is at the top.
        self._numbers = itertools.count()
        self._longest = [(-self._seconds[worker], next(self._numbers), worker) for worker in self._planned]
        heapify(self._longest)

    def __len__(self) -> int:
        return self._length

    def put_back(self, item: WorkItem) -> None:
        """Add an item that must run again, before all others."""
        worker = item.planned_worker
        self._length += 1
        if worker is None or worker.is_lost:
            self._unplanned.appendleft(item)
            return
        self._planned[worker].appendleft(item)
        self._seconds[worker] += item.seconds
        heappush(self._longest, (-self._seconds[worker], next(self._numbers), worker))

    def release_lost(self) -> None:
        """Let any worker run the items that are planned for lost workers."""
        for worker, items in self._planned.items():
            if worker.is_lost:
                self._unplanned.extend(items)
                items.clear()

    def take(self, worker: WorkerHandle, in_advance: bool) -> WorkItem | None:
        """Remove and return a worker's next item: one planned for it, else one planned for no worker, else another's.

        Args:
            worker: the worker.
            in_advance: whether the worker is still busy; the last items are then left for workers that become idle.
        """
        planned = self._planned.get(worker)
        if planned:
            return None if in_advance and len(planned) == 1 else self._pop(worker, 0)
        if self._unplanned:
            if in_advance and len(self._unplanned) <= self._workers:
                return None
            self._length -= 1
            return self._unplanned.popleft()
        return None if in_advance else self._take_over()

    def _take_over(self) -> WorkItem | None:
        """The last item of the worker with the most planned seconds, unless it would start earlier there."""
        while self._longest:
            seconds, number, worker = self._longest[0]
            if not self._planned[worker]:
                heappop(self._longest)
            elif -seconds != self._seconds[worker]:
                heapreplace(self._longest, (-self._seconds[worker], number, worker))
            else:
                item = self._planned[worker][-1]
                seconds_until_start = worker.running_seconds() + self._seconds[worker] - item.seconds
                is_earlier_here = not item.transfer_seconds or item.transfer_seconds < seconds_until_start
                return self._pop(worker, -1) if is_earlier_here else None
        return None

    def _pop(self, worker: WorkerHandle, position: int) -> WorkItem:
        """Remove and return the first (0) or last (-1) item planned for a worker."""
        item = self._planned[worker][position]
        del self._planned[worker][position]
        self._seconds[worker] -= item.seconds
        self._length -= 1
        return item
