"""The workers of a Ray cluster: work is handed to whoever is free, and what a lost worker had is done again by another."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fedflat.engines.ray_cluster import Device, first_line
from fedflat.engines.ray_worker import About, Worker, other_version, own_version
from fedflat.errors import UserError

MOST_LOSSES = 2
"""So often the same work may lose its worker before it is taken to be the work's fault."""
STARTING = 120.0
"""Seconds in which at least one worker must start where none is left."""

ENOUGH = 30.0
"""Seconds for which more workers are waited for where some are there."""


@dataclass(eq=False)
class Hand:
    """One worker as the driver sees it."""

    actor: Any
    greeting: Any
    """Its first answer, still awaited; none once it has come."""
    busy: set[Any] = field(default_factory=set)
    about: About | None = None


class Crew:
    """So many workers, each with one core or GPU; those that are lost are replaced where the cluster has room."""

    def __init__(self, ray: Any, count: int, device: Device) -> None:
        self.ray, self.count, self.device = ray, count, device
        self.job: str = ray.get_runtime_context().get_job_id()
        self.hands: list[Hand] = []
        self.lost = 0
        """Workers lost so far."""
        self._failed_starts = 0
        errors = ray.exceptions
        self._losses: tuple[type[Exception], ...] = (
            errors.RayActorError,
            errors.ObjectLostError,
            errors.WorkerCrashedError,
            errors.NodeDiedError,
            errors.OutOfMemoryError,
        )
        gpus = 1 if device == "cuda" else 0
        self._remote = ray.remote(num_cpus=1, num_gpus=gpus, max_restarts=0, max_task_retries=0, scheduling_strategy="SPREAD")(Worker)
        self._hire()

    @property
    def processes(self) -> list[int]:
        """The process ids of the workers that are there."""
        return [hand.about.process for hand in self.hands if hand.about is not None]

    def wait_for_all(self) -> None:
        """Wait until every worker has started, those too that replace lost ones; where others use the cluster, until no more of them do."""
        self._hire()
        while any(hand.about is None for hand in self.hands):
            before = len(self.processes)
            self._await([], ENOUGH if before else STARTING)
            if before and len(self.processes) == before:
                return

    def each(self, call: str, *task: Any) -> list[Any]:
        """``call(*task)`` on every worker that is there."""
        asked = [(hand, getattr(hand.actor, call).remote(*task)) for hand in self.hands if hand.about is not None]
        answers = []
        for hand, ref in asked:
            try:
                answers.append(self._got(ref))
            except self._losses:
                self._dismiss(hand)
        return answers

    def map(self, call: str, tasks: Sequence[tuple[Any, ...]]) -> list[Any]:
        """``call(*task)`` for every task, each on a worker that is free; results in the order of the tasks."""
        waiting = deque(range(len(tasks)))
        results: list[Any] = [None] * len(tasks)
        running: dict[Any, tuple[Hand, int]] = {}
        losses: Counter[int] = Counter()
        try:
            while waiting or running:
                self._hire()
                self._hand_out(call, tasks, waiting, running)
                for ref in self._await(list(running)):
                    hand, index = running.pop(ref)
                    hand.busy.discard(ref)
                    try:
                        results[index] = self._got(ref)
                    except self._losses as loss:
                        self._dismiss(hand)
                        losses[index] += 1
                        if losses[index] > MOST_LOSSES:
                            raise self._given_up(loss) from None
                        waiting.appendleft(index)
        finally:
            for ref, (hand, _) in running.items():
                hand.busy.discard(ref)
        return results

    def close(self) -> None:
        """End the workers."""
        for hand in self.hands:
            self.ray.kill(hand.actor)
        self.hands = []

    # --- one step of it ----------------------------------------------------------------------------------------------------------

    def _hire(self) -> None:
        while len(self.hands) < self.count:
            actor = self._remote.remote()
            self.hands.append(Hand(actor, actor.hello.remote()))

    def _hand_out(self, call: str, tasks: Sequence[tuple[Any, ...]], waiting: deque[int], running: dict[Any, tuple[Hand, int]]) -> None:
        """Give every worker its next task, and while there are many one more, so that it need not wait for the driver."""
        for depth in (1, 2):
            for hand in self.hands:
                enough = not waiting or (depth > 1 and len(waiting) <= self.count)
                if hand.about is None or len(hand.busy) >= depth or enough:
                    continue
                index = waiting.popleft()
                ref = getattr(hand.actor, call).remote(*tasks[index])
                hand.busy.add(ref)
                running[ref] = hand, index

    def _await(self, running: list[Any], patience: float | None = None) -> list[Any]:
        """Wait for something to happen; returns the tasks that ended, and takes note of workers that started."""
        starting = {hand.greeting: hand for hand in self.hands if hand.about is None}
        ready, _ = self.ray.wait([*running, *starting], num_returns=1, timeout=patience or (None if running else STARTING))
        if not ready and not self.processes:
            raise UserError(
                f"no Ray worker has started in {STARTING:.0f} s; see with ray status whether the cluster still has nodes with "
                f"{'a free GPU' if self.device == 'cuda' else 'a free core'}, then go on with fedflat resume"
            )
        for ref in ready:
            if ref in starting:
                self._greet(starting[ref])
        return [ref for ref in ready if ref not in starting]

    def _greet(self, hand: Hand) -> None:
        try:
            about = About(*self._got(hand.greeting))
        except self._losses as loss:
            self._failed_starts += 1
            self._dismiss(hand)
            if self._failed_starts > MOST_LOSSES:
                raise UserError(f"Ray workers do not start ({first_line(loss)}); is fedflat installed on every node?") from None
            self._hire()
            return
        if about.version != own_version():
            self.close()
            raise UserError(other_version(about.node, about.version, own_version()))
        hand.about, self._failed_starts = about, 0

    def _got(self, ref: Any) -> Any:
        try:
            return self.ray.get(ref)
        except self.ray.exceptions.RayTaskError as error:
            # What went wrong in a worker is raised again where the run is, as it was there.
            raise (error.cause if isinstance(error.cause, Exception) else error) from None

    def _dismiss(self, hand: Hand) -> None:
        if hand in self.hands:
            self.hands.remove(hand)
            self.lost += 1
            self.ray.kill(hand.actor)

    def _given_up(self, loss: Exception) -> UserError:
        return UserError(
            f"the same clients have lost {MOST_LOSSES + 1} Ray workers, most likely because memory ran out ({first_line(loss)}); "
            "use fewer workers per machine or a smaller batch, then go on with fedflat resume"
        )


_crew: Crew | None = None


def crew_of(ray: Any, count: int, device: Device) -> Crew:
    """The crew of this process, started anew only when another one is asked for: starting workers costs seconds."""
    global _crew  # noqa: PLW0603
    job = ray.get_runtime_context().get_job_id()
    if _crew is None or (_crew.job, _crew.count, _crew.device) != (job, count, device):
        close_crew()
        _crew = Crew(ray, count, device)
    return _crew


def close_crew() -> None:
    """End the workers of this process."""
    global _crew  # noqa: PLW0603
    if _crew is not None and _crew.ray.is_initialized() and _crew.job == _crew.ray.get_runtime_context().get_job_id():
        _crew.close()
    _crew = None
