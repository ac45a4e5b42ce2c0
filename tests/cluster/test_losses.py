"""Workers, nodes and drivers are really killed, and results stay bit-identical."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import fedflat
from fedflat.engines.ray.worker_pool import MOST_LOSSES
from fedflat.errors import UserError

from ..time_limits import scaled
from .federations import engine_of, same, small, walk
from .nodes import Nodes, python, said

LONGER = {"algorithm": "scaffold", "local_steps": 150, "rounds": 3}


def test_a_worker_killed_in_the_middle_of_a_round(ray: Any) -> None:
    config = small(**LONGER)
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


def test_work_that_kills_every_worker_is_given_up(ray: Any) -> None:
    engine = engine_of(small(), 2)
    pool = engine.pool
    lost = pool.lost
    with pytest.raises(UserError, match=f"lost {MOST_LOSSES + 1} Ray workers.*fedflat resume"):
        pool.map("__ray_terminate__", [()])
    assert pool.lost == lost + MOST_LOSSES + 1


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


DRIVER = """
import sys
import fedflat
config, address, out = sys.argv[1:]

class PrintRound(fedflat.Callback):
    def round_done(self, run):
        print(run.server.rounds, run.engine.pool.lost, len(run.engine.pool.started_workers), flush=True)

settings = {"engine": "ray", "ray_address": address, "workers": 2, "engine__checkpoint_every": 1}
fedflat.run(base=config, out=out, callbacks=[PrintRound()], **settings)
"""


def test_a_node_is_lost_then_the_driver_is_killed_and_the_run_resumed(cluster: Nodes, tmp_path: Path) -> None:
    """The states of the node's clients are lost before they were copied."""
    config = small(**LONGER | {"rounds": 8, "clients_per_round": 6, "eval_every": 3})
    (tmp_path / "config.yaml").write_text(config.to_yaml())
    folder = tmp_path / "ray"
    with (
        cluster.another(),
        python("-c", DRIVER, str(tmp_path / "config.yaml"), cluster.address, str(folder)) as driver,
    ):
        assert said(driver) == "1 0 2"
        cluster.kill("Worker")
        rounds, lost, _ = said(driver).split()
        while lost == "0":
            rounds, lost, _ = said(driver).split()
        assert 2 <= int(rounds) < 8
        os.kill(driver.pid, signal.SIGKILL)
        driver.wait()
    assert not (folder / "model.safetensors").exists()
    with python("-m", "fedflat", "resume", str(folder), "--workers", "1", "--quiet") as again:
        errors = again.communicate(timeout=scaled(300))[1]
    assert again.returncode == 0, errors[-2000:]
    fedflat.run(base=config, engine="loop", workers=1, out=tmp_path / "loop")
    for name in ("model.safetensors", "metrics.jsonl"):
        assert (folder / name).read_bytes() == (tmp_path / "loop" / name).read_bytes()
