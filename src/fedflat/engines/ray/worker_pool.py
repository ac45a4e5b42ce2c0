"""The workers of a Ray cluster: each does its own share, takes from others when it is done, and does again what a lost one had."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedflat.engines.ray.cluster import Device, first_line
from fedflat.engines.ray.worker import About, CacheMiss, Source, Worker, other_version, own_version
from fedflat.errors import UserError

MOST_LOSSES = 2
"""So often the same work may lose its worker before it is taken to be the work's fault."""
STARTING = 120.0
"""Seconds in which at least one worker must start where none is left."""

ENOUGH = 30.0
"""Seconds for which more workers are waited for where some are there."""


@dataclass(eq=False)
class WorkerHandle:
    """One worker as the driver sees it."""

    actor: Any
    greeting: Any
    """Its first answer, still awaited; none once it has come."""
    busy: dict[Any, Job] = field(default_factory=dict)
    about: About | None = None
    opened: str = ""
    """The name of the problem it was told to build last."""


@dataclass(eq=False)
class Job:
    """Something for one worker to do."""

    call: str
    arguments: Callable[[WorkerHandle, bool], tuple[Any, ...]]
    """For a worker; whether all must be told, since it has forgotten what it had."""
    home: WorkerHandle | None = None
    """Who does it best."""
    seconds: float = 0.0
    """What it is expected to take."""
    moving: float = 0.0
    """What that is longer where another does it."""
    whole: bool = False
    begun: float = 0.0
    hand: WorkerHandle | None = None
    """Who did it."""
    result: Any = None


