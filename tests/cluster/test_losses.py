"""Workers are really killed, and results stay bit-identical."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedflat.engines.ray import worker_pool
from fedflat.errors import UserError

from .federations import engine_of, same, small, walk


class KillsOneWorker(nn.Flatten):
    """A layer that kills the first worker that has trained 20 batches."""

    def __init__(self, marker: Path) -> None:
        super().__init__()
        self.marker, self.driver, self.batches = marker, os.getpid(), 0

    def forward(self, images: Tensor) -> Tensor:
        self.batches += 1
        if self.batches == 20 and os.getpid() != self.driver:
            with suppress(FileExistsError):
                self.marker.touch(exist_ok=False)
                os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(images)


def test_a_worker_killed_in_the_middle_of_a_round(ray: Any, tmp_path: Path) -> None:
    config = small(algorithm="scaffold", local_steps=15, rounds=3)
    torch.manual_seed(0)
    model = nn.Sequential(KillsOneWorker(tmp_path / "killed"), nn.Linear(64, 10))
    expected = walk(config, rounds=3, model=model)
    engine = engine_of(config, 2, model)
    before, lost = engine.pool.process_ids, engine.pool.lost
    assert same(walk(config, engine, 3, model), expected)
    assert engine.pool.lost == lost + 1
    engine.pool.wait_for_all()
    assert len(engine.pool.process_ids) == 2 and len(set(before) & set(engine.pool.process_ids)) == 1


def test_work_that_kills_every_worker_is_given_up(ray: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_pool, "MOST_LOSSES", 1)  # a worker takes seconds to start
    engine = engine_of(small(), 2)
    pool = engine.pool
    lost = pool.lost
    with pytest.raises(UserError, match=r"lost 2 Ray workers.*fedflat resume"):
        pool.map("__ray_terminate__", [()])
    assert pool.lost == lost + 2
