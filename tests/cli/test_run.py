"""run, resume, show: one experiment from its flags to its folder and back."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
import yaml

import fedflat as library
from fedflat.engines.problem import kernels
from fedflat.errors import UserError

needs_compiler = pytest.mark.skipif(kernels.compiler() is None, reason="there is no C++ compiler")


def test_a_run_prints_metrics_and_writes_its_folder_and_curve(fedflat, small):
    result = fedflat("run", "fedavg", *small)
    folder = Path("runs/fedavg-digits-seed0")
    assert result.exit_code == 0
    for word in (
        "digits, dirichlet(alpha=0.1), seed 0",
        "best over test",
        "mean of last 10 %",
        "of evaluations (n=1)",
        "finished after 3 of 3 rounds",
        str(folder),
    ):
        assert word in result.stdout
    assert (folder / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert not list(folder.rglob("*.part"))
    assert "finished after 3 rounds" in result.stderr


def test_a_mean_over_fewer_evaluations_states_their_number(fedflat, small):
    shown = fedflat("run", "fedavg+swa(start=0.95,every=1)", *small, "--rounds", "11", "--local-steps", "1").stdout
    assert "of evaluations  " in shown and "(n=2)" in shown and "(n=1)" in shown


def test_an_existing_default_folder_gets_a_number(fedflat, small):
    first, second = (json.loads(fedflat("run", "fedavg+ema", *small, "--json").stdout) for _ in range(2))
    assert (first["folder"], second["folder"]) == ("runs/fedavg-ema-digits-seed0", "runs/fedavg-ema-digits-seed0-2")
    assert first["models"] == second["models"]
    assert set(first["models"]) == {"server", "ema"}


def test_json_is_one_document_and_silent(fedflat, small):
    result = fedflat("run", *small, "--json", "--seed", "4", "--set", "federation.weighting=uniform")
    document = json.loads(result.stdout)
    assert result.stderr == ""
    assert document["status"] == "finished" and document["config"]["seed"] == 4
    assert document["config"]["federation"]["weighting"] == "uniform"
    assert document["cost"]["bytes_up"] > 0 and document["models"]["server"]["mean_count"] == 1


def test_a_dry_run_reads_back_as_the_same_config(fedflat):
    first = fedflat(
        "run", "scaffold+sam(rho=0.1)+wima", "--rounds", "7", "--clip", "10", "--set", "training.lr=1e-3", "--dry-run"
    )
    Path("again.yaml").write_text(first.stdout)
    assert yaml.safe_load(first.stdout)["training"]["lr"] == 0.001
    assert fedflat("run", "--config", "again.yaml", "--dry-run").stdout == first.stdout
    assert json.loads(fedflat("run", "--config", "again.yaml", "--dry-run", "--json").stdout) == yaml.safe_load(
        first.stdout
    )
    assert not Path("runs").exists()


def test_flags_win_over_the_file_and_set_over_flags(fedflat):
    Path("base.yaml").write_text("algorithm: fedsam\ntraining:\n  rounds: 5\n  batch_size: 20\n")
    made = yaml.safe_load(
        fedflat("run", "--config", "base.yaml", "--rounds", "6", "--set", "training.batch_size=30", "--dry-run").stdout
    )
    assert (made["algorithm"], made["training"]["rounds"], made["training"]["batch_size"]) == ("fedsam", 6, 30)


def test_show_prints_settings_and_partition(fedflat, finished):
    shown = fedflat("show", finished)
    assert shown.exit_code == 0
    for word in (
        "wima",
        "training.local_steps",
        "dirichlet(alpha=0.1",
        "heterogeneity",
        "28 to 29, median 29",
    ):
        assert word in shown.stdout
    for name in ("engine.compile", "engine.precision"):  # recorded as off and float32, although the settings are auto
        assert name not in shown.stdout
    document = json.loads(fedflat("show", finished, "--json").stdout)
    assert document["partition"]["clients"] == 50 and document["algorithm"] == "fedmoswa+wima"


def test_resuming_a_finished_run_only_draws_a_missing_figure(fedflat, finished):
    (finished / "curve.png").unlink()
    result = fedflat("resume", finished)
    assert (finished / "curve.png").exists()
    assert result.exit_code == 0
    first = result.stdout.splitlines()[0]
    assert str(finished) in first and "finished" in first
    assert json.loads(fedflat("resume", finished, "--json").stdout)["status"] == "finished"


def test_a_resumed_run_equals_an_uninterrupted_one(fedflat, small):
    fedflat("run", "fedmo", *small, "--quiet", "--out", "whole")
    stopped = fedflat("run", "fedmo", *small, "--set", "stop.seconds=0.000001", "--json", "--out", "parts")
    assert json.loads(stopped.stdout)["status"] == "paused"
    shown = " ".join(fedflat("show", "parts").stdout.split())
    assert "after round 1; last checkpoint: round 1; continue with fedflat resume parts" in shown
    assert "Resuming from the checkpoint of round 1 of" in fedflat("resume", "parts").stderr
    while json.loads(fedflat("resume", "parts", "--workers", "1", "--json").stdout)["status"] != "finished":
        pass
    assert Path("parts/metrics.jsonl").read_text() == Path("whole/metrics.jsonl").read_text()


def test_resume_may_change_only_execution_settings(fedflat, small):
    fedflat("run", "fedmo", *small, "--set", "stop.seconds=0.000001", "--quiet", "--out", "r")
    absent = fedflat("resume", "r", "--device", "cuda")
    assert absent.exit_code != 0 and "engine.device=cuda" in absent.stderr
    assert "No such option" in fedflat("resume", "r", "--lr", "0.5").stderr
    with pytest.raises(UserError, match=r"'lr'.*data_dir, device"):
        library.resume("r", lr=0.5)
    assert library.resume("r", engine="loop", workers=1).status in ("paused", "finished")


def test_an_unfinished_run_is_shown_with_the_resume_command(fedflat, small):
    folder = Path("my run")
    fedflat("run", *small, "--quiet", "--out", folder)
    (folder / "status.json").write_text('{"status": "running"}')
    shown = " ".join(fedflat("show", folder).stdout.split())
    assert "last evaluation: round 3 of 3; last checkpoint: round 3; continue with fedflat resume 'my run'" in shown
    (folder / "metrics.jsonl").write_text("")
    shutil.rmtree(folder / "checkpoint")
    shown = fedflat("show", folder).stdout
    assert "interrupted before its first evaluation; no checkpoint" in shown and "best over test" not in shown
    assert "no checkpoint yet; starting from round 0" in fedflat("resume", folder).stderr


def test_results_on_validation_data_and_unseen_clients_are_shown(fedflat, small):
    parts = ["--partition", "iid+held-out(0.2)", "--set", "data.validation=0.2"]
    shown = " ".join(fedflat("run", "fedavg+ema", *small, *parts, "--out", "r").stdout.split())
    assert "at best last last" in shown and "validation on validation on unseen" in shown and "over test" not in shown
    document = json.loads(fedflat("show", "r", "--json").stdout)
    entry = library.load("r").history[-1]
    assert document["last_validation_metrics"] == entry["validation"]
    assert document["last_unseen_metrics"] == entry["unseen"]
    assert f"{100 * entry['unseen']['ema']['accuracy']:.2f}" in shown
    first, *others = Path("r/metrics.jsonl").read_text().splitlines()
    best = json.loads(first)  # the best test value, but the lowest validation value
    best["test"]["server"]["accuracy"], best["validation"]["server"]["accuracy"] = 0.99, 0.0
    Path("r/metrics.jsonl").write_text("\n".join([json.dumps(best), *others, ""]))
    assert library.load("r").summary().best == 0.99 and "99.00" not in fedflat("show", "r").stdout
    table = fedflat("compare", "fedavg", "fedprox", *small, *parts, "--seeds", 1, "--out", "c").stdout
    assert (
        "at best" in table
        and (row := json.loads(fedflat("show", "c", "--json").stdout)["rows"][0])["at_best_validation"]
    )
    assert row["last"]["std"] is None, "one seed has no standard deviation"


def test_a_run_with_a_custom_task_is_resumed_and_evaluated_in_python(fedflat):
    class Doubled(library.Classification):
        def loss(self, output, target):
            return 2 * super().loss(output, target)

    more = {"rounds": 2, "local_steps": 1, "clients_per_round": 2, "workers": 1, "stop__seconds": 1e-6}
    assert library.run("fedavg", task=Doubled(), out="mine", **more).status == "paused"
    for command in ("show", "resume"):
        result = fedflat(command, "mine")
        assert "fedflat.resume('mine', task=...)" in " ".join((result.stdout + result.stderr).split())
    assert result.exit_code == 2
    assert library.resume("mine", task=Doubled()).status == "finished"
    evaluated = fedflat("evaluate", "mine", "--on", "test")
    assert evaluated.exit_code == 0 and "custom task, " in evaluated.stderr
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        library.load("mine").evaluate(on="test", task=Doubled())


def test_a_diverged_run_is_a_result_with_a_reason(fedflat, small):
    result = fedflat("run", "fedavg", *small, "--lr", "1e20", "--quiet")
    assert result.exit_code == 0
    assert "diverged: round 1" in result.stdout and "learning rate" in result.stdout
    assert "problem: try 1, or clip" in " ".join(result.stdout.split())


def test_quiet_shows_the_table_but_no_progress(fedflat, small):
    result = fedflat("run", *small, "--quiet")
    assert result.stderr == "" and "finished" in result.stdout


@pytest.mark.parametrize(
    "flag",
    [
        "--dataset",
        "--partition",
        "--clients",
        "--clients-per-round",
        "--lr",
        "--eval-every",
        "--model",
        "--seed",
        "--device",
    ],
)
def test_flags_carry_the_help_of_the_config(fedflat, flag):
    shown = fedflat("run", "--help").stdout
    assert flag in shown
    assert "local learning rate (default: 0.1)" in shown


@pytest.mark.parametrize("word", ["on", "off", "auto"])
def test_yaml_booleans_are_read_as_words(fedflat, word):
    told = yaml.safe_load(
        fedflat("run", "--set", f"engine.compile={word}", "--set", "training.rounds=7", "--dry-run").stdout
    )
    assert told.get("engine", {}).get("compile", "auto") == word and told["training"]["rounds"] == 7


@pytest.mark.parametrize("works", [pytest.param(True, marks=needs_compiler), False])
def test_a_long_run_says_that_it_compiles_or_why_it_does_not(fedflat, monkeypatch, tmp_path, works):
    monkeypatch.setattr("fedflat.experiment.setup.engine.MIN_STEPS_TO_COMPILE", 1)
    if not works:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        monkeypatch.setattr("fedflat.experiment.setup.engine.compiler", lambda: "false")
        monkeypatch.setattr("fedflat.engines.problem.kernels.compiler", lambda: "false")
        kernels._library.cache_clear()
    images = np.random.default_rng(0).random((200, 1, 16, 16), dtype="float32")
    np.savez("images.npz", inputs=images, targets=np.arange(200) % 2)
    data = ("--dataset", "images.npz", "--clients", "5", "--partition", "iid", "--clients-per-round", "2")
    training = ("--model", "lenet5", "--batch-size", "16", "--rounds", "1", "--local-steps", "1")
    lines = []
    for compile in ("auto", "off"):
        result = fedflat("run", *data, *training, "--set", f"engine.compile={compile}", "--out", compile)
        assert result.exit_code == 0
        lines.append(result.stderr)
    assert ("compile: on (engine.compile=auto" in lines[0]) == works and "compile: on" not in lines[1]
    assert ("could not be compiled (false failed); training continues with torch's kernels" in lines[0]) != works
    assert f"compile: '{'on' if works else 'off'}'" in Path("auto/config.yaml").read_text()
    is_equal = Path("auto/model.safetensors").read_bytes() == Path("off/model.safetensors").read_bytes()
    assert is_equal != works
