"""The workers of a Ray cluster: the pool distributes work items, balances the load and replaces lost workers."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from fedflat.engines.ray.cluster import Device, check_head, first_line
from fedflat.engines.ray.messages import ProblemSource, WorkerInfo
from fedflat.engines.ray.work_queue import WorkerHandle, WorkItem, WorkQueue
from fedflat.engines.ray.worker import CacheMiss, Worker, fedflat_version, version_mismatch
from fedflat.errors import UserError

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

    The workers run work items; an item is a call of a worker's method, e.g. to train some clients.

    Args:
        ray: the connected Ray module.
        count: workers to start.
        device: where they train.
        gpus: share of a GPU for each.

    Attributes:
        lost: number of workers lost so far.
        loss_errors: exceptions that mean that a worker was lost.
        state_loss_errors: exceptions that mean that a client's state was lost.
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
        self.loss_errors: tuple[type[Exception], ...] = (
            errors.RayActorError,
            errors.ObjectLostError,
            errors.WorkerCrashedError,
            errors.NodeDiedError,
            errors.OutOfMemoryError,
        )
        self.state_loss_errors: tuple[type[Exception], ...] = (*self.loss_errors, CacheMiss)
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
            progress = len(self.process_ids), self._failed_starts
            self._wait([], EXTRA_TIMEOUT if self.process_ids else START_TIMEOUT)
            # Neither a start nor a failed start: there is no room for more workers.
            if self.process_ids and (len(self.process_ids), self._failed_starts) == progress:
                return

    def build_problem(self, source: ProblemSource) -> None:
        """Make every started worker build the problem of ``source``, and wait for it; remove workers lost meanwhile."""
        requests = [(worker, self._request_problem(worker, source)) for worker in self.started_workers]
        for worker, ref in requests:
            try:
                self.get(ref)
            except self.loss_errors:
                self._remove(worker)

    def map(self, call: str, tasks: Sequence[tuple[Any, ...]], source: ProblemSource | None = None) -> list[Any]:
        """Call a method of the workers for every task, each on a free worker; results are in the order of the tasks.

        Args:
            call: name of the method.
            tasks: its arguments for each call.
            source: the problem that workers build first, unless they have; None if the method needs none.
        """
        # The arguments are the same for every worker.
        items = [WorkItem(call, lambda worker, with_state, task=task: task) for task in tasks]  # type: ignore[misc]
        self.run(items, source)
        return [item.result for item in items]

    def run(
        self,
        items: Sequence[WorkItem],
        source: ProblemSource | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        """Run all items and wait for them; an item runs again if its worker is lost.

        Args:
            items: the items; their results are stored in them.
            source: the problem that workers build first, unless they have; None if the items need none.
            meanwhile: called once while the workers are busy.
        """
        waiting = WorkQueue(items, self.count)
        running: dict[Any, WorkItem] = {}  # by Ray reference
        losses: Counter[WorkItem] = Counter()
        workers = self.started_workers  # those that may take an item
        try:
            while waiting or running:
                self._start_missing_workers()
                self._assign(workers, waiting, running, source)
                before = self._starts, self.lost
                if meanwhile is not None and running:
                    meanwhile()
                    meanwhile = None
                ended = [(ref, running.pop(ref)) for ref in self._wait(list(running))]
                workers = [item.worker for _, item in ended if item.worker is not None]
                failed = [item for ref, item in ended if not self._collect(item, ref, losses)]
                for item in failed:
                    waiting.put_back(item)
                if failed or (self._starts, self.lost) != before:
                    waiting.release_lost()
                    workers = self.started_workers
        finally:
            for ref, item in running.items():
                if item.worker is not None:
                    item.worker.busy.pop(ref, None)

    def _collect(self, item: WorkItem, ref: Any, losses: Counter[WorkItem]) -> bool:
        """Store the result of an item that has ended; returns False if the item must run again.

        Args:
            item: the item.
            ref: Ray's reference to its result.
            losses: how often the worker of each item was lost; updated. More than ``MOST_LOSSES`` raise ``UserError``.
        """
        worker = item.worker
        assert worker is not None
        worker.busy.pop(ref, None)
        try:
            item.result = self._value(ref)
            return True
        except CacheMiss:
            item.with_state = True
        except self.loss_errors as loss:
            if _is_loss_of_other_worker(loss, worker):
                item.with_state = True  # the lost worker should have sent the states
            else:
                self._remove(worker)
                losses[item] += 1
                if losses[item] > MOST_LOSSES:
                    raise self._too_many_losses(loss) from None
        return False

    def run_now(self, item: WorkItem, source: ProblemSource) -> None:
        """Run one item on the least busy worker, while other items may be running.

        If that worker is lost, the next least busy one takes over, ``MOST_LOSSES`` times.
        """
        for _ in range(MOST_LOSSES + 1):
            self._start_missing_workers()
            while not self.started_workers:
                self._wait([])
            worker = min(self.started_workers, key=lambda worker: len(worker.busy))
            try:
                item.result = self.get(self._start(item, worker, source))
                return
            except self.loss_errors as error:
                self._remove(worker)
                last_loss = error
        raise self._too_many_losses(last_loss)

    def close(self) -> None:
        """Stop the workers, unless their Ray cluster has been shut down or replaced."""
        is_connected = self.ray.is_initialized() and self.job == self.ray.get_runtime_context().get_job_id()
        for worker in self.workers:
            worker.is_lost = True
            if is_connected:
                self.ray.kill(worker.actor)
        self.workers, self._starting = [], {}

    def get(self, ref: Any) -> Any:
        """Wait for the value of a reference; an error in a worker is raised as it was raised there."""
        self._wait_for_first([ref])
        return self._value(ref)

    def _value(self, ref: Any) -> Any:
        """The value of a reference that is ready, or the error that the worker raised."""
        try:
            return self.ray.get(ref)
        except self.ray.exceptions.RayTaskError as error:
            raise (error.cause if isinstance(error.cause, Exception) else error) from None

    def _start_missing_workers(self) -> None:
        """Start workers until there are ``count``, without waiting for them."""
        while len(self.workers) < self.count:
            actor = self._remote.remote()
            worker = WorkerHandle(actor, actor.identify.remote())
            self.workers.append(worker)
            self._starting[worker.info_ref] = worker

    def _assign(
        self,
        workers: Sequence[WorkerHandle],
        waiting: WorkQueue,
        running: dict[Any, WorkItem],
        source: ProblemSource | None,
    ) -> None:
        """Give workers their next item, and one more in advance if they have many, so that they never wait.

        Args:
            workers: the workers that may take an item; lost ones are skipped.
            waiting: items to assign; assigned ones are removed.
            running: the running items by Ray reference; assigned ones are added.
            source: the problem that workers build first, unless they have; None if the items need none.
        """
        for queue_length in (1, 2):
            for worker in workers:
                if worker.is_lost or len(worker.busy) >= queue_length:
                    continue
                item = waiting.take(worker, in_advance=queue_length > 1)
                if item is not None:
                    ref = self._start(item, worker, source)
                    worker.busy[ref] = running[ref] = item

    def _start(self, item: WorkItem, worker: WorkerHandle, source: ProblemSource | None) -> Any:
        """Start an item on a worker, which builds the problem first if it has not; returns Ray's reference."""
        arguments = item.arguments(worker, item.with_state)
        if source is not None and worker.problem != source.key:
            self._request_problem(worker, source)
        item.worker, item.start_time = worker, time.monotonic()
        return getattr(worker.actor, item.call).remote(*arguments)

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
        ready = self._wait_for_first(refs, timeout)
        if ready:  # all that are ready, since every call takes time proportional to the number of references
            ready, _ = self.ray.wait(refs, num_returns=len(refs), timeout=0)
        if not ready and not self.process_ids:
            resource = "a free GPU" if self.device == "cuda" else "a free core"
            raise UserError(
                f"no Ray worker started within {START_TIMEOUT:.0f} s; check with ray status that the cluster has a "
                f"node with {resource}, then continue with fedflat resume"
            )
        ended = [ref for ref in ready if ref not in self._starting]
        for ref in ready:
            if ref in self._starting:
                self._register(self._starting.pop(ref))
        return ended

    def _wait_for_first(self, refs: list[Any], timeout: float = math.inf) -> list[Any]:
        """Wait until a reference is ready, and return it in a list, which is empty after ``timeout`` seconds.

        Raises ``UserError`` if the head of the cluster is lost.
        """
        end = time.monotonic() + timeout
        ready: list[Any] = []
        while not ready and (now := time.monotonic()) < end:
            if now > self._head_check_time + HEAD_CHECK_SECONDS:
                advice = "start the cluster again unless fedflat started it, then continue with fedflat resume"
                check_head(self.ray, self._head_address, advice)
                self._head_check_time = now
            ready, _ = self.ray.wait(refs, num_returns=1, timeout=min(HEAD_CHECK_SECONDS, end - now))
        return ready

    def _register(self, worker: WorkerHandle) -> None:
        """Record the identity of a worker that has started; replace it if starting failed."""
        try:
            info = WorkerInfo(*self._value(worker.info_ref))
        except self.loss_errors as loss:
            self._failed_starts += 1
            self._remove(worker)
            if self._failed_starts > MOST_LOSSES:
                raise UserError(
                    f"Ray workers do not start ({first_line(loss)}); is fedflat installed on every node?"
                ) from None
            self._start_missing_workers()
            return
        if info.version != fedflat_version():
            self.close()
            raise UserError(version_mismatch(info.node, info.version, fedflat_version()))
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

    def _too_many_losses(self, loss: Exception) -> UserError:
        """The error that ends a run after the same clients have lost several workers; ``loss`` is the last one."""
        return UserError(
            f"the same clients have lost {MOST_LOSSES + 1} Ray workers, most likely because memory ran out "
            f"({first_line(loss)}); use fewer workers per machine or a smaller batch size, "
            "then continue with fedflat resume"
        )


def _is_loss_of_other_worker(loss: Exception, worker: WorkerHandle) -> bool:
    """Whether ``worker`` still runs, and its call failed because another worker that should send it states was lost."""
    lost_actor = getattr(loss, "actor_id", None)
    return lost_actor is not None and worker.info is not None and lost_actor != worker.info.actor


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
