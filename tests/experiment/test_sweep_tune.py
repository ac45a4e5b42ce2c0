"""Searches: scored on the validation split only, reproducible after interruptions, shared by several processes."""

from __future__ import annotations

import json
import os
import shutil
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedflat
from fedflat.engines.problem.kernels import KernelError
from fedflat.errors import GpuFailed, MachineFailed, SomeFailed, UserError, WorkerLost
from fedflat.experiment.callback import Callback
from fedflat.experiment.campaign import optuna_study, tune
from fedflat.experiment.campaign.sweep import LockedRun
from fedflat.experiment.campaign.sweep_file import combinations, read_sweep
from fedflat.experiment.campaign.tune import (
    Search,
    evaluate_best,
    open_study,
    plan_search,
    run_search,
    run_search_in_parallel,
)
from fedflat.experiment.store.files import DamagedFile
from fedflat.experiment.store.provenance import ChangedInputs
from fedflat.experiment.store.run_folder import RunFolder
from fedflat.registry import load_plugins

BASE = {
    "rounds": 2,
    "local_steps": 2,
    "clients_per_round": 3,
    "clients": 8,
    "model": "mlp(hidden=8)",
    "workers": 1,
    "device": "cpu",
    "data.validation": 0.2,
}
LR: dict[str, Any] = {"lr": {"low": 0.001, "high": 1, "log": True}}
SPACE: dict[str, Any] = {**LR, "rho": [0.01, 0.1]}
VALUES = {"base": {**BASE, "algorithm": "fedsam(rho={rho})"}, "tune": {"trials": 6, "space": SPACE}}


def search(out: Path, **more: Any) -> Search:
    return plan_search(read_sweep({**VALUES, **more}), out)


def needs_optuna() -> None:
    pytest.importorskip("optuna", minversion="4.0", reason="searches need Optuna (pip install 'fedflat[sweep]')")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Search, list[Any]]:
    needs_optuna()
    made = search(tmp_path_factory.mktemp("tuned"))
    return made, list(run_search(made))


def test_every_trial_is_a_run_with_its_sampled_settings(finished: tuple[Search, list[Any]]) -> None:
    made, tried = finished
    assert [trial.number for trial in tried] == list(range(6)) and {trial.state for trial in tried} == {"complete"}
    for trial in tried:
        config = RunFolder(made.folder(trial.number) / "seed-0").config()
        assert config.training.lr == trial.values["training.lr"] and 0.001 <= config.training.lr <= 1
        assert config.algorithm in ("fedsam(rho=0.01)", "fedsam(rho=0.1)")
    assert len({trial.values["training.lr"] for trial in tried}) == 6


def test_the_score_is_the_last_validation_metric(finished: tuple[Search, list[Any]]) -> None:
    made, tried = finished
    for trial in tried:
        last = RunFolder(made.folder(trial.number) / "seed-0").metrics()[-1]
        assert trial.score == last["validation"]["server"]["accuracy"]


