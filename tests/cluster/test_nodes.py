"""Runs on a cluster of two nodes: nodes, drivers and at last the head are killed, and results stay bit-identical."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import fedflat
from fedflat.registry import load_plugins
from tests.sweeps import FILE, RUNS

from ..time_limits import scaled
from .federations import small
from .nodes import Nodes, nodes, python, said

if find_spec("ray") is None:
    pytest.skip('Ray is not installed (pip install "fedflat[ray]")', allow_module_level=True)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Nodes]:
    with nodes() as several:
        yield several


def printed(sweep: subprocess.Popen[str]) -> dict[str, Any]:
    out, complaints = sweep.communicate(timeout=scaled(300))
    assert sweep.returncode == 0, complaints[-2000:]
    found: dict[str, Any] = json.loads(out)
    return found


def files(out: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(out)): path.read_bytes()
        for path in out.rglob("*")
        if path.is_file() and path.name != "timing.jsonl"
    }


HELD = """
import time
from pathlib import Path
import fedflat
from fedflat.algorithms.drift.scaffold import Scaffold

class Held(Scaffold):
    def begin(self, ctx):
        while Path(__file__).with_name("hold").exists():
            time.sleep(0.05)
        return super().begin(ctx)

fedflat.register("held", fedflat.Algorithm(Held()))
"""


def test_a_node_is_killed_during_a_sweep(cluster: Nodes, tmp_path: Path, restore_registries: object) -> None:
    """One of its runs waits on each node until the second node has been killed."""
    file, plugin, hold = tmp_path / "sweep.yaml", tmp_path / "held.py", tmp_path / "hold"
    file.write_text(FILE.replace("scaffold", "held"))
    plugin.write_text(HELD)
    hold.touch()
    with cluster.another():
        flags = ("--out", str(tmp_path / "ray"), "--ray-address", cluster.address, "--no-probe", "--json")
        with python("-m", "fedflat", "sweep", str(file), *flags, "--plugin", str(plugin)) as sweep:
            cluster.kill("run_on_node")
            hold.unlink()
            runs = printed(sweep)["runs"]
    assert len({run["name"] for run in runs}) == len(runs) == RUNS
    assert {run["status"] for run in runs} == {"finished"}
    load_plugins([plugin])
    fedflat.sweep(file, out=tmp_path / "alone", jobs=1)
    ours, theirs = files(tmp_path / "ray"), files(tmp_path / "alone")
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if ours[name] != theirs[name]] == []


DRIVER = """
import sys
import fedflat
from fedflat.engines.ray import worker_pool

config, address, out = sys.argv[1:]
worker_pool.EXTRA_TIMEOUT = worker_pool.START_TIMEOUT  # a busy machine starts workers slowly, and both are needed

class PrintRound(fedflat.Callback):
    def round_done(self, run):
        pool, traffic = run.engine.pool, run.engine.states.traffic
        print("round", run.server.rounds, pool.lost, len(pool.started_workers), traffic.lost, flush=True)
        if run.server.rounds == 2:
            input()  # until the node has been killed

settings = {"engine": "ray", "ray_address": address, "workers": 2, "engine__checkpoint_every": 5}
fedflat.run(base=config, out=out, callbacks=[PrintRound()], **settings)
"""


def progress(driver: subprocess.Popen[str], message: str = "") -> list[int]:
    """The numbers that the driver prints after the next round; Ray prints other lines when the machine is busy."""
    line = said(driver, message)
    while not line.startswith("round "):
        line = said(driver)
    return [int(number) for number in line.split()[1:]]


def test_a_node_then_the_driver_and_then_the_head_are_killed(cluster: Nodes, tmp_path: Path) -> None:
    """The states of the node's clients are lost before they were copied. The last test, since it ends the cluster.

    The node keeps states of more than 1 kB in its object store. All clients participate in every round.
    """
    config = small(algorithm="scaffold", local_steps=25, rounds=20, clients=6, clients_per_round=6, eval_every=3)
    (tmp_path / "config.yaml").write_text(config.to_yaml())
    folder = tmp_path / "ray"
    with (
        cluster.another(RAY_max_direct_call_object_size="1000"),
        python("-c", DRIVER, str(tmp_path / "config.yaml"), cluster.address, str(folder)) as driver,
    ):
        assert progress(driver) == [1, 0, 2, 0]
        assert progress(driver) == [2, 0, 2, 0]
        cluster.kill("Worker")
        rounds, lost_workers, workers, lost_states = progress(driver, "\n")
        assert (rounds, lost_workers) == (3, 1) and 1 <= lost_states <= 5, (lost_workers, workers, lost_states)
        while rounds < 7:
            rounds = progress(driver)[0]
        os.kill(driver.pid, signal.SIGKILL)
        driver.wait()
    assert not (folder / "model.safetensors").exists()
    cluster.await_end("Worker")
    with python("-m", "fedflat", "resume", str(folder), "--workers", "1", "--quiet") as again:
        cluster.kill_head("Worker")
        errors = again.communicate(timeout=scaled(120))[1]
    assert again.returncode == 2 and "Traceback" not in errors
    assert f"head of the Ray cluster, {cluster.address}, no longer answers" in errors and "fedflat resume" in errors
    fedflat.resume(folder, engine="loop", workers=1)
    fedflat.run(base=config, engine="loop", workers=1, out=tmp_path / "loop")
    for name in ("model.safetensors", "metrics.jsonl"):
        assert (folder / name).read_bytes() == (tmp_path / "loop" / name).read_bytes()
