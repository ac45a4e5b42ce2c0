"""Workers, nodes and drivers are killed for real, and the results stay the same to the bit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import fedflat
from fedflat.engines.ray_crew import MOST_LOSSES
from fedflat.errors import UserError

from .federations import engine_of, same, small, walk

LONGER = {"algorithm": "scaffold", "steps": 150, "rounds": 3}


def test_a_worker_killed_in_the_middle_of_a_round(ray: Any) -> None:
    config = small(**LONGER)
    expected = walk(config, rounds=3)
    engine = engine_of(config, 2)
    before = engine.crew.processes
    lost = engine.crew.lost
    killer = threading.Thread(target=_kill_when_it_works, args=(before[0],))
    killer.start()
    found = walk(config, engine, 3)
    killer.join()
    assert same(found, expected)
    assert engine.crew.lost == lost + 1
    engine.crew.wait_for_all()
    assert len(engine.crew.processes) == 2 and before[0] not in engine.crew.processes


def test_workers_killed_between_rounds_all_at_once(ray: Any) -> None:
    config = small(algorithm="mime")
    engine = engine_of(config, 2)
    for process in engine.crew.processes:
        os.kill(process, signal.SIGKILL)
    assert same(walk(config, engine), walk(config))


def test_work_that_kills_every_worker_is_given_up(ray: Any) -> None:
    engine = engine_of(small(), 2)
    crew = engine.crew
    lost = crew.lost
    with pytest.raises(UserError, match=f"lost {MOST_LOSSES + 1} Ray workers.*fedflat resume"):
        crew.map("__ray_terminate__", [()])
    assert crew.lost == lost + MOST_LOSSES + 1


def _kill_when_it_works(process: int) -> None:
    """Kill a process once it has used some time on a core more than now: then it is in the middle of a client."""
    begun = _ticks(process)
    for _ in range(2000):
        if _ticks(process) >= begun + 8:
            break
        time.sleep(0.005)
    os.kill(process, signal.SIGKILL)


def _ticks(process: int) -> int:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


# --- a cluster of two nodes, and drivers of their own ----------------------------------------------------------------------------

DRIVER = """
import sys, torch
torch.set_num_threads(1)
import ray
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False, "object_store_memory": 100_000_000})
second = cluster.add_node(num_cpus=1, object_store_memory=100_000_000)
import fedflat

class Unplug(fedflat.Callback):
    def round_done(self, run):
        if run.server.rounds == 2:
            nodes = {hand.about.process for hand in run.engine.crew.hands}
            assert len(nodes) == 2, nodes
            cluster.remove_node(second, allow_graceful=False)

try:
    fedflat.run("scaffold", base=sys.argv[1], engine="ray", ray_address=cluster.address, workers=2, out=sys.argv[2], callbacks=[Unplug()])
    from fedflat.engines import ray_crew
    print("lost", ray_crew._crew.lost)
finally:
    ray.shutdown()
    cluster.shutdown()
"""


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that are ended, with all of their group, however a test ends."""
    found: list[subprocess.Popen[str]] = []
    yield found
    for process in found:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def start(started: list[subprocess.Popen[str]], *command: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    started.append(process)
    return process


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def test_a_whole_node_is_lost(tmp_path: Path, started: list[subprocess.Popen[str]]) -> None:
    pytest.importorskip("ray", reason='Ray is not installed (pip install "fedflat[ray]")')
    config = small(rounds=5)
    (tmp_path / "config.yaml").write_text(config.to_yaml())
    driver = start(started, "-c", DRIVER, str(tmp_path / "config.yaml"), str(tmp_path / "ray"))
    out, err = driver.communicate(timeout=300)
    assert driver.returncode == 0, err[-2000:]
    assert "lost 1" in out
    fedflat.run("scaffold", base=config, engine="loop", workers=1, out=tmp_path / "loop")
    assert weights(tmp_path / "ray") == weights(tmp_path / "loop")
    assert (tmp_path / "ray" / "metrics.jsonl").read_bytes() == (tmp_path / "loop" / "metrics.jsonl").read_bytes()


def test_the_driver_is_killed_and_the_run_resumed(tmp_path: Path, started: list[subprocess.Popen[str]]) -> None:
    pytest.importorskip("ray", reason='Ray is not installed (pip install "fedflat[ray]")')
    config = small(algorithm="fedmoswa", rounds=30, engine="ray", workers=1, engine__checkpoint_every=2, every=3)
    (tmp_path / "config.yaml").write_text(config.to_yaml())
    folder = tmp_path / "ray"
    driver = start(started, "-m", "fedflat", "run", "--config", str(tmp_path / "config.yaml"), "--out", str(folder), "--quiet")
    deadline = time.monotonic() + 240
    while not (folder / "metrics.jsonl").exists() or len((folder / "metrics.jsonl").read_text().splitlines()) < 3:
        assert driver.poll() is None and time.monotonic() < deadline, "the run ended or stood still"
        time.sleep(0.05)
    os.kill(driver.pid, signal.SIGKILL)
    driver.wait()
    assert not (folder / "model.safetensors").exists()
    again = start(started, "-m", "fedflat", "resume", str(folder), "--quiet")
    _, err = again.communicate(timeout=300)
    assert again.returncode == 0, err[-2000:]
    fedflat.run(base=config, engine="loop", workers=1, out=tmp_path / "loop")
    assert weights(folder) == weights(tmp_path / "loop")
