"""The workers of a Ray cluster: each does its own share, helps others when done, and replaces lost workers."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedflat.engines.ray.cluster import Device, first_line
from fedflat.engines.ray.messages import ProblemSource, WorkerInfo
from fedflat.engines.ray.worker import CacheMiss, Worker, own_version, version_mismatch
from fedflat.errors import UserError

MOST_LOSSES = 2
"""How often the same work may lose its worker before the work itself is blamed."""
START_TIMEOUT = 120.0
"""Seconds in which at least one worker must start if none is left."""
EXTRA_TIMEOUT = 30.0
"""Seconds to wait for more workers if some have started."""


@dataclass(eq=False)
class WorkerHandle:
    """A worker as the driver sees it.

    Attributes:
        actor: Ray's actor.
        greeting: reference to its first answer.
        busy: its running work, by Ray reference.
        info: its first answer; None while it starts.
        opened: key of the problem that it was last told to build.
    """

    actor: Any
    greeting: Any
    busy: dict[Any, WorkItem] = field(default_factory=dict)
    info: WorkerInfo | None = None
    opened: str = ""


@dataclass(eq=False)
class WorkItem:
    """A call to one worker.

    Attributes:
        call: name of the worker's method.
        arguments: its arguments, for a given worker; the flag asks for complete states, after a cache miss.
        home: the worker with the clients' states, if any.
        seconds: expected duration.
        moving: extra seconds on a worker without the clients' states.
        with_state: whether to send complete states.
        started: when it was started.
        worker: who did it.
        result: what the call returned.
    """

    call: str
    arguments: Callable[[WorkerHandle, bool], tuple[Any, ...]]
    home: WorkerHandle | None = None
    seconds: float = 0.0
    moving: float = 0.0
    with_state: bool = False
    started: float = 0.0
    worker: WorkerHandle | None = None
    result: Any = None


class WorkerPool:
    """A number of workers, each with one core or a share of a GPU; lost ones are replaced if the cluster has room.

    Args:
        ray: the connected Ray module.
        count: workers to start.
        device: where they train.
        gpus: share of a GPU for each.
    """

    def __init__(self, ray: Any, count: int, device: Device, gpus: float = 1.0) -> None:
        self.ray, self.count, self.device, self.gpus = ray, count, device, gpus
        self.job: str = ray.get_runtime_context().get_job_id()
        self.workers: list[WorkerHandle] = []
        self.lost = 0
        """Workers lost so far."""
        self._failed_starts = 0
        errors = ray.exceptions
        self.losses: tuple[type[Exception], ...] = (
            errors.RayActorError,
            errors.ObjectLostError,
            errors.WorkerCrashedError,
            errors.NodeDiedError,
            errors.OutOfMemoryError,
        )
        """Errors that mean a lost worker."""
        self.state_losses: tuple[type[Exception], ...] = (*self.losses, CacheMiss)
        """Errors that mean a lost state."""
        needs = {"num_cpus": 1, "num_gpus": gpus if device == "cuda" else 0}
        self._remote = ray.remote(**needs, max_restarts=0, max_task_retries=0, scheduling_strategy="SPREAD")(Worker)
        self._start_missing()

    @property
    def present(self) -> list[WorkerHandle]:
        """The workers that have started."""
        return [worker for worker in self.workers if worker.info is not None]

    @property
    def processes(self) -> list[int]:
        """Their process ids."""
        return [worker.info.process for worker in self.workers if worker.info is not None]

    def wait_for_all(self) -> None:
        """Wait until all workers have started, or no more do because others use the cluster."""
        self._start_missing()
        while any(worker.info is None for worker in self.workers):
            before = len(self.processes), self._failed_starts
            self._wait([], EXTRA_TIMEOUT if self.processes else START_TIMEOUT)
            if self.processes and (len(self.processes), self._failed_starts) == before:
                return

    def open(self, source: ProblemSource) -> None:
        """Make every present worker build a problem, and wait for it."""
        requests = [(worker, self._request_open(worker, source)) for worker in self.present]
        for worker, ref in requests:
            try:
                self.get(ref)
            except self.losses:
                self._dismiss(worker)

    def map(self, call: str, tasks: Sequence[tuple[Any, ...]], source: ProblemSource | None = None) -> list[Any]:
        """``call(*task)`` for every task, each on a free worker; results are in the order of the tasks."""
        items = [WorkItem(call, lambda worker, with_state, task=task: task) for task in tasks]  # type: ignore[misc]
        self.run(items, source)
        return [item.result for item in items]

    def run(
        self,
        items: Sequence[WorkItem],
        source: ProblemSource | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        """Do all items.

        Args:
            items: the work; results are stored in them.
            source: the problem that workers need for it.
            meanwhile: called once while the workers are busy.
        """
        waiting = list(items)
        running: dict[Any, WorkItem] = {}
        losses: Counter[WorkItem] = Counter()
        try:
            while waiting or running:
                self._start_missing()
                self._assign(waiting, running, source)
                if meanwhile is not None and running:
                    meanwhile()
                    meanwhile = None
                for ref in self._wait(list(running)):
                    item = running.pop(ref)
                    worker = item.worker
                    assert worker is not None
                    worker.busy.pop(ref, None)
                    try:
                        item.result = self.get(ref)
                    except CacheMiss:
                        item.with_state = True
                        waiting.insert(0, item)
                    except self.losses as loss:
                        waiting.insert(0, item)
                        if _is_of_another(loss, worker):
                            item.with_state = True
                            continue
                        self._dismiss(worker)
                        losses[item] += 1
                        if losses[item] > MOST_LOSSES:
                            raise self._too_many_losses(loss) from None
        finally:
            for ref, item in running.items():
                if item.worker is not None:
                    item.worker.busy.pop(ref, None)

    def run_now(self, item: WorkItem, source: ProblemSource) -> None:
        """Do one item on the least busy worker, while other work may be running."""
        for _ in range(MOST_LOSSES + 1):
            self._start_missing()
            while not self.present:
                self._wait([])
            worker = min(self.present, key=lambda worker: len(worker.busy))
            try:
                item.result = self.get(self._start(item, worker, source))
                return
            except self.losses as error:
                self._dismiss(worker)
                loss = error
        raise self._too_many_losses(loss)

    def close(self) -> None:
        """Stop the workers."""
        for worker in self.workers:
            self.ray.kill(worker.actor)
        self.workers = []

    def get(self, ref: Any) -> Any:
        """The value of a reference; an error in a worker is raised as it was raised there."""
        try:
            return self.ray.get(ref)
        except self.ray.exceptions.RayTaskError as error:
            raise (error.cause if isinstance(error.cause, Exception) else error) from None

    def _start_missing(self) -> None:
        while len(self.workers) < self.count:
            actor = self._remote.remote()
            self.workers.append(WorkerHandle(actor, actor.hello.remote()))

    def _assign(self, waiting: list[WorkItem], running: dict[Any, WorkItem], source: ProblemSource | None) -> None:
        """Give every worker its next item, and one more in advance if it has many, so that it never waits."""
        for depth in (1, 2):
            for worker in self.present:
                item = None if len(worker.busy) >= depth else self._next(worker, waiting, ahead=depth > 1)
                if item is None:
                    continue
                waiting.remove(item)
                ref = self._start(item, worker, source)
                worker.busy[ref] = running[ref] = item

    def _next(self, worker: WorkerHandle, waiting: list[WorkItem], ahead: bool) -> WorkItem | None:
        """A worker's next item: its own, then unassigned ones, then the slowest worker's last if moving it pays off."""
        own = [item for item in waiting if item.home is worker]
        if own:
            return None if ahead and len(own) == 1 else own[0]
        free = [item for item in waiting if item.home not in self.workers]
        if free:
            return None if ahead and len(free) <= self.count else free[0]
        if ahead or not waiting:
            return None
        slowest = max({item.home: None for item in waiting}, key=lambda home: self._left(home, waiting))
        item = [item for item in waiting if item.home is slowest][-1]
        return item if item.moving < self._left(slowest, waiting) - item.seconds or not item.moving else None

    def _left(self, worker: WorkerHandle | None, waiting: list[WorkItem]) -> float:
        """Seconds until a worker is expected to finish its share."""
        now = time.monotonic()
        running = worker.busy.values() if worker else ()
        under_way = sum(max(0.0, item.seconds - (now - item.started)) for item in running)
        return under_way + sum(item.seconds for item in waiting if item.home is worker)

    def _start(self, item: WorkItem, worker: WorkerHandle, source: ProblemSource | None) -> Any:
        arguments = item.arguments(worker, item.with_state)
        if source is not None and worker.opened != source.key:
            self._request_open(worker, source)
        item.worker, item.started = worker, time.monotonic()
        return getattr(worker.actor, item.call).remote(*arguments)

    def _request_open(self, worker: WorkerHandle, source: ProblemSource) -> Any:
        worker.opened = source.key
        return worker.actor.open.remote(source)

    def _wait(self, running: list[Any], patience: float | None = None) -> list[Any]:
        """Wait until an item ends or a worker starts; returns the references of ended items."""
        starting = {worker.greeting: worker for worker in self.workers if worker.info is None}
        timeout = patience or (None if running else START_TIMEOUT)
        ready, _ = self.ray.wait([*running, *starting], num_returns=1, timeout=timeout)
        if not ready and not self.processes:
            resource = "a free GPU" if self.device == "cuda" else "a free core"
            raise UserError(
                f"no Ray worker started within {START_TIMEOUT:.0f} s; check with ray status that the cluster has a "
                f"node with {resource}, then continue with fedflat resume"
            )
        for ref in ready:
            if ref in starting:
                self._welcome(starting[ref])
        return [ref for ref in ready if ref not in starting]

    def _welcome(self, worker: WorkerHandle) -> None:
        try:
            info = WorkerInfo(*self.get(worker.greeting))
        except self.losses as loss:
            self._failed_starts += 1
            self._dismiss(worker)
            if self._failed_starts > MOST_LOSSES:
                raise UserError(
                    f"Ray workers do not start ({first_line(loss)}); is fedflat installed on every node?"
                ) from None
            self._start_missing()
            return
        if info.version != own_version():
            self.close()
            raise UserError(version_mismatch(info.node, info.version, own_version()))
        worker.info, self._failed_starts = info, 0

    def _dismiss(self, worker: WorkerHandle) -> None:
        if worker in self.workers:
            self.workers.remove(worker)
            self.lost += 1
            self.ray.kill(worker.actor)

    def _too_many_losses(self, loss: Exception) -> UserError:
        return UserError(
            f"the same clients have lost {MOST_LOSSES + 1} Ray workers, most likely because memory ran out "
            f"({first_line(loss)}); use fewer workers per machine or a smaller batch size, "
            "then continue with fedflat resume"
        )


def _is_of_another(loss: Exception, worker: WorkerHandle) -> bool:
    """Whether the lost worker is another one, which should have handed over states."""
    lost = getattr(loss, "actor_id", None)
    return lost is not None and worker.info is not None and lost != worker.info.actor


_pool: WorkerPool | None = None


def worker_pool(ray: Any, count: int, device: Device, gpus: float = 1.0) -> WorkerPool:
    """The pool of this process, restarted only if another kind is requested: starting workers takes seconds."""
    global _pool  # noqa: PLW0603
    job = ray.get_runtime_context().get_job_id()
    if _pool is None or (_pool.job, _pool.count, _pool.device, _pool.gpus) != (job, count, device, gpus):
        close_worker_pool()
        _pool = WorkerPool(ray, count, device, gpus)
    return _pool


def close_worker_pool() -> None:
    """Stop the workers of this process."""
    global _pool  # noqa: PLW0603
    if _pool is not None and _pool.ray.is_initialized() and _pool.job == _pool.ray.get_runtime_context().get_job_id():
        _pool.close()
    _pool = None
