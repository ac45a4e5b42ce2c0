"""The campaign's queue at small scale on digits, and the results that its page describes."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import signal
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import fmean, stdev
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import fedflat
from fedflat.errors import UserError
from fedflat.papers.protocol import protocol_hash, protocol_of
from fedflat.papers.results import read_results
from fedflat.processes import ChildKilled, ChildProcess

ROOT = Path(__file__).parents[1]
STUDIES = ROOT / "studies"
JOB = "fedswa/table2/cifar100-lenet-5/fedmoswa-seed0"
EXPERIMENT = "fedswa/table2/cifar100-lenet-5/fedswa"
SEARCH = f"search/{EXPERIMENT}"


@pytest.fixture(scope="module")
def campaign() -> ModuleType:
    """The script as a module; it imports others from its own directory."""
    sys.path.insert(0, str(STUDIES))
    try:
        return importlib.import_module("campaign")
    finally:
        sys.path.remove(str(STUDIES))


def small(folder: Path, *words: str) -> list[str]:
    """The command line of a campaign at small scale below a folder without datasets."""
    places = ["--results", folder / "results", "--work", folder / "work", "--data-dir", folder / "data"]
    return [*map(str, places), "--small", "--device", "cpu", "--precision", "float32", *words]


def stored(folder: Path, job: str = JOB) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((folder / "results" / f"{job}.json").read_text())
    return result


def test_runs_what_is_missing_once(campaign: ModuleType, tmp_path: Path) -> None:
    words = small(tmp_path, "--log", str(tmp_path / "log"), "--rounds", "3")
    words += ["--only", "fedswa/table2/cifar100-*/fed*sam-seed0"]
    table = campaign.main(words)
    assert sorted(path.name for path in (tmp_path / "results").rglob("*.json")) == [
        "fedasam-seed0.json",
        "fedlesam-seed0.json",
        "fedsam-seed0.json",
    ]
    result = stored(tmp_path, "fedswa/table2/cifar100-lenet-5/fedsam-seed0")
    accuracy = result["cells"]["table2/fedsam/cifar100-lenet-5-accuracy"]
    assert accuracy["published"] == "47.9±0.1"
    assert accuracy["measured"] == pytest.approx(100 * result["metrics"]["server"]["last"])
    assert result["curve"]["server"][-1] == result["metrics"]["server"]["last"]
    assert result["curve_rounds"] == list(range(4))
    assert f"| fedsam/cifar100-lenet-5-accuracy | 47.9±0.1 | {accuracy['measured']:.2f} | 1 |" in table
    log = (tmp_path / "log").read_text()
    assert log.count("start") == 3
    assert not list((tmp_path / "work").rglob("metrics.jsonl")), "the folders of finished runs are removed"
    assert campaign.main(words) == table
    assert (tmp_path / "log").read_text() == log


def test_jobs_longer_than_the_time_limit_are_not_started(campaign: ModuleType, tmp_path: Path) -> None:
    campaign.main(small(tmp_path, "--only", JOB, "--rounds", "3", "--minutes", "0.5"))
    assert not (tmp_path / "results").exists()


def test_jobs_that_cannot_run_are_reported(
    campaign: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for trial in (["--small"], ["--rounds", "3"]):
        with pytest.raises(SystemExit):
            campaign.main(trial)
        assert "they would replace full results" in capsys.readouterr().err
    with pytest.raises(UserError, match="no run matches --only fedswa/tabel2"):
        campaign.main(["--list", "--only", "fedswa/tabel2/*"])
    with pytest.raises(UserError, match=r"no dataset found in .*: fedflat data get cifar100"):
        campaign.main(["--only", JOB, "--results", str(tmp_path), "--data-dir", str(tmp_path)])


def run_campaign(pipe: Connection, words: list[str]) -> None:
    """Main function of a process."""
    importlib.import_module("campaign").main(words)


def test_resumes_after_being_killed(campaign: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Killing(campaign.AverageMonitor):  # type: ignore[name-defined,misc]
        def round_done(self, run: Any) -> None:
            super().round_done(run)
            if run.rounds == 4:
                os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(campaign, "WINDOW", 3)
    words = ["--only", JOB, "--rounds", "8", "--checkpoint-every", "2"]
    with monkeypatch.context() as patch:
        patch.setattr(campaign, "AverageMonitor", Killing)
        patch.setattr("fedflat.processes.START_METHOD", "fork")  # a new process would import torch
        process = ChildProcess(run_campaign, small(tmp_path / "killed", *words))
    with pytest.raises(ChildKilled):
        process.receive()
    assert not (tmp_path / "killed" / "results").exists()
    campaign.main(small(tmp_path / "killed", *words))
    campaign.main(small(tmp_path / "whole", *words))
    killed, whole = stored(tmp_path / "killed"), stored(tmp_path / "whole")
    assert killed["curve"] == whole["curve"]
    assert killed["cells"] == whole["cells"]
    assert set(whole["metrics"]) == {"server", "wima", "ema"}
    assert set(killed["metrics"]) == {"server", "wima"}, "the window begins after the resumption, the EMA before"
    assert killed["metrics"]["wima"] == whole["metrics"]["wima"]


def test_a_search_selects_a_learning_rate_on_held_out_training_data(campaign: ModuleType, tmp_path: Path) -> None:
    words = small(tmp_path, "--rounds", "3", "--only", "fedswa/table2/cifar100-*/fedswa-seed0", "tuned/*/fedswa-seed0")
    table = campaign.main(words)
    searched = {lr: stored(tmp_path, f"{SEARCH}-lr{lr}-seed0") for lr in ("0.01", "0.03", "0.1", "0.3")}
    assert {result["protocol"]["validation"] for result in searched.values()} == {0.1}
    assert not any(result["cells"] for result in searched.values())
    config = next(
        job for job in campaign.queue(campaign.parse_arguments(words)) if job.name.endswith("-lr0.3-seed0")
    ).config
    curve = [line["validation"]["server"]["accuracy"] for line in fedflat.run(config.algorithm, base=config).history]
    assert searched["0.3"]["curve"]["server"] == pytest.approx(curve, abs=1e-4)
    best = max(searched, key=lambda lr: searched[lr]["metrics"]["server"]["last"])
    tuned = stored(tmp_path, f"tuned/{EXPERIMENT}-seed0")
    assert (f"{tuned['protocol']['lr']:g}", tuned["protocol"]["validation"]) == (best, 0.0)
    assert tuned["selection"].startswith(f"learning rate {best}, selected from 0.01, 0.03, 0.1 and 0.3 on 10 %")
    assert (
        f"| {100 * tuned['metrics']['server']['last']:.2f} | 0.0 | other settings; tuned: learning rate {best}" in table
    )


def test_a_selection_needs_every_run_of_the_search_and_none_that_diverged(campaign: ModuleType, tmp_path: Path) -> None:
    """If the paper's learning rate is selected, the paper's run is not repeated."""
    words = small(tmp_path, "--rounds", "2", "--only", "fedswa/table2/cifar100-*/fedswa-seed0", "tuned/*/fedswa-seed0")
    campaign.main(words)
    paths = {lr: tmp_path / "results" / f"{SEARCH}-lr{lr}-seed0.json" for lr in ("0.01", "0.03", "0.1", "0.3")}
    results = {lr: json.loads(path.read_text()) for lr, path in paths.items()}

    def tuned_rates(**changes: dict[str, Any]) -> list[float]:
        for lr, path in paths.items():
            path.write_text(json.dumps(results[lr] | {"metrics": {"server": {"last": 0.2}}} | changes.get(lr, {})))
        state = campaign.Campaign(campaign.parse_arguments(words))
        return [job.experiment.training.lr for job in state.tuned_jobs()]

    best = {"metrics": {"server": {"last": 0.9}}}
    assert tuned_rates(**{"0.1": best}) == [0.1]
    assert tuned_rates(**{"0.1": best | {"status": "diverged"}, "0.03": {"metrics": {"server": {"last": 0.3}}}}) == [
        0.03
    ]
    assert tuned_rates(**{lr: {"status": "diverged"} for lr in paths}) == []
    assert tuned_rates(**{"0.1": best, "0.3": {"protocol_hash": "another"}}) == []

    assert tuned_rates(**{"0.1": best}) == [0.1]
    only_search = campaign.parse_arguments([*words[: words.index("--only")], "--only", "search/*"])
    assert campaign.Campaign(only_search).tuned_jobs() == []
    tuned = f"tuned/{EXPERIMENT}-seed0"
    (tmp_path / "results" / f"{tuned}.json").unlink()
    campaign.main(words)
    paper = stored(tmp_path, f"{EXPERIMENT}-seed0")
    repeated = stored(tmp_path, tuned)
    assert repeated["curve"] == paper["curve"]
    assert repeated["cost"] == {"seconds": 0, "note": f"included in {EXPERIMENT}-seed0.json"}

    tuned_rates(**{"0.03": best})
    state = campaign.Campaign(campaign.parse_arguments([*words, "fedswa/table2/cifar100-*/fedavg-seed0"]))
    assert [job.name.rpartition("/")[2] for job, _ in state.missing()] == ["fedswa-seed0", "fedavg-seed0"]


def test_a_search_follows_the_protocol_of_the_paper(campaign: ModuleType) -> None:
    """A wrong setting must not surface after minutes on a GPU."""
    jobs = {
        job.name: job for job in campaign.queue(campaign.parse_arguments(["--only", "search/*", "fedswa/table2/*"]))
    }
    search, paper = jobs[f"{SEARCH}-lr0.3-seed0"].config, jobs[f"{EXPERIMENT}-seed0"].config
    assert search.changed(training={"lr": 0.1}, data={"validation": 0.0}) == paper


def test_processes_share_the_queue(
    campaign: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """They are forks, because new processes would import torch; none runs before both have started a job."""
    log, only, run = tmp_path / "log", "fedswa/table2/cifar10-*/fed*sam-seed0", campaign.Campaign._run
    words = small(tmp_path, "--jobs", "2", "--log", str(log), "--only", only, "--rounds", "2")

    class Fork:
        """Stands in for subprocess.Popen."""

        def __init__(self, command: list[str]) -> None:
            assert command[: 2 + len(words)] == [sys.executable, campaign.__file__, *words]
            self.process = multiprocessing.get_context("fork").Process(target=campaign.main, args=(command[2:],))
            self.process.start()

        def poll(self) -> int | None:
            self.returncode = self.process.exitcode
            return self.returncode

    def run_together(self: Any, job: Any) -> None:
        while len({line.split()[1] for line in log.read_text().splitlines()}) < 2:
            time.sleep(0.01)
        run(self, job)

    monkeypatch.setattr(campaign.Campaign, "_run", run_together)
    monkeypatch.setattr(campaign, "subprocess", SimpleNamespace(Popen=Fork))
    assert "fedasam/cifar10-lenet-5-accuracy" in campaign.main(words)
    assert capfd.readouterr().err == "", "quiet unless stderr is a terminal"
    started = [line.split()[3] for line in log.read_text().splitlines() if line.split()[2] == "start"]
    assert len(started) == len(set(started)) == len(list((tmp_path / "results").rglob("*.json"))) == 3


def test_averages_equal_those_of_the_library(campaign: ModuleType, tmp_path: Path) -> None:
    job = "fedswa/table2/cifar100-lenet-5/fedavg-seed0"
    words = small(tmp_path, "--only", job, "--rounds", "5")
    campaign.main(words)
    options = campaign.parse_arguments(words)
    (planned,) = campaign.queue(options)
    test = fedflat.run("fedavg+wima(window=100)+ema(decay=0.99)", base=planned.config).history[-1]["test"]
    metrics = stored(tmp_path, job)["metrics"]
    assert metrics["wima"]["last"] == pytest.approx(next(v for k, v in test.items() if "wima" in k)["accuracy"])
    assert metrics["ema"]["last"] == pytest.approx(next(v for k, v in test.items() if "ema" in k)["accuracy"])


def test_experiments_that_did_not_learn_come_last(campaign: ModuleType, tmp_path: Path) -> None:
    words = small(tmp_path, "--only", "fedswa/table2/cifar100-*/fedavg-*", "fedswa/table2/cifar100-*/fedsam-*")
    campaign.main([*words, "--only", "fedswa/table2/cifar100-*/fedavg-seed0"])
    path = tmp_path / "results" / "fedswa/table2/cifar100-lenet-5/fedavg-seed0.json"
    result = json.loads(path.read_text())
    state = campaign.Campaign(campaign.parse_arguments(words))

    def names() -> list[str]:
        return [job.name.rpartition("/")[2] for job, _ in state.missing()]

    assert names() == ["fedsam-seed0", "fedavg-seed1", "fedsam-seed1", "fedavg-seed2", "fedsam-seed2"]
    result["curve"]["server"] = [0.1] * len(result["curve_rounds"])
    path.write_text(json.dumps(result))
    assert names() == ["fedsam-seed0", "fedsam-seed1", "fedsam-seed2", "fedavg-seed1", "fedavg-seed2"]
    path.write_text(json.dumps(result | {"protocol_hash": "another"}))
    assert names()[0] == "fedavg-seed0", "a result under another protocol does not count"


def test_first_seeds_come_first(campaign: ModuleType, tmp_path: Path) -> None:
    options = campaign.parse_arguments(["--results", str(tmp_path), "--only", "fedwmsam/*", "eccv/*", "fedswa/*"])
    seeds = [job.stage.seed for job, _ in campaign.Campaign(options).missing()]
    assert seeds == sorted(seeds) and set(seeds) == {0, 1, 2}


def test_the_hash_depends_on_values_and_not_on_names(campaign: ModuleType, tmp_path: Path) -> None:
    (job,) = campaign.queue(campaign.parse_arguments(["--only", JOB]))
    assert job.protocol_hash == "dbbc6518eb58c320"
    protocol = json.loads(json.dumps(protocol_of(job.experiment)))
    slot = protocol["parameters"]["server"]
    protocol["parameters"]["server"] = {f"new_{name}": value for name, value in slot.items()}
    assert protocol_hash(protocol) == job.protocol_hash
    assert protocol_hash(protocol | {"lr": 0.2}) != job.protocol_hash
    protocol["parameters"]["server"] = dict.fromkeys(slot, 2.0)
    assert protocol_hash(protocol) != job.protocol_hash


def test_committed_results_count_for_the_queue(campaign: ModuleType) -> None:
    options = campaign.parse_arguments(["--results", str(ROOT / "results")])
    finished = {f"{job.name}.json" for job, _ in campaign.Campaign(options).finished()}
    assert finished == {
        result.file for result in read_results(ROOT / "results") if result.kind != "released" and not result.source
    }


def test_the_documented_numbers_of_mofedsam_are_those_of_its_runs() -> None:
    lines = [line.strip("| ").split(" | ") for line in section("MoFedSAM and weight decay") if line.startswith("| ")]
    documented = {(float(decay), clip, float(rho), *numbers) for decay, clip, rho, *numbers in lines[1:]}
    runs = json.loads((STUDIES / "results" / "mofedsam_weight_decay.json").read_text())["runs"]
    measured = set()
    for run in runs.values():
        last_round, accuracy, norm = run["curve"][-1]
        if last_round == 300:
            clip = "none" if run["clip"] is None else f"{run['clip']:g}"
            measured.add((run["weight_decay"], clip, run["rho"], f"{100 * accuracy + 1e-9:.1f}", f"{norm:.1f}"))
    assert documented == measured


def test_the_documented_numbers_of_the_released_code_are_those_of_its_run() -> None:
    released_run = json.loads((STUDIES / "results" / "released_fedswa.json").read_text())["runs"]["main.py, FedSWA"]
    released = {rounds - 1: accuracy for rounds, accuracy in released_run["curve"]}
    folder = ROOT / "results/fedswa/table2/cifar100-lenet-5"
    curves = []
    for path in sorted(folder.glob("fedswa-seed*.json")):
        result = json.loads(path.read_text())
        accuracies = [100 * value for value in result["curve"]["server"]]
        curves.append(dict(zip(result["curve_rounds"], accuracies, strict=True)))
    checked = 0
    for rounds, theirs, ours in rows_of("FedSWA's released code", ("| 100 ", "| 200 ", "| 300 ", "| 400 ", "| mean")):
        at = range(330, 421, 10) if rounds.startswith("mean") else [int(rounds)]
        assert theirs == f"{fmean(released[t] for t in at):.2f}"
        values = [fmean(curve[t] for t in at) for curve in curves]
        assert ours == f"{fmean(values):.2f} ± {stdev(values):.2f}"
        checked += 1
    assert checked == 5


def rows_of(title: str, start: str | tuple[str, ...]) -> list[list[str]]:
    """The cells of a section's table rows that start with one of some texts."""
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in section(title) if line.startswith(start)]


def section(title: str) -> list[str]:
    """The lines of a section of the page."""
    page = (ROOT / "docs" / "campaign.md").read_text()
    return page.partition(f"## {title}\n")[2].partition("\n## ")[0].splitlines()
