"""The runs of a sweep spread over a Ray cluster: each is a task on one of its nodes, with one core or GPU, and lies in a shared folder.

All that is known of a run lies in its folder, so that nothing is lost with a node: whoever gets the run next goes on from there.
"""

from __future__ import annotations

import math
import os
import pickle
import socket
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fedflat.data.data_dir import VARIABLE, data_dir
from fedflat.engines.cpu.worker_pool import keep_memory, use_cores
from fedflat.engines.ray.cluster import connect, device_for, first_line
from fedflat.engines.ray.worker import own_version, version_mismatch
from fedflat.engines.ray.worker_pool import MOST_LOSSES, close_worker_pool
from fedflat.errors import UserError
from fedflat.experiment.callback import Callback
from fedflat.experiment.campaign.following import Followed
from fedflat.experiment.campaign.processes import Results, Work
from fedflat.experiment.config import Config

SECONDS_BETWEEN_LOOKS = 0.5
"""At the folders of runs that go on."""
AHEAD = 1
"""Runs that wait at the cluster, so that a core that is done need not wait for this process."""


class Unfit(UserError):
    """A node that cannot do any run of this sweep; it would fail all it is given, and fast, so that it ends the sweep."""


class Needs(NamedTuple):
    """What a run takes of a node."""

    cores: int
    gpus: float

    def fit(self, node: dict[str, Any]) -> bool:
        """Whether a node has as much, free or not."""
        there = node["Resources"]
        return bool(node["Alive"]) and there.get("CPU", 0) >= self.cores and there.get("GPU", 0) >= self.gpus

    def __str__(self) -> str:
        return f"{self.cores} core{'s' * (self.cores != 1)}" + (" and a GPU" if self.gpus else "")


class Place(NamedTuple):
    """Where a sweep is: what its nodes must see, and from where they read paths."""

    marker: Path
    """A file of the shared folder."""
    content: bytes
    data: Path
    """Where datasets lie, unless a run says otherwise."""
    folder: Path
    """From which relative paths are read."""

    @classmethod
    def here(cls, marker: Path) -> Place:
        """As this process sees it."""
        return cls(marker.absolute(), marker.read_bytes(), data_dir().absolute(), Path.cwd())

    def enter(self) -> None:
        """Be there, on the node of this process; refused where that sees another folder or none."""
        found = self.marker.read_bytes() if self.marker.is_file() else None
        if found != self.content:
            raise Unfit(
                f"node {socket.gethostname()} of the Ray cluster does not see the sweep's folder {self.marker.parent}; "
                "choose one that all nodes share, with --out"
            )
        os.environ[VARIABLE] = str(self.data)
        with suppress(OSError):  # only paths that are not absolute are read from here
            os.chdir(self.folder)


