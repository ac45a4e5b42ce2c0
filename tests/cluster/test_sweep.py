"""Sweeps on a cluster, and nodes that cannot take part."""

from __future__ import annotations

import os
import signal
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import fedflat
from fedflat.errors import UserError
from fedflat.experiment.campaign import ray_sweep
from fedflat.experiment.campaign.ray_sweep import ClusterSchedule, SweepLocation, UnfitNode, run_on_cluster
from fedflat.experiment.campaign.sweep import LockedRun, Sweep, plan_sweep, run_sweep
from fedflat.experiment.campaign.sweep_file import read_sweep

from .federations import small

if find_spec("ray") is None:
    pytest.skip('Ray is not installed (pip install "fedflat[ray]")', allow_module_level=True)


class Seen(fedflat.RemoteCallback):
    """Records the seeds of runs that begin and end in other processes."""

    def __init__(self) -> None:
        self.began_: list[int] = []
        self.ended_: list[int] = []

    def began(self, run: Any) -> None:
        self.began_.append(run.config.seed)

    def ended(self, run: Any, record: Any) -> None:
        assert run.rounds == record.history[-1]["round"] == 2 and run.primary == "ema"
        self.ended_.append(run.config.seed)


def planned(out: Path, seeds: int = 3, **settings: Any) -> Sweep:
    base = small(rounds=2, algorithm="fedavg+ema", **settings).model_dump(mode="json")
    return plan_sweep(read_sweep({"base": base, "grid": {"seed": list(range(seeds))}, "ray_address": "auto"}), out)


def test_an_interrupted_sweep_resumes_and_callbacks_see_its_remote_runs(ray: Any, tmp_path: Path) -> None:
    plan, seen = planned(tmp_path), Seen()
    with closing(run_sweep(plan, jobs=1)) as results:
        assert next(results).by == "here"
    done = {one.run.config.seed: one.by for one in run_sweep(plan, (seen,), jobs=1)}
    assert sorted(done) == [0, 1, 2] and "before" in done.values()
    assert sorted(seen.began_) == sorted(seen.ended_) == sorted(seed for seed, by in done.items() if by == "here")


def test_sweeps_that_do_not_suit_the_cluster_are_rejected(ray: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="64 cores"):
        list(run_sweep(planned(tmp_path / "cores", engine__workers=64)))
    with pytest.raises(UserError, match=r"engine\.device=cuda.*GPU"):
        list(run_sweep(planned(tmp_path / "gpus", device="cuda")))
    with pytest.raises(UserError, match="Callback cannot observe runs in other processes"):
        list(run_sweep(planned(tmp_path / "callbacks"), (fedflat.Callback(),)))
    with pytest.raises(UserError, match=r"engine\.name=ray.*ray_address"):
        planned(tmp_path / "both", engine="ray")


def test_a_folder_that_nodes_cannot_reach_is_rejected(ray: Any, tmp_path: Path) -> None:
    """The nodes are on this machine, and see it all: so the folder is moved away before they look."""
    plan = planned(tmp_path / "here")
    work = [LockedRun(run.config, run.folder) for run in plan.runs]
    (tmp_path / "here").mkdir()
    marker = tmp_path / "here" / "sweep.json"
    marker.write_text("as it is here")
    location = SweepLocation.of_this_process(marker)
    marker.write_text("as it is there")
    doing = ClusterSchedule(ray, work, location, jobs=1)
    doing.submit()
    with pytest.raises(UnfitNode, match=r"folder .*here.*--out"):
        while doing.running:
            list(doing.outcomes())
    doing.cancel()
    assert not any(run.folder.exists() for run in plan.runs)


def test_a_run_that_loses_every_worker_is_given_up(ray: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_sweep, "MOST_LOSSES", 1)  # a worker takes seconds to start
    (tmp_path / "sweep.json").write_text("")
    with closing(
        run_on_cluster([Deadly(small(), tmp_path / "run")], "auto", None, (), tmp_path / "sweep.json")
    ) as results:
        number, mistake = next(results)
    assert number == 0 and "lost 2 Ray workers" in str(mistake)


class Deadly(LockedRun):
    """A run that ends its process."""

    def execute(self, callbacks: tuple[fedflat.Callback, ...]) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(("jobs", "share"), [(None, 1.0), (2, 1.0), (3, 0.5), (4, 0.5), (9, 0.2)])
def test_more_runs_than_gpus_get_a_share_of_one_each(jobs: int | None, share: float) -> None:
    two = SimpleNamespace(cluster_resources=lambda: {"CPU": 16.0, "GPU": 2.0})
    spreading = ClusterSchedule(two, [], SweepLocation(Path(), b"", Path(), Path(), ()), jobs)
    assert spreading._resources(small(device="auto", engine__workers=3)) == (3, share)
    assert spreading._resources(small(device="cpu")) == (1, 0)
