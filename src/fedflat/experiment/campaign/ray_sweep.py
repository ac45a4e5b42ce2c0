"""Run a sweep on a Ray cluster: each run is a task on one node, with a core or a GPU, and writes to a shared folder.

The folder of a run holds its complete state, so if a node is lost, another one resumes the run from there.
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

from fedflat.data.sources.source import DATA_DIR_VARIABLE, data_dir
from fedflat.engines.ray.cluster import check_head, choose_device, connect
from fedflat.engines.ray.worker import fedflat_version, version_mismatch
from fedflat.engines.ray.worker_pool import MOST_LOSSES, close_worker_pool
from fedflat.errors import UserError, first_line
from fedflat.experiment.analysis.reopen import primary_model
from fedflat.experiment.callback import Callback, RemoteCallback, require_remote
from fedflat.experiment.campaign.processes import DistantRun, Results, RunTask
from fedflat.experiment.config import Config
from fedflat.experiment.store.files import DamagedFile
from fedflat.experiment.store.run_folder import Record, RunFolder, load_record
from fedflat.operating_system import keep_freed_memory
from fedflat.processes import use_cores
from fedflat.registry import load_plugins, loaded_plugins

SECONDS_BETWEEN_POLLS = 0.5
"""Seconds between two reads of the folders of runs in progress."""
QUEUED_RUNS = 1
"""Number of runs submitted beyond the number of cores, so that a free core need not wait for this process."""


class UnfitNode(UserError):
    """A node cannot execute any run. The sweep stops, because all runs sent to this node would fail quickly."""


class RunResources(NamedTuple):
    """The resources of a node that a run needs."""

    cores: int
    gpus: float
    """Number of GPUs; a fraction if several runs share a GPU."""

    def fit_on(self, node: dict[str, Any]) -> bool:
        """Whether a node of ``ray.nodes()`` has these resources, free or in use."""
        resources = node["Resources"]
        return bool(node["Alive"]) and resources.get("CPU", 0) >= self.cores and resources.get("GPU", 0) >= self.gpus

    def __str__(self) -> str:
        return f"{self.cores} core{'s' * (self.cores != 1)}" + (" and a GPU" if self.gpus else "")


class SweepLocation(NamedTuple):
    """The folders of a sweep, and a file by which nodes recognise that they share them."""

    marker: Path
    """A file in the shared folder."""
    content: bytes
    """Content of the marker."""
    data: Path
    """Default folder of datasets."""
    folder: Path
    """Working directory, for relative paths."""
    plugins: tuple[str, ...]
    """Paths of the plugins to load."""

    @classmethod
    def of_this_process(cls, marker: Path) -> SweepLocation:
        """The location as this process sees it."""
        return cls(marker.absolute(), marker.read_bytes(), data_dir().absolute(), Path.cwd(), tuple(loaded_plugins()))

    def enter(self) -> None:
        """Use the sweep's folders and plugins in this process, on a node of the cluster.

        Raises:
            UnfitNode: the node does not see the shared folder.
        """
        content = self.marker.read_bytes() if self.marker.is_file() else None
        if content != self.content:
            raise UnfitNode(
                f"node {socket.gethostname()} of the Ray cluster does not see the sweep's folder {self.marker.parent}; "
                "choose a folder that all nodes share, with --out"
            )
        os.environ[DATA_DIR_VARIABLE] = str(self.data)
        with suppress(OSError):  # the folder may not exist here; only relative paths need it
            os.chdir(self.folder)
        load_plugins(self.plugins)


class ClusterSchedule:
    """Submits the runs of a sweep to a cluster and collects their results.

    A run whose node or process is lost goes to another one, which resumes it from its last checkpoint; after
    ``MOST_LOSSES`` losses it fails.
    """

    def __init__(self, ray: Any, tasks: Sequence[RunTask], location: SweepLocation, jobs: int | None) -> None:
        self.ray, self.tasks, self.location, self.jobs = ray, tasks, location, jobs
        self.waiting = deque(range(len(tasks)))
        self.running: dict[Any, int] = {}  # task index by Ray's object reference
        self.lost_workers: Counter[int] = Counter()  # lost nodes or processes by task index
        # Fraction of a GPU that a run needs, by the setting engine.device.
        self._gpu_shares: dict[str, float] = {}

    def submit(self) -> None:
        """Submit waiting runs until ``jobs`` are running; default: one per core of the cluster, and one in reserve."""
        limit = self.jobs or int(self.ray.cluster_resources().get("CPU", 0)) + QUEUED_RUNS
        while self.waiting and len(self.running) < limit:
            index = self.waiting.popleft()
            self.running[self._start(self.tasks[index])] = index
        self._check_nodes()

    def _start(self, task: RunTask) -> Any:
        """Submit a run and return Ray's reference to it; Ray does not retry it, because ``outcomes`` does."""
        needs = self._resources(task.config)
        options = {"num_cpus": needs.cores, "num_gpus": needs.gpus, "max_retries": 0, "scheduling_strategy": "SPREAD"}
        packed = pickle.dumps((self.location, task, needs.cores))
        return self.ray.remote(**options)(run_on_node).remote(fedflat_version(), packed)

    def _resources(self, config: Config) -> RunResources:
        """What a run needs: one core per worker process, and a share of a GPU if its device setting selects CUDA."""
        device = config.engine.device
        if device not in self._gpu_shares:
            gpus = self.ray.cluster_resources()["GPU"] if choose_device(self.ray, device) == "cuda" else 0
            # A run gets a whole GPU, unless ``jobs`` exceeds the number of GPUs.
            self._gpu_shares[device] = 1 / math.ceil(max(1, (self.jobs or 1) / gpus)) if gpus else 0.0
        return RunResources(config.engine.workers or 1, self._gpu_shares[device])

    def _check_nodes(self) -> None:
        """Raise a ``UserError`` if no node can ever execute a submitted run, for which Ray would wait forever."""
        nodes = self.ray.nodes()
        for needs in {self._resources(self.tasks[index].config) for index in self.running.values()}:
            if not any(needs.fit_on(node) for node in nodes):
                raise UserError(
                    f"a run of this sweep needs {needs}, which no node of the Ray cluster has; "
                    "add such a node or lower engine.workers, then start the sweep again to continue"
                )

    def outcomes(self) -> Iterator[tuple[int, UserError | None]]:
        """Wait briefly for a run to end; yields its index, with its error if it failed, or nothing.

        A run whose worker was lost is queued again instead, up to ``MOST_LOSSES`` times.
        """
        ready, _ = self.ray.wait(list(self.running), num_returns=1, timeout=SECONDS_BETWEEN_POLLS)
        for reference in ready:
            index = self.running.pop(reference)
            failure: UserError | None = None
            try:
                self.ray.get(reference)
            except self.ray.exceptions.RayTaskError as error:
                failure = self._user_error(error)
            except self.ray.exceptions.RayError as error:
                self.lost_workers[index] += 1
                if self.lost_workers[index] <= MOST_LOSSES:
                    self.waiting.appendleft(index)
                    continue
                failure = UserError(
                    f"it lost {self.lost_workers[index]} Ray workers, most likely because memory ran out "
                    f"({first_line(error)}); use fewer jobs or a smaller batch size"
                )
            yield index, failure

    def _user_error(self, error: Any) -> UserError:
        """The ``UserError`` that a run failed with; any other error is raised, and so is ``UnfitNode``."""
        if isinstance(error.cause, UserError) and not isinstance(error.cause, UnfitNode):
            return error.cause
        if "failed to import" in str(error.cause):  # Ray has no error class for this
            raise UnfitNode("a node of the Ray cluster cannot import fedflat; install fedflat on every node") from None
        raise (error.cause if isinstance(error.cause, Exception) else error) from None

    def cancel(self) -> None:
        """Stop the runs in progress, unless the cluster is lost; their files stay valid, so they can be resumed."""
        if self.ray.is_initialized():
            for reference in self.running:
                self.ray.cancel(reference, force=True)


