"""Sweeps: each run is executed once by any process, keeps the requested parts, and needs the estimated disk space."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import fedflat
from fedflat.errors import SomeFailed, UserError
from fedflat.experiment.callback import Callback
from fedflat.experiment.campaign import sweep as sweeping
from fedflat.experiment.campaign.disk_space import sweep_disk
from fedflat.experiment.campaign.ranking import Ranking, ranking
from fedflat.experiment.campaign.sweep import Sweep, plan_sweep, run_sweep
from fedflat.experiment.campaign.sweep_file import read_sweep
from fedflat.experiment.config import parse_config
from fedflat.experiment.store.cleanup import Keep
from fedflat.experiment.store.files import LOCK_FILE, LockedError, is_free, locked
from fedflat.experiment.store.run_folder import Record, RunFolder

BASE = {
    "rounds": 2,
    "local_steps": 2,
    "clients_per_round": 3,
    "clients": 8,
    "model": "mlp(hidden=8)",
    "workers": 1,
    "device": "cpu",
}
VALUES = {"base": BASE, "grid": {"algorithm": ["fedavg", "scaffold"], "seed": [0, 1]}}


def plan(out: Path, **more: object) -> Sweep:
    return plan_sweep(read_sweep({**VALUES, **more}), out)


def ranked(sweep: Sweep) -> Ranking:
    return ranking((result.run.varied, result.record) for result in run_sweep(sweep))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Sweep:
    made = plan(tmp_path_factory.mktemp("sweep"))
    assert [done.by for done in run_sweep(made)] == ["here"] * 4
    return made


def test_the_index_lists_the_folder_of_every_run(finished: Sweep) -> None:
    index = json.loads((finished.out / "sweep.json").read_text())
    assert index["runs"]["scaffold--seed-1"] == {"algorithm": "scaffold", "seed": 1}
    assert all(RunFolder(finished.out / name).config().seed == varied["seed"] for name, varied in index["runs"].items())


def test_finished_runs_are_not_repeated(finished: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeping, "Run", None)
    assert [done.by for done in run_sweep(finished)] == ["before"] * 4


@pytest.mark.parametrize("file", ["metrics.jsonl", "config.yaml", "status.json"])
def test_a_damaged_run_does_not_stop_the_others(finished: Sweep, tmp_path: Path, file: str) -> None:
    shutil.copytree(finished.out, tmp_path / "copy")
    made = plan(tmp_path / "copy")
    (made.runs[0].folder / file).write_text("[\n")
    results = {result.run.name: result for result in run_sweep(made)}
    error = results[made.runs[0].name].error
    if file == "status.json":  # repaired from the checkpoint
        assert error is None and made.runs[0].done
    else:
        assert file in str(error)
    assert [result.by for name, result in results.items() if name != made.runs[0].name] == ["before"] * 3


def test_other_settings_in_the_same_folder_are_refused(finished: Sweep) -> None:
    other = plan(finished.out, base={**BASE, "batch_size": 11})
    with pytest.raises(UserError, match=r"training\.batch_size=10 instead of 11"):
        list(run_sweep(other))


def test_a_run_locked_by_another_process_is_awaited(tmp_path: Path) -> None:
    made, told = plan(tmp_path), []
    held = made.runs[1]
    holder = _holder(held.folder)

    def let_go(runs: int) -> None:
        told.append(runs)
        holder.communicate("\n")

    order = [(done.run.name, done.by) for done in run_sweep(made, on_wait=let_go)]
    assert told == [1] and order[-1] == (held.name, "here"), "the holder left nothing, so it is done here, last"
    assert {name for name, _ in order} == {run.name for run in made.runs}


def test_a_run_finished_by_another_process_is_reused(tmp_path: Path) -> None:
    made = plan(tmp_path)
    results = run_sweep(made)
    first = next(results)
    assert [done.by for done in run_sweep(made)] == ["before", "here", "here", "here"]
    assert first.by == "here" and [done.by for done in results] == ["elsewhere"] * 3


def test_a_lock_ends_with_its_process(tmp_path: Path) -> None:
    holder = _holder(tmp_path / "run")
    assert not is_free(tmp_path / "run")
    with pytest.raises(LockedError, match=re.escape(str(tmp_path / "run"))), locked(tmp_path / "run"):
        pass
    holder.kill()
    holder.wait()
    assert is_free(tmp_path / "run")


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and path.name != LOCK_FILE]


def _holder(folder: Path) -> subprocess.Popen[str]:
    """A process that locks a folder until it reads a line."""
    code = (
        "import sys; from filelock import FileLock; lock = FileLock(sys.argv[1]); "
        "lock.acquire(); print('held'); input()"
    )
    folder.mkdir(parents=True, exist_ok=True)
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", code, str(folder / LOCK_FILE)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def test_a_failed_run_does_not_stop_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if it comes first, from which sweeps decide whether parallel runs are faster."""
    monkeypatch.setattr("fedflat.experiment.campaign.compare.available_cores", lambda: 2)
    models = ["bisenetv2", "mlp(hidden=8)", "mlp(hidden=4)"]
    made = plan_sweep(read_sweep({"base": BASE, "grid": {"model": models}}), tmp_path)
    found = {done.run.config.model: done for done in run_sweep(made)}
    assert [found[name].error is None for name in models] == [False, True, True]
    with pytest.raises(SomeFailed, match="bisenetv2"):
        fedflat.sweep({"base": BASE, "grid": {"model": models}}, out=tmp_path)