class WorkerPool:
    """So many workers, each with one core or a part of a GPU; those that are lost are replaced where the cluster has room."""

    def __init__(self, ray: Any, count: int, device: Device, gpus: float = 1.0) -> None:
        self.ray, self.count, self.device, self.gpus = ray, count, device, gpus
        self.job: str = ray.get_runtime_context().get_job_id()
        self.hands: list[WorkerHandle] = []
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
        self.forgetting: tuple[type[Exception], ...] = (*self.losses, CacheMiss)
        """What a state is lost by."""
        needs = {"num_cpus": 1, "num_gpus": gpus if device == "cuda" else 0}
        self._remote = ray.remote(**needs, max_restarts=0, max_task_retries=0, scheduling_strategy="SPREAD")(Worker)
        self._hire()

    @property
    def present(self) -> list[WorkerHandle]:
        """The workers that are there."""
        return [hand for hand in self.hands if hand.about is not None]

    @property
    def processes(self) -> list[int]:
        """Their process ids."""
        return [hand.about.process for hand in self.hands if hand.about is not None]

    def wait_for_all(self) -> None:
        """Wait until every worker has started, those too that replace lost ones; where others use the cluster, until no more of them do."""
        self._hire()
        while any(hand.about is None for hand in self.hands):
            before = len(self.processes), self._failed_starts
            self._await([], ENOUGH if self.processes else STARTING)
            if self.processes and (len(self.processes), self._failed_starts) == before:
                return

    def open(self, source: Source) -> None:
        """Let every worker that is there build a problem, and wait for it."""
        asked = [(hand, self._told_to_open(hand, source)) for hand in self.present]
        for hand, ref in asked:
            try:
                self.got(ref)
            except self.losses:
                self._dismiss(hand)

    def map(self, call: str, tasks: Sequence[tuple[Any, ...]], source: Source | None = None) -> list[Any]:
        """``call(*task)`` for every task, each on a worker that is free; results in the order of the tasks."""
        jobs = [Job(call, lambda hand, whole, task=task: task) for task in tasks]  # type: ignore[misc]
        self.do(jobs, source)
        return [job.result for job in jobs]

    def do(
        self, jobs: Sequence[Job], source: Source | None = None, meanwhile: Callable[[], None] | None = None
    ) -> None:
        """Do some jobs, with the problem that they are about; ``meanwhile`` is called once, while the workers work."""
        waiting = list(jobs)
        running: dict[Any, Job] = {}
        losses: Counter[Job] = Counter()
        try:
            while waiting or running:
                self._hire()
                self._hand_out(waiting, running, source)
                if meanwhile is not None and running:
                    meanwhile()
                    meanwhile = None
                for ref in self._await(list(running)):
                    job = running.pop(ref)
                    hand = job.hand
                    assert hand is not None
                    hand.busy.pop(ref, None)
                    try:
                        job.result = self.got(ref)
                    except CacheMiss:
                        job.whole = True
                        waiting.insert(0, job)
                    except self.losses as loss:
                        waiting.insert(0, job)
                        if _anothers(loss, hand):
                            job.whole = True
                            continue
                        self._dismiss(hand)
                        losses[job] += 1
                        if losses[job] > MOST_LOSSES:
                            raise self._given_up(loss) from None
        finally:
            for ref, job in running.items():
                if job.hand is not None:
                    job.hand.busy.pop(ref, None)

    def do_now(self, job: Job, source: Source) -> None:
        """Do one job while others may be under way: after them, on the worker that has fewest."""
        for _ in range(MOST_LOSSES + 1):
            self._hire()
            while not self.present:
                self._await([])
            hand = min(self.present, key=lambda hand: len(hand.busy))
            try:
                job.result = self.got(self._begun(job, hand, source))
                return
            except self.losses as error:
                self._dismiss(hand)
                loss = error
        raise self._given_up(loss)

    def close(self) -> None:
        """End the workers."""
        for hand in self.hands:
            self.ray.kill(hand.actor)
        self.hands = []

    def got(self, ref: Any) -> Any:
        """What a reference stands for, once it is there; what went wrong in a worker is raised again as it was there."""
        try:
            return self.ray.get(ref)
        except self.ray.exceptions.RayTaskError as error:
            raise (error.cause if isinstance(error.cause, Exception) else error) from None

    # --- one step of it ----------------------------------------------------------------------------------------------------------

    def _hire(self) -> None:
        while len(self.hands) < self.count:
            actor = self._remote.remote()
            self.hands.append(WorkerHandle(actor, actor.hello.remote()))

    def _hand_out(self, waiting: list[Job], running: dict[Any, Job], source: Source | None) -> None:
        """Give every worker its next job, and while it has many one more, so that it need not wait for the driver."""
        for depth in (1, 2):
            for hand in self.present:
                job = None if len(hand.busy) >= depth else self._next(hand, waiting, ahead=depth > 1)
                if job is None:
                    continue
                waiting.remove(job)
                ref = self._begun(job, hand, source)
                hand.busy[ref] = running[ref] = job

    def _next(self, hand: WorkerHandle, waiting: list[Job], ahead: bool) -> Job | None:
        """What a worker does next: its own, then what is nobody's, then of another's share the end, where moving it pays."""
        own = [job for job in waiting if job.home is hand]
        if own:
            return None if ahead and len(own) == 1 else own[0]
        free = [job for job in waiting if job.home not in self.hands]
        if free:
            return None if ahead and len(free) <= self.count else free[0]
        if ahead or not waiting:
            return None
        late = max({job.home: None for job in waiting}, key=lambda home: self._left(home, waiting))
        job = [job for job in waiting if job.home is late][-1]
        return job if job.moving < self._left(late, waiting) - job.seconds or not job.moving else None

    def _left(self, hand: WorkerHandle | None, waiting: list[Job]) -> float:
        """Seconds until a worker is expected to have done its share."""
        now = time.monotonic()
        under_way = sum(max(0.0, job.seconds - (now - job.begun)) for job in (hand.busy.values() if hand else ()))
        return under_way + sum(job.seconds for job in waiting if job.home is hand)

    def _begun(self, job: Job, hand: WorkerHandle, source: Source | None) -> Any:
        arguments = job.arguments(hand, job.whole)
        if source is not None and hand.opened != source.key:
            self._told_to_open(hand, source)
        job.hand, job.begun = hand, time.monotonic()
        return getattr(hand.actor, job.call).remote(*arguments)

    def _told_to_open(self, hand: WorkerHandle, source: Source) -> Any:
        hand.opened = source.key
        return hand.actor.open.remote(source)

    def _await(self, running: list[Any], patience: float | None = None) -> list[Any]:
        """Wait for something to happen; returns the jobs that ended, and takes note of workers that started."""
        starting = {hand.greeting: hand for hand in self.hands if hand.about is None}
        ready, _ = self.ray.wait(
            [*running, *starting], num_returns=1, timeout=patience or (None if running else STARTING)
        )
        if not ready and not self.processes:
            raise UserError(
                f"no Ray worker has started in {STARTING:.0f} s; see with ray status whether the cluster still has nodes with "
                f"{'a free GPU' if self.device == 'cuda' else 'a free core'}, then go on with fedflat resume"
            )
        for ref in ready:
            if ref in starting:
                self._greet(starting[ref])
        return [ref for ref in ready if ref not in starting]

    def _greet(self, hand: WorkerHandle) -> None:
        try:
            about = About(*self.got(hand.greeting))
        except self.losses as loss:
            self._failed_starts += 1
            self._dismiss(hand)
            if self._failed_starts > MOST_LOSSES:
                raise UserError(
                    f"Ray workers do not start ({first_line(loss)}); is fedflat installed on every node?"
                ) from None
            self._hire()
            return
        if about.version != own_version():
            self.close()
            raise UserError(other_version(about.node, about.version, own_version()))
        hand.about, self._failed_starts = about, 0

    def _dismiss(self, hand: WorkerHandle) -> None:
        if hand in self.hands:
            self.hands.remove(hand)
            self.lost += 1
            self.ray.kill(hand.actor)

    def _given_up(self, loss: Exception) -> UserError:
        return UserError(
            f"the same clients have lost {MOST_LOSSES + 1} Ray workers, most likely because memory ran out ({first_line(loss)}); "
            "use fewer workers per machine or a smaller batch, then go on with fedflat resume"
        )


def _anothers(loss: Exception, hand: WorkerHandle) -> bool:
    """Whether it is another worker that was lost, which was to hand something over."""
    lost = getattr(loss, "actor_id", None)
    return lost is not None and hand.about is not None and lost != hand.about.actor


_crew: WorkerPool | None = None


def crew_of(ray: Any, count: int, device: Device, gpus: float = 1.0) -> WorkerPool:
    """The crew of this process, started anew only when another one is asked for: starting workers costs seconds."""
    global _crew  # noqa: PLW0603
    job = ray.get_runtime_context().get_job_id()
    if _crew is None or (_crew.job, _crew.count, _crew.device, _crew.gpus) != (job, count, device, gpus):
        close_crew()
        _crew = WorkerPool(ray, count, device, gpus)
    return _crew


def close_crew() -> None:
    """End the workers of this process."""
    global _crew  # noqa: PLW0603
    if _crew is not None and _crew.ray.is_initialized() and _crew.job == _crew.ray.get_runtime_context().get_job_id():
        _crew.close()
    _crew = None
