"""A worker with a GPU trains with lanes; here the same code runs without one, in this process."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fedflat.engines.gpu.engine import LaneEngine
from fedflat.engines.ray import engine as ray_engine
from fedflat.engines.ray.engine import RayEngine
from fedflat.engines.ray.scheduling import Costs
from fedflat.engines.ray.state_directory import StateDirectory
from fedflat.engines.ray.worker import Local, Source, Worker, facts
from fedflat.engines.ray.worker_pool import Job, WorkerHandle
from fedflat.experiment.setup.problem import federation

from .federations import small, walk


class OneWorker(RayEngine):
    """The Ray engine with a worker that is called instead of being sent messages."""

    losses = forgetting = ()

    def __init__(self, config: Any, shows_rows: bool) -> None:
        self.problem = federation(config)[0]
        self.device, self.workers, self.sums_shares = "cpu", 1, True
        self.shows_rows, self.table, self.costs = shows_rows, None, Costs()
        self.engine = LaneEngine(federation(config)[0], lanes=3)
        self.worker = Worker()
        self.worker._local = Local(self.engine.problem, self.engine)
        self._source = Source("here", [], facts(self.problem))
        self._trainings, self._stamp, self.states = None, 0, StateDirectory(lambda: self)  # type: ignore[arg-type, return-value]
        self.present = [WorkerHandle(SimpleNamespace(give=SimpleNamespace(remote=self.worker.give)), None)]
        self.sizes: list[int] = []

    @property
    def ray(self) -> Any:
        return self

    @property
    def crew(self) -> Any:
        return self

    def put(self, value: Any) -> Any:
        return value

    def got(self, value: Any) -> Any:
        return value

    def do(self, jobs: list[Job], source: Source, meanwhile: Any = None) -> None:
        for job in jobs:
            job.hand = self.present[0]
            told, *others = job.arguments(job.hand, False)
            self.sizes.append(len(others[1 if job.call == "train" else 0]))
            job.result = pickle.loads(pickle.dumps(getattr(self.worker, job.call)(told, *others)))


@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold", "mime", "fedsmoo"])
@pytest.mark.parametrize("shows_rows", [False, True])
@pytest.mark.parametrize(("at_once", "largest"), [(4, 3), (5, 5), (99, 9)])
def test_lanes_in_a_worker_give_what_the_loop_gives(
    algorithm: str, shows_rows: bool, at_once: int, largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the sums of what a worker trains at once, and with rows where somebody looks at them."""
    monkeypatch.setattr(ray_engine, "MOST_LANES", at_once)
    config = small(algorithm=algorithm, clients_per_round=9, rounds=3)
    engine = OneWorker(config, shows_rows)
    found, expected = walk(config, engine, 3), walk(config, rounds=3)
    assert max(engine.sizes) == largest
    assert (engine.table is not None) == shows_rows, "rows come only where somebody looks at them"
    assert found.keys() == expected.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=2e-5, atol=2e-6)
    assert engine.engine.table is not None and engine.engine.table.rows <= 9


def test_a_state_that_is_kept_keeps_no_others_in_memory() -> None:
    engine = OneWorker(small(algorithm="scaffold", clients_per_round=4, rounds=1), shows_rows=False)
    walk(small(algorithm="scaffold", clients_per_round=4, rounds=1), engine, 1)
    kept = [array for _, state in engine.worker._shelf._kept.values() for array in state.values()]
    assert len(kept) == 4 and all(array.base is None for array in kept)