class Interruption(Callback):
    """Interrupts the second run in its second round."""

    def __init__(self) -> None:
        self.rounds = 0

    def round_done(self, run) -> None:
        self.rounds += 1
        if self.rounds == 4:
            raise KeyboardInterrupt


def test_an_interrupted_run_is_resumed(finished: Sweep, tmp_path: Path) -> None:
    made = plan(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        list(run_sweep(made, (Interruption(),)))
    assert [run.done for run in made.runs] == [True, False, False, False]
    assert [done.by for done in run_sweep(made)] == ["before", "here", "here", "here"]
    for one, other in zip(made.runs, finished.runs, strict=True):
        assert RunFolder(one.folder).metrics() == RunFolder(other.folder).metrics()


def test_keep_selects_the_stored_parts(finished: Sweep, tmp_path: Path) -> None:
    keep = {"checkpoint": False, "snapshots": False}
    made = plan(tmp_path, keep=keep, base={**BASE, "save_every": 1})
    list(run_sweep(made))
    for run in made.runs:
        left = {str(path.relative_to(run.folder)) for path in files(run.folder)}
        assert left == {
            "config.yaml",
            "status.json",
            "partition.json",
            "metrics.jsonl",
            "timing.jsonl",
            "model.safetensors",
        }
    assert [done.by for done in run_sweep(made)] == ["before"] * 4, (
        "what is gone is not needed to know that they are over"
    )
    nothing = plan(tmp_path, keep={**keep, "models": False}, base={**BASE, "save_every": 1})
    list(run_sweep(nothing))
    assert not list(tmp_path.rglob("*.safetensors"))


def test_the_disk_use_is_estimated(finished: Sweep) -> None:
    estimate = sweep_disk([run.config for run in finished.runs], Keep(), 1)
    written = sum(path.stat().st_size for path in finished.out.rglob("*") if path.suffix in (".safetensors", ".bin"))
    assert estimate.most == estimate.kept and 0.5 * estimate.kept < written < 1.5 * estimate.kept
    lean = sweep_disk([run.config for run in finished.runs], Keep(checkpoint=False), 1)
    models = sum(path.stat().st_size for path in finished.out.rglob("model.safetensors"))
    assert lean.kept < lean.most < estimate.most and 0.8 * models < lean.kept <= models


def test_the_ranking_states_its_criterion(finished: Sweep, tmp_path: Path) -> None:
    by_test = ranked(finished)
    assert (
        by_test.split == "test"
        and by_test.metric == "accuracy"
        and [line.seeds for line in by_test.combinations] == [2, 2]
    )
    assert sum(by_test.combinations[0].test) >= sum(by_test.combinations[1].test)
    by_validation = ranked(plan(tmp_path, base={**BASE, "data.validation": 0.2}))
    assert by_validation.split == "validation"
    means = [sum(line.validation) for line in by_validation.combinations]
    assert means == sorted(means, reverse=True) and all(
        len(line.validation) == 2 for line in by_validation.combinations
    )


def test_combinations_with_diverged_runs_come_last() -> None:
    """Whatever the mean of the other seeds, which are not comparable."""
    config = parse_config({})

    def result(lr: float, seed: int, accuracy: float | None) -> tuple[dict[str, object], Record]:
        status = "finished" if accuracy is not None else "diverged"
        history = [] if accuracy is None else [{"round": 1, "test": {"server": {"accuracy": accuracy}}}]
        return {"lr": lr, "seed": seed}, Record(config, history, status, "", 0.0, {})

    runs = [result(1.0, 0, 0.9), result(1.0, 1, None), result(0.1, 0, 0.8), result(0.1, 1, 0.8), result(9.0, 0, None)]
    assert [line.varied["lr"] for line in ranking(runs).combinations] == [0.1, 1.0, 9.0]


def test_a_sweep_from_python(finished: Sweep) -> None:
    comparison = fedflat.sweep(VALUES, out=finished.out)
    assert [record.config.algorithm for record in comparison.records] == ["fedavg", "fedavg", "scaffold", "scaffold"]
    with pytest.raises(UserError, match="out="):
        fedflat.sweep(VALUES)
