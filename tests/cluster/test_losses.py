"""Workers are really killed, and results stay bit-identical."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from fedflat.engines.ray import worker_pool
from fedflat.errors import UserError

from .federations import engine_of, same, small, walk


def test_a_worker_killed_in_the_middle_of_a_round(ray: Any) -> None:
    config = small(algorithm="scaffold", local_steps=150, rounds=3)
    expected = walk(config, rounds=3)
    engine = engine_of(config, 2)
    before = engine.pool.process_ids
    lost = engine.pool.lost
    killer = threading.Thread(target=_kill_while_training, args=(before[0],))
    killer.start()
    result = walk(config, engine, 3)
    killer.join()
    assert same(result, expected)
    assert engine.pool.lost == lost + 1
    engine.pool.wait_for_all()
    assert len(engine.pool.process_ids) == 2 and before[0] not in engine.pool.process_ids


def test_work_that_kills_every_worker_is_given_up(ray: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_pool, "MOST_LOSSES", 1)  # a worker takes seconds to start
    engine = engine_of(small(), 2)
    pool = engine.pool
    lost = pool.lost
    with pytest.raises(UserError, match=r"lost 2 Ray workers.*fedflat resume"):
        pool.map("__ray_terminate__", [()])
    assert pool.lost == lost + 2


def _kill_while_training(process: int) -> None:
    """Kill a process once it has used some more CPU time, in the middle of training a client."""
    start = _ticks(process)
    for _ in range(2000):
        if _ticks(process) >= start + 8:
            break
        time.sleep(0.005)
    os.kill(process, signal.SIGKILL)


def _ticks(process: int) -> int:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])