def test_the_best_is_chosen_by_validation_and_evaluated_once(
    finished: tuple[Search, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, tried = finished
    chosen = evaluate_best(made)
    best = max(tried, key=lambda trial: trial.score)
    assert chosen["trial"] == best.number and chosen["validation"] == best.score
    assert chosen["settings"] == made.resolved(best.values)
    last = RunFolder(made.folder(best.number) / "seed-0").metrics()[-1]
    assert chosen["test"] == [pytest.approx(last["test"]["server"]["accuracy"])]
    monkeypatch.setattr("fedflat.experiment.analysis.evaluation.evaluate", None)
    assert evaluate_best(made) == chosen == json.loads((made.out / "best.json").read_text())


def test_the_test_set_does_not_affect_the_search(tmp_path: Path, finished: tuple[Search, list[Any]]) -> None:
    """The same trial is chosen if the test metric ranks trials in the opposite order."""
    made, _ = finished
    for folder in sorted(made.out.glob("trial-*/seed-0")):
        copy = tmp_path / folder.parent.name / "seed-0"
        copy.mkdir(parents=True)
        for name in ("config.yaml", "status.json", "partition.json"):
            (copy / name).write_bytes((folder / name).read_bytes())
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for line in lines:
            line["test"]["server"]["accuracy"] = 1 - line["validation"]["server"]["accuracy"]
        (copy / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (copy / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    again = search(tmp_path)
    list(run_search(again))
    assert evaluate_best(again)["trial"] == evaluate_best(made)["trial"]


class Crash(Callback):
    def __init__(self, after: int) -> None:
        self.left = after

    def round_done(self, run) -> None:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


def test_a_resumed_search_equals_an_uninterrupted_one(finished: tuple[Search, list[Any]], tmp_path: Path) -> None:
    made = search(tmp_path)
    for rounds in (3, 4):
        with pytest.raises(KeyboardInterrupt):
            list(run_search(made, (Crash(rounds),)))
    (tmp_path / "tune.journal").open("ab").write(b'{"op_code": 5, "wor')
    list(run_search(made))
    assert len(list(tmp_path.glob("trial-*"))) == 6
    for trial in finished[1]:
        assert RunFolder(made.folder(trial.number) / "seed-0").config().training.lr == trial.values["training.lr"]
    assert evaluate_best(made)["trial"] == evaluate_best(finished[0])["trial"]


def test_two_threads_share_the_trials(tmp_path: Path) -> None:
    needs_optuna()
    found: list[Any] = []
    made = search(tmp_path, tune={"trials": 5, "space": SPACE, "sampler": "random"})
    both = [threading.Thread(target=lambda: found.extend(run_search(made))) for _ in range(2)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    assert sorted(trial.number for trial in found) == [0, 1, 2, 3, 4]


FAILS_TWICE = """
import os
from pathlib import Path
import fedflat
from fedflat.algorithms.drift.prox import Prox

class FailsTwice(Prox):
    def begin(self, ctx):
        here = Path(__file__).parent
        if len(list(here.glob("*.failed"))) < 2:
            (here / f"{os.getpid()}.failed").touch()
            raise RuntimeError("CUDA error: an illegal memory access was encountered\\nFor debugging ...")
        (here / f"{os.getpid()}.trained").touch()
        return super().begin(ctx)

fedflat.register("fails-twice", fedflat.Algorithm(FailsTwice()))
"""


@pytest.mark.slow
def test_several_jobs_share_the_trials_and_survive_gpu_errors(tmp_path: Path, restore_registries: object) -> None:
    """Both processes fail and are replaced, so that the test's own process has nothing to do."""
    needs_optuna()
    plugin = tmp_path / "fails_twice.py"
    plugin.write_text(FAILS_TWICE)
    load_plugins([plugin])
    made = search(tmp_path / "out", base={**BASE, "algorithm": "fails-twice"}, tune={"trials": 6, "space": LR})
    with pytest.warns(UserWarning, match=r"trial \d: .*illegal memory access"):
        tried = list(run_search_in_parallel(made, jobs=2))
    assert len({trial.number for trial in tried}) == len(tried) == 4, "two of six have failed"
    assert {trial.state for trial in tried} == {"complete"}
    assert not (tmp_path / f"{os.getpid()}.trained").exists() and list(tmp_path.glob("*.trained"))
    next(tmp_path.glob("*.failed")).unlink()
    settings = {"rounds": 1, "local_steps": 1, "workers": 1, "device": "cpu"}
    with pytest.raises(GpuFailed):  # in one process, later runs would fail, too
        fedflat.compare(["fails-twice", "fedavg"], seeds=1, jobs=1, **settings)
    for path in (*tmp_path.glob("*.failed"), *tmp_path.glob("*.trained")):
        path.unlink()
    with pytest.raises(SomeFailed):
        fedflat.compare(["fails-twice"], seeds=5, jobs=2, **settings)
    failed, trained = ({path.stem for path in tmp_path.glob(f"*.{kind}")} for kind in ("failed", "trained"))
    assert trained and not failed & trained, "a process whose GPU has failed gets no further run"
    assert evaluate_best(made)["validation"] == max(trial.score for trial in tried)
    assert list(run_search_in_parallel(made, jobs=2)) == []
    with pytest.raises(UserError, match=r"2 runs.*engine\.workers=2"):
        next(run_search_in_parallel(search(tmp_path / "other", base={**VALUES["base"], "workers": 2}), jobs=2))


def test_more_trials_continue_the_search(finished: tuple[Search, list[Any]], tmp_path: Path) -> None:
    made, _ = finished
    assert list(run_search(made)) == []
    more = search(shutil.copytree(made.out, tmp_path / "copy"), tune={"trials": 7, "space": SPACE})
    assert [trial.number for trial in run_search(more)] == [6]


QUICK: dict[str, Any] = {**BASE, "rounds": 1, "local_steps": 1, "algorithm": "fedsam(rho={rho})", "rho": 0.1}
LR_SPACE: dict[str, Any] = {"lr": {"low": 0.01, "high": 1, "log": True}}
ONE_TRIAL: dict[str, Any] = {"trials": 1, "space": LR_SPACE, "seeds": [0]}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a search with one trial."""
    needs_optuna()
    out = tmp_path_factory.mktemp("small") / "out"
    list(run_search(search(out, base=QUICK, tune=ONE_TRIAL)))
    return out


@pytest.mark.parametrize(
    ("base", "tune", "words"),
    [
        ({"rounds": 3}, {}, "training.rounds=1 instead of 3"),
        ({"rho": 0.2}, {}, "rho=0.1 instead of 0.2"),
        ({"algorithm": "fedasam(rho={rho})"}, {}, 'algorithm="fedsam(rho={rho})" instead of "fedasam(rho={rho})"'),
        ({"stop.patience": 2}, {}, "stop.patience=none instead of 2"),
        ({}, {"seeds": [0, 1]}, "tune.seeds=[0] instead of [0, 1]"),
        ({}, {"prune": True}, "tune.prune=false instead of true"),
        ({}, {"space": {"lr": [0.1]}}, "tune.space.training.lr={low: 0.01, high: 1.0, log: true} instead of [0.1]"),
        ({}, {"space": {**LR_SPACE, "batch_size": [5, 9]}}, "tune.space.training.batch_size=none instead of [5, 9]"),
    ],
)
def test_another_search_in_the_same_folder_is_refused(
    small: Path, base: dict[str, Any], tune: dict[str, Any], words: str
) -> None:
    other = search(small, base={**QUICK, **base}, tune={**ONE_TRIAL, "trials": 2, **tune})
    for use in (lambda: next(run_search(other)), lambda: evaluate_best(other)):
        with pytest.raises(UserError) as error:
            use()
        assert f"({words})" in str(error.value) and str(small) in str(error.value) and "--out" in str(error.value)
    assert [path.name for path in small.glob("trial-*")] == ["trial-0000"]


class Fails(Callback):
    def __init__(self, error: UserError) -> None:
        self.error = error

    def round_done(self, run: Any) -> None:
        raise self.error


@pytest.mark.parametrize("kind", [MachineFailed, WorkerLost, DamagedFile, ChangedInputs])
def test_an_interrupted_trial_is_continued_by_the_next_command(kind: type[UserError], tmp_path: Path) -> None:
    needs_optuna()
    made = search(tmp_path, base=QUICK, tune={**ONE_TRIAL, "trials": 2})
    with pytest.raises(kind, match=r"^trial 0 was interrupted: no space left\. Repeat the command"):
        list(run_search(made, (Fails(kind("no space left")),)))
    assert [(trial.number, trial.state) for trial in run_search(made)] == [(0, "complete"), (1, "complete")]


@pytest.mark.parametrize(("setting", "name"), [("init", "model.safetensors"), ("data.dataset", "data.npz")])
def test_a_trial_without_its_input_file_is_continued_later(
    setting: str, name: str, small: Path, tmp_path: Path
) -> None:
    shutil.copy(small / "trial-0000" / "seed-0" / "model.safetensors", tmp_path)
    classes = np.arange(200) % 10
    np.savez(tmp_path / "data.npz", inputs=np.eye(10, 64, dtype=np.float32)[classes], targets=classes)
    made = search(tmp_path / "out", base={**QUICK, setting: str(tmp_path / name)}, tune={**ONE_TRIAL, "trials": 2})
    trials = run_search(made)
    assert next(trials).state == "complete"
    (tmp_path / name).rename(tmp_path / "moved")
    with pytest.raises(MachineFailed, match=f"^trial 1 was interrupted: {tmp_path / name} does not exist"):
        next(trials)
    (tmp_path / "moved").rename(tmp_path / name)
    assert [(trial.number, trial.state) for trial in run_search(made)] == [(1, "complete")]


def test_a_trial_that_always_loses_its_workers_fails(tmp_path: Path) -> None:
    """Otherwise a batch size that does not fit into memory would block the search for ever."""
    needs_optuna()
    made = search(tmp_path, base=QUICK, tune=ONE_TRIAL)
    for _ in range(2):
        loss = Fails(WorkerLost("a worker process was killed"))
        with suppress(WorkerLost):
            trials = list(run_search(made, (loss,)))
    assert [(trial.state, trial.error) for trial in trials] == [("failed", "a worker process was killed")]


def test_a_trial_with_invalid_settings_fails(tmp_path: Path) -> None:
    needs_optuna()
    made = search(tmp_path, base=QUICK, tune=ONE_TRIAL)
    (trial,) = run_search(made, (Fails(UserError("the batch size does not fit")),))
    assert (trial.state, trial.error) == ("failed", "the batch size does not fit") and list(run_search(made)) == []


def test_a_full_disk_leaves_no_half_line_in_the_journal(small: Path, tmp_path: Path) -> None:
    """Another process may append to the journal before this one opens it again."""
    optuna = pytest.importorskip("optuna")
    out = shutil.copytree(small, tmp_path / "out")
    path = out / optuna_study.JOURNAL
    content = path.read_bytes()
    journal = optuna_study._Journal(optuna, path, out / optuna_study.LOCK)

    def write_half(logs: list[Any]) -> None:
        path.open("ab").write(b'{"op_code": 5, "wor')
        raise OSError(28, "No space left on device")

    journal._file.append_logs = write_half
    with pytest.raises(MachineFailed, match=r"tune\.journal: no space left on device; free some space"):
        journal.append_logs([{}])
    assert path.read_bytes() == content


def test_a_search_is_not_continued_with_other_initial_weights(small: Path, tmp_path: Path) -> None:
    weights = Path(shutil.copy(small / "trial-0000" / "seed-0" / "model.safetensors", tmp_path))
    base = {**QUICK, "init": str(weights)}
    open_study(search(tmp_path / "out", base=base, tune=ONE_TRIAL))
    fedflat.run("fedavg", base=small / "trial-0000" / "seed-0" / "config.yaml", seed=1, out=tmp_path / "other")
    shutil.copy(tmp_path / "other" / "model.safetensors", weights)
    with pytest.raises(UserError, match=r"sha256 of init=\w+ instead of \w+"):
        open_study(search(tmp_path / "out", base=base, tune=ONE_TRIAL))
    weights.unlink()
    open_study(search(tmp_path / "out", base=base, tune=ONE_TRIAL))


def test_an_equivalent_search_continues(small: Path, tmp_path: Path) -> None:
    shutil.copytree(small, tmp_path / "out")
    base = {name: value for name, value in QUICK.items() if name != "rounds"} | {"engine.lanes": 8}
    same = search(
        tmp_path / "out",
        base={**base, "training": {"rounds": 1, "momentum": 0.0}},
        tune={**ONE_TRIAL, "trials": 2},
        jobs=1,
    )
    assert [trial.number for trial in run_search(same)] == [1]
    with pytest.raises(UserError, match=r"2 trials, more than the 1 requested"):
        evaluate_best(search(tmp_path / "out", base=QUICK, tune=ONE_TRIAL))


def test_the_best_trial_of_a_copied_folder_refers_to_the_copy(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = evaluate_best(search(small, base=QUICK, tune=ONE_TRIAL))
    shutil.copytree(small, tmp_path / "copy")
    monkeypatch.setattr("fedflat.experiment.analysis.evaluation.evaluate", None)
    copied = evaluate_best(search(tmp_path / "copy", base=QUICK, tune=ONE_TRIAL))
    assert copied == {**chosen, "folders": [str(tmp_path / "copy" / "trial-0000" / "seed-0")]}
    assert copied == json.loads((tmp_path / "copy" / "best.json").read_text())


def test_a_single_listed_gpu_has_its_own_process(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []
    monkeypatch.setattr(tune, "_run_in_processes", lambda made, at_once: iter(started.append(at_once) or ()))
    monkeypatch.setattr(tune, "run_search", lambda *_, **__: iter(()))
    assert list(run_search_in_parallel(search(tmp_path, devices=[3]))) == [] and started == [1]
    finished = search(small, base=QUICK, tune=ONE_TRIAL, devices=[3])
    assert list(run_search_in_parallel(finished)) == [] and started == [1], "no trial is left"


def test_seeds_are_averaged_and_poor_trials_are_pruned(tmp_path: Path) -> None:
    needs_optuna()
    space = {"lr": [1e-6, 0.3], "batch_size": {"low": 5, "high": 9, "whole": True}}
    made = search(
        tmp_path,
        base={**BASE, "rounds": 4},
        tune={"trials": 8, "space": space, "sampler": "random", "seeds": [0, 1], "prune": True},
    )
    tried = list(run_search(made))
    complete = [trial for trial in tried if trial.state == "complete"]
    assert {trial.state for trial in tried} == {"complete", "pruned"} and all(
        trial.state == "complete" for trial in tried[:5]
    )
    trial = complete[0]
    scores = [
        RunFolder(made.folder(trial.number) / f"seed-{seed}").metrics()[-1]["validation"]["server"]["accuracy"]
        for seed in (0, 1)
    ]
    assert trial.score == pytest.approx(sum(scores) / 2)
    assert len(evaluate_best(made)["test"]) == 2 and evaluate_best(made)["settings"]["training.lr"] == 0.3


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (
            {"base": {**BASE, "data.validation": 0, "algorithm": "fedsam(rho={rho})"}},
            "data.validation",
        ),
        ({"base": {**VALUES["base"], "stop.target": 0.9}}, "stop.target"),
        ({"tune": {"space": {}}}, "tune.space is empty"),
        ({"tune": {"space": {"ratte": [1]}}}, "tune.space 'ratte'"),
        ({"tune": {"space": {**SPACE, "lr": {"low": 2, "high": 1}}}}, "low must be below high"),
        ({"tune": {"space": {**SPACE, "lr": {"low": 0, "high": 1, "log": True}}}}, "low above 0"),
        ({"tune": {"space": {**SPACE, "batch_size": {"low": 5, "high": 9, "whole": True, "step": 0.5}}}}, "integers"),
        ({"tune": {"space": {**SPACE, "batch_size": {"low": 5.5, "high": 9, "whole": True}}}}, "must be integers"),
        ({"tune": {"space": {**SPACE, "lr": []}}}, "training.lr is []"),
        ({"tune": {"space": {**SPACE, "lr": [1], "training.lr": [2]}}}, "training.lr is given twice in tune.space"),
        ({"tune": {"space": {**SPACE, "seed": [0, 1]}}}, "search over seed"),
        (
            {"tune": {"space": {**SPACE, "clients_per_round": {"low": 2, "high": 9, "whole": True}}}},
            "data.clients=8",
        ),
        (
            {"tune": {"space": SPACE, "seeds": [0, -1]}},
            "tune.seeds is [0, -1]",
        ),
        ({"tune": {"space": SPACE, "seeds": [1, 1]}}, "tune.seeds is [1, 1]"),
        ({"tune": {"space": SPACE, "trails": 3}}, "'trails' in tune of the sweep; did you mean trials?"),
        ({"grid": {"seed": [0]}}, "grid, list, exclude or branch"),
        ({"keep": {"models": False}}, "models=false"),
        ({"tune": None}, "no tune section"),
    ],
)
def test_user_errors_are_one_line(more: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        search(tmp_path, **more)
    assert words in str(error.value) and not list(tmp_path.iterdir())


def test_the_best_settings_have_no_placeholders(tmp_path: Path) -> None:
    space = {"algorithm": ["fedprox(mu={mu})", "scaffold(cv_weight={mu})"], "mu": [0.25], "lr": [0.05]}
    search = plan_search(read_sweep({"base": BASE, "tune": {"trials": 1, "space": space}}), tmp_path / "search")
    assert search.resolved({"algorithm": "fedprox(mu={mu})", "mu": 0.25, "training.lr": 0.05}) == {
        "algorithm": "fedprox(mu=0.25)",
        "training.lr": 0.05,
    }
    based = {**BASE, "algorithm": "fedprox(mu={mu})"}
    search = plan_search(read_sweep({"base": based, "tune": {"trials": 1, "space": {"mu": [0.25]}}}), tmp_path / "s")
    assert search.resolved({"mu": 0.25}) == {"algorithm": "fedprox(mu=0.25)"}
    with pytest.raises(UserError, match="fedflat tune FILE"):
        combinations(read_sweep({"base": BASE, "tune": {"space": {"lr": [0.1]}}}))


def test_a_trial_that_cannot_use_its_kernels_is_continued_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_optuna()
    made = search(tmp_path / "search", base=QUICK, tune=ONE_TRIAL)

    def fail(*given: object) -> None:
        raise KernelError("there is no C++ compiler")

    with monkeypatch.context() as patch:
        patch.setattr(LockedRun, "execute", fail)
        with pytest.raises(KernelError):
            list(run_search(made))
    assert [trial.state for trial in run_search(made)] == ["complete"]
