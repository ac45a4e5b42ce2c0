"""Time that the Ray driver needs per round with many workers, for docs/cluster.md.

    python studies/ray_driver.py --workers 100 300 1000

A stub replaces Ray: all workers share this process, where one ``Worker`` trains every client at once. A call ends after
a random time on a simulated clock, and the driver learns of one ended call at a time, which is its worst case. Time
spent in the stub, which includes training, is subtracted, so that only the driver's own work is left.
"""

from __future__ import annotations

import argparse
import copy
import random
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from ray import exceptions

from fedflat.engines.ray import engine as ray_engine_module
from fedflat.engines.ray import worker_pool as worker_pool_module
from fedflat.engines.ray.engine import RayEngine
from fedflat.engines.ray.worker import Worker, fedflat_version
from fedflat.experiment.analysis.replay import Replay
from fedflat.experiment.make_config import make_config
from fedflat.experiment.setup.engine import ray_engine
from fedflat.experiment.setup.problem import build_problem


class Reference:
    """Stands for Ray's reference: a value, and when it exists in seconds of the simulated clock."""

    def __init__(self, value: Any, end: float = 0.0) -> None:
        self.value, self.end = value, end


class StubRay:
    """The part of Ray's interface that the driver uses, on a simulated clock; ``seconds`` is the time spent in it."""

    def __init__(self, workers: int) -> None:
        self.workers, self.seconds, self.clock = workers, 0.0, 0.0
        self.random, self.worker, self.exceptions = random.Random(0), Worker(), exceptions
        self.put, self.get = Reference, lambda references: [reference.value for reference in references]
        self.wait = self.timed(self.wait_for_first)

    def timed(self, function: Any) -> Any:
        """The function, whose time is added to ``seconds``."""

        def call(*arguments: Any, **options: Any) -> Any:
            start = time.process_time()
            try:
                return function(*arguments, **options)
            finally:
                self.seconds += time.process_time() - start

        return call

    def is_initialized(self) -> bool:
        return True

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": float(self.workers), "object_store_memory": 1e12}

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(get_job_id=lambda: "job", gcs_address="stub")

    def remote(self, **_: Any) -> Any:
        return lambda _: SimpleNamespace(remote=lambda: StubActor(self))

    def kill(self, actor: Any) -> None:
        """Workers of the stub have no process."""

    def wait_for_first(
        self, references: Sequence[Reference], num_returns: int = 1, timeout: float | None = None
    ) -> tuple[list[Reference], list[Reference]]:
        """The call that ends first; with ``timeout`` 0, every call that has ended."""
        if timeout != 0:
            self.clock = max(self.clock, min(reference.end for reference in references))
        ready = [reference for reference in references if reference.end <= self.clock][:num_returns]
        return ready, []


class StubActor:
    """A worker: its calls end one after the other."""

    def __init__(self, ray: StubRay) -> None:
        self.ray, self.end = ray, 0.0

    def __getattr__(self, method: str) -> Any:
        remote = self.ray.timed(lambda *arguments: self.call(method, arguments))
        return SimpleNamespace(remote=remote, options=lambda **_: SimpleNamespace(remote=remote))

    def call(self, method: str, arguments: tuple[Any, ...]) -> Reference | list[Reference]:
        values = [argument.value if isinstance(argument, Reference) else argument for argument in arguments]
        if method == "identify":
            return Reference((fedflat_version(), "host", 0, str(id(self))))  # every worker is a node of its own
        if method == "build_problem":
            if self.ray.worker._setup is None:
                values[0].build[:] = [values[0].build[0].value]
                self.ray.worker._setup = values[0].build[0]()
            return Reference(None)
        self.end = max(self.end, self.ray.clock) + self.ray.random.expovariate(1.0)
        result = getattr(self.ray.worker, method)(*values)
        if isinstance(result, list):  # the states are views of memory that the next call overwrites
            return [Reference(copy.deepcopy(value), self.end) for value in result]
        return Reference(result, self.end)


def seconds_per_round(workers: int, algorithm: str, clients_per_worker: int, rounds: int) -> list[float]:
    """Seconds of the driver in each round."""
    settings = {"algorithm": algorithm, "model": "mlp(hidden=1)", "clients": 2 * workers * clients_per_worker}
    settings |= {"clients_per_round": workers * clients_per_worker, "local_steps": 1, "batch_size": 1, "device": "cpu"}
    config = make_config(settings={**settings, "partition": "virtual(size=1)", "engine": "ray", "workers": workers})
    stub = StubRay(workers)
    vars(ray_engine_module)["connect"] = lambda *_: stub
    vars(worker_pool_module)["check_head"] = lambda *_: None
    problem, partition = build_problem(config)
    replay = Replay(config, problem, partition, workers=1)
    engine = ray_engine(config, problem, {"data": None, "model": None, "task": None})
    seconds: list[float] = []

    def train(*arguments: Any) -> Any:
        start, stub.seconds = time.process_time(), 0.0
        outcome = RayEngine.train(engine, *arguments)
        seconds.append(time.process_time() - start - stub.seconds)
        return outcome

    vars(engine)["train"] = train
    replay.engine = engine
    for _ in range(rounds):
        replay.advance()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[100, 300, 1000])
    parser.add_argument("--algorithm", default="scaffold")
    parser.add_argument("--clients-per-worker", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    for workers in options.workers:
        seconds = seconds_per_round(workers, options.algorithm, options.clients_per_worker, options.rounds)
        print(f"{workers} workers: " + ", ".join(f"{value:.2f}" for value in seconds) + " s", flush=True)


if __name__ == "__main__":
    main()
