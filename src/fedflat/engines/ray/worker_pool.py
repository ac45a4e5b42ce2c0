"""The workers of a Ray cluster: the pool gives them work and replaces lost ones."""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

from fedflat.engines.ray.cluster import Device, check_head
from fedflat.engines.ray.messages import ProblemSource, WorkerInfo
from fedflat.engines.ray.scheduling import WorkerHandle, WorkItem, WorkQueue
from fedflat.engines.ray.worker import Worker, fedflat_version, version_mismatch
from fedflat.errors import MachineFailed, UserError, WorkerLost, first_line

MOST_LOSSES = 2
"""How often the worker of the same item may be lost before the run stops with an error."""
START_TIMEOUT = 120.0
"""Seconds in which at least one worker must start if none is left."""
EXTRA_TIMEOUT = 30.0
"""Seconds to wait for more workers if some have started."""
HEAD_CHECK_SECONDS = 1.0
"""Seconds between two checks that the cluster's head answers."""


class WorkerPool:
    """A number of workers, each with one core or a share of a GPU; lost ones are replaced if the cluster has room.

    Args:
        ray: the connected Ray module.
        count: workers to start.
        device: where they train.
        gpus: share of a GPU for each.

    Attributes:
        lost: number of workers lost so far.
        object_losses: exceptions that mean that a value in Ray's object store was lost.
    """

    def __init__(self, ray: Any, count: int, device: Device, gpus: float = 1.0) -> None:
        """Start ``count`` workers, without waiting: each has a core and, on ``cuda``, a share ``gpus`` of a GPU."""
        self.ray, self.count, self.device, self.gpus = ray, count, device, gpus
        self.job: str = ray.get_runtime_context().get_job_id()
        self.workers: list[WorkerHandle] = []
        self.lost = 0
        self._head_address = str(ray.get_runtime_context().gcs_address)
        self._head_check_time = time.monotonic()  # of the last check that the head answers
        self._starts = self._failed_starts = 0
        self._starting: dict[Any, WorkerHandle] = {}  # workers without ``info``, by ``info_ref``
        errors = ray.exceptions
        self._worker_losses = (
            errors.RayActorError,
            errors.WorkerCrashedError,
            errors.NodeDiedError,
            errors.OutOfMemoryError,
        )
        self.object_losses: tuple[type[Exception], ...] = (errors.ObjectLostError, *self._worker_losses)
        resources = {"num_cpus": 1, "num_gpus": gpus if device == "cuda" else 0}
        self._remote = ray.remote(**resources, max_restarts=0, max_task_retries=0, scheduling_strategy="SPREAD")(Worker)
        self._start_missing_workers()

    @property
    def started_workers(self) -> list[WorkerHandle]:
        """The workers that have started."""
        return [worker for worker in self.workers if worker.info is not None]

    @property
    def process_ids(self) -> list[int]:
        """Process ids of the workers that have started."""
        return [worker.info.process for worker in self.workers if worker.info is not None]

    def wait_for_all(self) -> None:
        """Wait until all workers have started, or until no more start because other programs use the cluster.

        At least one must start; then each further worker has ``EXTRA_TIMEOUT`` seconds.
        """
        self._start_missing_workers()
        while self._starting:
            progress = self._starts, self._failed_starts
            self._wait([], EXTRA_TIMEOUT if self.process_ids else START_TIMEOUT)
            # Neither a start nor a failed start: there is no room for more workers.
            if self.process_ids and (self._starts, self._failed_starts) == progress:
                return

    def build_problem(self, source: ProblemSource) -> None:
        """Make every started worker build the problem of ``source``, and wait for it; remove workers lost meanwhile."""
        requests = [(worker, self._request_problem(worker, source)) for worker in self.started_workers]
        for worker, ref in requests:
            try:
                self.get([ref])
            except self.object_losses:
                self._remove(worker)

    def map(self, call: str, tasks: Sequence[tuple[Any, ...]], source: ProblemSource | None = None) -> list[Any]:
        """Call a method of the workers for every task, each on a free worker; results are in the order of the tasks.

        Args:
            call: name of the method.
            tasks: its arguments for each call.
            source: the problem that workers build first, unless they have; None if the method needs none.
        """

        def item_of(indices: list[int]) -> WorkItem:
            return WorkItem(call, lambda _: tasks[indices[0]], indices)

        items = self.run(WorkQueue([1.0] * len(tasks), item_of, self.count, item_groups=1), source)
        return [item.result for item in sorted(items, key=lambda item: item.rows)]

    def run(
        self, queue: WorkQueue, source: ProblemSource | None = None, meanwhile: Callable[[], None] | None = None
    ) -> list[WorkItem]:
        """Let the workers empty a queue, and return the work items with their results, in any order.

        An item runs again if its worker or one of its arguments is lost. Calls may be nested: workers run the items of
        an inner call after those that they already have.

        Args:
            queue: the work.
            source: the problem that workers build first, unless they have; None if the items need none.
            meanwhile: called once while the workers are busy.
        """
        running: dict[Any, WorkItem] = {}  # by Ray's reference
        busy: Counter[WorkerHandle] = Counter()  # number of running items
        again: deque[WorkItem] = deque()
        done: list[WorkItem] = []
        workers = self.started_workers  # those that may take an item
        nodes = Counter(worker.node for worker in workers)
        while queue or again or running:
            self._start_missing_workers()
            # One item for each worker, and one more in advance while there is plenty of work.
            for queued in range(2):
                for worker in workers:
                    if worker.is_lost or busy[worker] > queued or (queued and len(queue) <= self.count):
                        continue
                    item = again.popleft() if again else queue.take(worker.node, nodes)
                    if item is not None:
                        running[self._start(item, worker, source)] = item
                        busy[worker] += 1
            before = self._starts, self.lost
            if meanwhile is not None and running:
                meanwhile()
                meanwhile = None
            workers = []
            for ref in self._wait(list(running)):
                item = running.pop(ref)
                assert item.worker is not None
                busy[item.worker] -= 1
                workers.append(item.worker)
                (done if self._collect(item, ref) else again).append(item)
            if again or (self._starts, self.lost) != before:
                workers = self.started_workers
                nodes = Counter(worker.node for worker in workers)
        return done

    def _collect(self, item: WorkItem, ref: Any) -> bool:
        """Store the result of an item that has ended; returns False if the item must run again.

        Raises ``MachineFailed`` if the item has lost more than ``MOST_LOSSES`` workers.
        """
        assert item.worker is not None
        try:
            (item.result,) = self._values([ref])
            return True
        except self._worker_losses as loss:
            self._remove(item.worker)
            item.losses += 1
            if item.losses > MOST_LOSSES:
                raise WorkerLost(
                    f"the same clients have lost {item.losses} Ray workers, most likely because memory ran out "
                    f"({first_line(loss)}); use fewer workers per machine or a smaller batch size, "
                    "then continue with fedflat resume"
                ) from None
        except self.object_losses:  # the result, or a state that was stored on a lost node
            item.restore()
        return False

    def close(self) -> None:
        """Stop the workers, unless their Ray cluster has been shut down or replaced."""
        is_connected = self.ray.is_initialized() and self.job == self.ray.get_runtime_context().get_job_id()
        for worker in self.workers:
            worker.is_lost = True
            if is_connected:
                self.ray.kill(worker.actor)
        self.workers, self._starting = [], {}

    def get(self, refs: list[Any]) -> list[Any]:
        """Wait for the values of references; an error in a worker is raised as it was raised there."""
        self._wait_for(refs, len(refs))
        return self._values(refs)

    def _values(self, refs: list[Any]) -> list[Any]:
        """The values of references that are ready, or the error that a worker raised."""
        try:
            values: list[Any] = self.ray.get(refs)
            return values
        except self.ray.exceptions.RayTaskError as error:
            raise (error.cause if isinstance(error.cause, Exception) else error) from None

    def _start_missing_workers(self) -> None:
        """Start workers until there are ``count``, without waiting for them."""
        while len(self.workers) < self.count:
            actor = self._remote.remote()
            worker = WorkerHandle(actor, actor.identify.remote())
            self.workers.append(worker)
            self._starting[worker.info_ref] = worker

    def _start(self, item: WorkItem, worker: WorkerHandle, source: ProblemSource | None) -> Any:
        """Start an item on a worker, which builds the problem first if it has not; returns Ray's reference."""
        if source is not None and worker.problem != source.key:
            self._request_problem(worker, source)
        item.worker = worker
        method, arguments = getattr(worker.actor, item.call), item.arguments(worker)
        if not item.returns_states:
            return method.remote(*arguments)
        ref, item.states_ref = method.options(num_returns=2).remote(*arguments)
        return ref

    def _request_problem(self, worker: WorkerHandle, source: ProblemSource) -> Any:
        worker.problem = source.key
        return worker.actor.build_problem.remote(source)

    def _wait(self, running: list[Any], timeout: float | None = None) -> list[Any]:
        """Wait until an item ends or a worker starts; returns the references of ended items.

        Args:
            running: references of the running items.
            timeout: seconds to wait; by default without limit if items are running, otherwise ``START_TIMEOUT``.
        """
        if timeout is None:
            timeout = math.inf if running else START_TIMEOUT
        refs = [*running, *self._starting]
        ready = self._wait_for(refs, 1, timeout)
        if ready:  # all that are ready, since every call takes time proportional to the number of references
            ready, _ = self.ray.wait(refs, num_returns=len(refs), timeout=0)
        if not ready and not self.process_ids:
            resource = "a free GPU" if self.device == "cuda" else "a free core"
            raise MachineFailed(
                f"no Ray worker started within {START_TIMEOUT:.0f} s; check with ray status that the cluster has a "
                f"node with {resource}, then continue with fedflat resume"
            )
        ended = [ref for ref in ready if ref not in self._starting]
        for ref in ready:
            if ref in self._starting:
                self._register(self._starting.pop(ref))
        return ended

    def _wait_for(self, refs: list[Any], count: int, timeout: float = math.inf) -> list[Any]:
        """Wait until ``count`` references are ready, and return those that are; fewer after ``timeout`` seconds.

        Raises ``MachineFailed`` if the head of the cluster is lost.
        """
        end = time.monotonic() + timeout
        ready: list[Any] = []
        while len(ready) < count and (now := time.monotonic()) < end:
            if now > self._head_check_time + HEAD_CHECK_SECONDS:
                advice = "start the cluster again unless fedflat started it, then continue with fedflat resume"
                check_head(self.ray, self._head_address, advice)
                self._head_check_time = now
            ready, _ = self.ray.wait(refs, num_returns=count, timeout=min(HEAD_CHECK_SECONDS, end - now))
        return ready

    def _register(self, worker: WorkerHandle) -> None:
        """Record the identity of a worker that has started; replace it if starting failed."""
        try:
            info = WorkerInfo(*self._values([worker.info_ref])[0])
        except self.object_losses as loss:
            self._failed_starts += 1
            self._remove(worker)
            if self._failed_starts > MOST_LOSSES:
                raise MachineFailed(
                    f"Ray workers do not start ({first_line(loss)}); is fedflat installed on every node?"
                ) from None
            self._start_missing_workers()
            return
        if info.version != fedflat_version():
            self.close()
            raise UserError(version_mismatch(info.host, info.version, fedflat_version()))
        worker.info, self._failed_starts = info, 0
        self._starts += 1

    def _remove(self, worker: WorkerHandle) -> None:
        """Remove a lost worker."""
        if worker in self.workers:
            self.workers.remove(worker)
            self._starting.pop(worker.info_ref, None)
            worker.is_lost = True
            self.lost += 1
            self.ray.kill(worker.actor)


_pool: WorkerPool | None = None


def worker_pool(ray: Any, count: int, device: Device, gpus: float = 1.0) -> WorkerPool:
    """The pool of this process; replaced only if other workers are requested, because starting workers takes seconds.

    Args:
        ray: the connected Ray module.
        count: number of workers.
        device: what they train on.
        gpus: share of a GPU for each.
    """
    global _pool  # noqa: PLW0603
    job = ray.get_runtime_context().get_job_id()
    if _pool is None or (_pool.job, _pool.count, _pool.device, _pool.gpus) != (job, count, device, gpus):
        close_worker_pool()
        _pool = WorkerPool(ray, count, device, gpus)
    return _pool


def close_worker_pool() -> None:
    """Stop the workers of this process, if there are any."""
    global _pool  # noqa: PLW0603
    if _pool is not None:
        _pool.close()
    _pool = None