class Spread:
    """The runs of a sweep on their way through a cluster.

    A run whose node or process is lost is given to another, which goes on from its last checkpoint; after ``MOST_LOSSES`` it is given up.
    """

    def __init__(self, ray: Any, work: Sequence[Work], place: Place, jobs: int | None) -> None:
        self.ray, self.work, self.place, self.jobs = ray, work, place, jobs
        self.waiting = deque(range(len(work)))
        self.running: dict[Any, int] = {}
        self.losses: Counter[int] = Counter()
        self._devices: dict[str, float] = {}

    def hand_out(self) -> None:
        """Give the cluster as many runs as it has cores, or as are asked for."""
        room = self.jobs or int(self.ray.cluster_resources().get("CPU", 0)) + AHEAD
        while self.waiting and len(self.running) < room:
            number = self.waiting.popleft()
            self.running[self._begun(self.work[number])] = number
        self._check_room()

    def _begun(self, one: Work) -> Any:
        needs = self._needs(one.config)
        options = {"num_cpus": needs.cores, "num_gpus": needs.gpus, "max_retries": 0, "scheduling_strategy": "SPREAD"}
        return self.ray.remote(**options)(do_run).remote(own_version(), pickle.dumps((self.place, one, needs.cores)))

    def _needs(self, config: Config) -> Needs:
        """A core for each worker process, and where that is decided at first a GPU, which later runs do not go without."""
        wanted = config.engine.device
        if wanted not in self._devices:
            self._devices[wanted] = self._share() if device_for(self.ray, wanted) == "cuda" else 0.0
        return Needs(config.engine.workers or 1, self._devices[wanted])

    def _share(self) -> float:
        """What a run gets of a GPU: all, unless more runs are asked for than there are GPUs."""
        gpus: float = self.ray.cluster_resources()["GPU"]
        return 1 / math.ceil(max(1, (self.jobs or 1) / gpus))

    def _check_room(self) -> None:
        """Refuse to wait for nodes that are not there (any more)."""
        nodes = self.ray.nodes()
        for needs in {self._needs(self.work[number].config) for number in self.running.values()}:
            if not any(needs.fit(node) for node in nodes):
                raise UserError(
                    f"no node of the Ray cluster has {needs}, which a run of this sweep takes; add one, or lower engine.workers, "
                    "and start the sweep again: it goes on from here"
                )

    def outcomes(self) -> Iterator[tuple[int, UserError | None]]:
        """The numbers of runs that have ended, each with what was wrong, if anything; waits a little where there are none."""
        ready, _ = self.ray.wait(list(self.running), num_returns=1, timeout=SECONDS_BETWEEN_LOOKS)
        for ref in ready:
            number = self.running.pop(ref)
            try:
                self.ray.get(ref)
                yield number, None
            except self.ray.exceptions.RayTaskError as error:
                yield number, self._told(error)
            except self.ray.exceptions.RayError as loss:
                self.losses[number] += 1
                if self.losses[number] <= MOST_LOSSES:
                    self.waiting.appendleft(number)
                else:
                    why = f"most likely because memory ran out ({first_line(loss)})"
                    yield (
                        number,
                        UserError(
                            f"it has lost {self.losses[number]} Ray workers, {why}; use fewer jobs or a smaller batch"
                        ),
                    )

    def _told(self, error: Any) -> UserError:
        """A mistake of the user's; one of ours, or of a node, is raised here."""
        if isinstance(error.cause, UserError) and not isinstance(error.cause, Unfit):
            return error.cause
        if "failed to import" in str(error.cause):  # so Ray says it, and has no error of its own for that
            raise Unfit(
                "a node of the Ray cluster cannot import fedflat; is fedflat installed on every node?"
            ) from None
        raise (error.cause if isinstance(error.cause, Exception) else error) from None

    def end(self) -> None:
        """End what still runs: in the middle of a round, maybe, but what it has written is whole."""
        for ref in self.running:
            self.ray.cancel(ref, force=True)


def spread(
    work: Sequence[Work], address: str, jobs: int | None, callbacks: tuple[Callback, ...], marker: Path
) -> Results:
    """Every run's number and record, or why there is none, as they end; a run that fails does not stop the others.

    ``marker`` is a file in the folder that all nodes share, by which they show that they see it.
    """
    if not all(callback.from_afar for callback in callbacks):
        raise UserError(
            "these callbacks look at runs of this process, which runs on a Ray cluster are not; leave one of them out"
        )
    close_worker_pool()  # of runs with engine.name=ray that this process did before: it would keep its cores
    doing = Spread(connect(address, None, "ray_address"), work, Place.here(marker), jobs)
    followed = [Followed(one.config, one.folder, callbacks) for one in work if one.folder]
    try:
        while doing.waiting or doing.running:
            doing.hand_out()
            for number, mistake in doing.outcomes():
                yield number, mistake or followed[number].ended()
            for number in doing.running.values():
                followed[number].look()
    finally:
        doing.end()


def do_run(version: str, packed: bytes) -> None:
    """Do a run on the node that it was given to. Packed, since another version of fedflat could not even read it."""
    if own_version() != version:
        raise Unfit(version_mismatch(socket.gethostname(), own_version(), version))
    place, work, cores = pickle.loads(packed)
    place.enter()
    torch.set_num_threads(1)
    use_cores(cores)
    keep_memory()
    work.go(())
