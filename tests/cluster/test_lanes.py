"""A worker with a GPU trains with lanes; here its code runs on the CPU, in this process."""

from __future__ import annotations

import pickle
from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch

from fedflat.engines.gpu.engine import LaneEngine
from fedflat.engines.ray import engine as ray_engine
from fedflat.engines.ray.engine import RayEngine
from fedflat.engines.ray.messages import ProblemSource, WorkerSetup
from fedflat.engines.ray.scheduling import ClientCosts, WorkerHandle, WorkItem, WorkQueue
from fedflat.engines.ray.states import StoredStates
from fedflat.engines.ray.worker import Worker, problem_facts
from fedflat.experiment.setup.problem import build_problem

from .federations import small, walk


class Stored:
    """Stands for Ray's reference to states."""

    def __init__(self, states: Any) -> None:
        self.states = states


class OneWorker(RayEngine):
    """The Ray engine with one worker that is called directly."""

    object_losses = ()

    def __init__(self, config: Any, shows_rows: bool) -> None:
        self.problem = build_problem(config)[0]
        self.device, self.workers, self.sums_shares = "cpu", 1, True
        self.shows_rows, self.buffers, self.costs = shows_rows, None, ClientCosts()
        self.engine = LaneEngine(build_problem(config)[0], lanes=3)
        self.worker = Worker()
        self.worker._setup = WorkerSetup(self.engine.problem, self.engine)
        self._source = ProblemSource("here", [], problem_facts(self.problem))
        self._training, self.states = None, StoredStates(lambda: self, self._retrain, 1e9)  # type: ignore[arg-type, return-value]
        self.sizes: list[int] = []

    @property
    def ray(self) -> Any:
        return self

    @property
    def pool(self) -> Any:
        return self

    def put(self, value: Any) -> Any:
        return value

    def get(self, refs: list[Stored]) -> list[Any]:
        return [ref.states for ref in refs]

    def run(self, queue: WorkQueue, source: ProblemSource, meanwhile: Any = None) -> list[WorkItem]:
        items = []
        while item := queue.take("", Counter()):
            item.worker = WorkerHandle(None, None)
            self.sizes.append(len(item.rows))
            arguments = [a.states if isinstance(a, Stored) else a for a in item.arguments(item.worker)]
            item.result = pickle.loads(pickle.dumps(getattr(self.worker, item.call)(*arguments)))
            if item.returns_states:
                item.result, states = item.result
                item.states_ref = Stored(states)
            items.append(item)
        return items


@cache
def expected_of(algorithm: str) -> dict[str, torch.Tensor]:
    return walk(small(algorithm=algorithm, clients_per_round=9, rounds=3), rounds=3)


@pytest.mark.parametrize("algorithm", ["mime", "fedsmoo"])
@pytest.mark.parametrize("shows_rows", [False, True])
@pytest.mark.parametrize(("at_once", "largest"), [(4, 3), (99, 9)])
def test_lanes_in_a_worker_agree_with_the_loop(
    algorithm: str, shows_rows: bool, at_once: int, largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers return sums of what they train at once, or rows for in-run measurements."""
    monkeypatch.setattr(ray_engine, "MOST_LANES", at_once)
    config = small(algorithm=algorithm, clients_per_round=9, rounds=3)
    engine = OneWorker(config, shows_rows)
    found, expected = walk(config, engine, 3), expected_of(algorithm)
    assert max(engine.sizes) == largest
    assert (engine.cohort_buffers is not None) == shows_rows
    assert found.keys() == expected.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=2e-5, atol=2e-6)
    assert engine.engine.cohort_buffers is not None and engine.engine.cohort_buffers.rows <= 9
