"""A worker with a GPU trains with lanes; here the same code runs without one, in this process."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch

from fedflat.engines.lanes import LaneEngine
from fedflat.engines.ray_engine import RayEngine
from fedflat.engines.ray_worker import Local, Source, Worker, facts
from fedflat.experiment.federation import federation

from .federations import small, walk


class OneWorker(RayEngine):
    """The Ray engine with a worker that is called instead of being sent messages."""

    def __init__(self, config: Any, block: int, pieces: int) -> None:
        from fedflat.engines.ray_work import Costs

        self.problem = federation(config)[0]
        self.device, self.workers, self.block, self.pieces = "cpu", 1, block, pieces
        self.shows_rows, self.table, self.costs = False, None, Costs()
        self.engine = LaneEngine(federation(config)[0], lanes=3)
        self.worker = Worker()
        self.worker._local, self.worker._key = Local(self.engine.problem, self.engine), "here"
        self._source = Source("here", [], facts(self.problem))
        self._trainings = None
        self.sizes: list[int] = []

    @property
    def ray(self) -> Any:
        return self

    def put(self, value: Any) -> Any:
        return value

    @property
    def crew(self) -> Any:
        return self

    def map(self, call: str, tasks: list[tuple[Any, ...]]) -> list[Any]:
        self.sizes += [len(task[-2 if call == "train" else -1]) for task in tasks]
        return [pickle.loads(pickle.dumps(getattr(self.worker, call)(*task))) for task in tasks]

    def _units(self, costs: list[float]) -> list[list[int]]:
        return [list(map(int, part)) for part in np.array_split(np.arange(len(costs)), self.pieces)]


@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold", "mime", "fedsmoo"])
@pytest.mark.parametrize(("block", "pieces"), [(2, 1), (99, 1), (99, 2)])
def test_lanes_in_a_worker_give_what_the_loop_gives(algorithm: str, block: int, pieces: int) -> None:
    """With the sums of blocks, and with rows of shares of different sizes."""
    config = small(algorithm=algorithm, per_round=9, rounds=3)
    engine = OneWorker(config, block, pieces)
    found, expected = walk(config, engine, 3), walk(config, rounds=3)
    assert max(engine.sizes) == {2: 9 if algorithm == "mime" else 2, 99: -(-9 // pieces)}[block]
    assert found.keys() == expected.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=2e-5, atol=2e-6)
    assert engine.engine.table is not None and engine.engine.table.rows <= 9