def run_on_cluster(
    tasks: Sequence[RunTask], address: str, jobs: int | None, callbacks: tuple[Callback, ...], marker: Path
) -> Results:
    """Run tasks on a Ray cluster and yield results as they arrive; a task that fails does not stop the others.

    Args:
        tasks: tasks with absolute folders that all nodes share.
        address: the cluster's ``HOST:PORT``, or ``auto``.
        jobs: largest number of concurrent runs; default: as many as the cluster has cores.
        callbacks: callbacks that can observe runs in other processes.
        marker: a file in the shared folder, by which nodes recognise that they share it.
    """
    remote_callbacks = require_remote(callbacks)
    close_worker_pool()  # workers of an earlier run with engine.name=ray would keep their cores
    ray = connect(address, None, "ray_address")
    head_address = str(ray.get_runtime_context().gcs_address)
    schedule = ClusterSchedule(ray, tasks, SweepLocation.of_this_process(marker), jobs)
    watched = [WatchedFolder(task.config, task.folder, remote_callbacks) for task in tasks if task.folder]
    try:
        while schedule.waiting or schedule.running:
            check_head(ray, head_address, "start the cluster again, then the sweep to continue it")
            schedule.submit()
            for index, error in schedule.outcomes():
                yield index, error or watched[index].finish()
            for index in schedule.running.values():
                watched[index].poll()
    finally:
        schedule.cancel()


def run_on_node(version: str, packed: bytes) -> None:
    """Execute a run on the node that Ray chose.

    Args:
        version: version of fedflat that submitted the run; a node with another one refuses it.
        packed: pickled location, task and number of cores; unpickled only if the versions agree.
    """
    if fedflat_version() != version:
        raise UnfitNode(version_mismatch(socket.gethostname(), fedflat_version(), version))
    location, task, cores = pickle.loads(packed)
    location.enter()
    torch.set_num_threads(1)
    use_cores(cores)
    keep_freed_memory()
    task.execute(())


class WatchedFolder:
    """Notifies callbacks of a run on another machine by reading its folder."""

    def __init__(self, config: Config, folder: Path, callbacks: tuple[RemoteCallback, ...]) -> None:
        self._config, self._folder, self._callbacks = config, RunFolder(folder), callbacks
        self._metrics_read = 0  # size of metrics.jsonl when it was last read, in bytes
        self._run: DistantRun | None = None

    def poll(self) -> None:
        """Notify callbacks if there are new evaluations."""
        if not self._callbacks or not self._folder.exists:
            return
        length = self._folder.metrics_length()
        if length == self._metrics_read:
            return
        try:
            record = load_record(self._folder.path)
        except DamagedFile:  # in a shared folder, the final status may be visible before the last metrics
            return
        self._metrics_read = length
        if not record.history:  # the first line is still being written
            return
        run, is_first = self._run, self._run is None
        if run is None:
            run = self._run = DistantRun(self._config, "server", record.metric)
        run.primary = primary_model(record)
        run.update(record.history[-1]["round"], record.history[-1])
        for callback in self._callbacks:
            if is_first:
                callback.began(run)
            callback.evaluated(run)
            callback.round_done(run)

    def finish(self) -> Record:
        """Notify callbacks that the run has ended, and return its record."""
        self.poll()
        record = load_record(self._folder.path)
        if self._run is not None:
            for callback in self._callbacks:
                callback.ended(self._run, record)
        return record
