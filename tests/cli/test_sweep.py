"""fedflat sweep, branch and tune: the plan, the table, JSON and user errors."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedflat.cli.application import app

SWEEP = """
base: {rounds: 2, local_steps: 2, clients_per_round: 3, clients: 8, model: mlp(hidden=8), workers: 1, device: cpu,
  data.validation: 0.1}
grid:
  algorithm: [fedavg, "fedsam(rho={rho})"]
  rho: [0.05, 0.1]
  seed: [0, 1]
keep: {checkpoint: false}
"""
TUNE = """
base: {rounds: 1, local_steps: 1, clients_per_round: 3, clients: 8, model: mlp(hidden=8), workers: 1, device: cpu,
  data.validation: 0.2}
tune: {trials: 3, space: {lr: {low: 0.01, high: 1, log: true}}}
"""


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The file of a sweep and its output folder."""
    folder = tmp_path_factory.mktemp("swept")
    (folder / "mine.yaml").write_text(SWEEP)
    arguments = ["sweep", str(folder / "mine.yaml"), "--out", str(folder / "out"), "--quiet"]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    return folder / "mine.yaml", folder / "out"


def test_a_dry_run_shows_the_plan_and_writes_nothing(fedflat):
    Path("mine.yaml").write_text(SWEEP)
    result = fedflat("sweep", "mine.yaml", "--dry-run")
    assert result.exit_code == 0 and not Path("runs").exists()
    for pattern in (
        r"runs +6, 0 ",
        r"rounds +12 ",
        r"disk +up to [\d.]+ kB",
        r"time +about [\d.]+ ",
        r"folder +runs/mine",
        r"fedsam_rho_0.05--seed-1 +2 rounds",
    ):
        assert re.search(pattern, result.stdout), pattern
    document = json.loads(fedflat("sweep", "mine.yaml", "--dry-run", "--json").stdout)
    assert len(document["runs"]) == 6 and document["disk"]["kept"] < document["disk"]["most"]


def test_the_table_states_that_it_ranks_by_validation(fedflat, swept):
    file, out = swept
    result = fedflat("sweep", file, "--out", out, "--no-probe")
    assert result.exit_code == 0 and re.search(r"runs +6, 6 ", result.stderr)
    for words in ("best first by validation", "fedsam(rho=0.05)", "±", "6 done earlier", f"fedflat report {out}"):
        assert words in result.stdout
    assert not list(out.glob("*/checkpoint/*.safetensors"))


def test_ranking_by_the_test_set_without_validation(fedflat):
    Path("mine.yaml").write_text(SWEEP.replace(",\n  data.validation: 0.1", "").replace("rounds: 2", "rounds: 1"))
    result = fedflat("sweep", "mine.yaml", "--no-probe")
    assert "test set" in result.stdout and "validation " not in result.stdout.split("\n")[2]
    assert "[6/6] fedsam(rho=0.1), seed 1: finished after 1 round" in result.stderr


def test_the_table_shows_settings_that_have_their_default(fedflat):
    Path("mine.yaml").write_text(SWEEP.partition("grid:")[0] + "list: [{lr: 0.2}, {algorithm: fedsam}]\n")
    assert "–" not in fedflat("sweep", "mine.yaml", "--no-probe", "--quiet").stdout
    lines = json.loads(fedflat("sweep", "mine.yaml", "--json").stdout)["lines"]
    assert {(line["varied"]["training.lr"], line["varied"]["algorithm"]) for line in lines} == {
        (0.2, "fedavg"),
        (0.1, "fedsam"),
    }


@pytest.mark.parametrize(
    ("command", "variation"),
    [
        (("sweep", "--no-probe"), "grid: {partition: [iid, dirichlet]}"),
        (("tune",), "tune: {trials: 2, space: {partition: [iid, dirichlet]}}"),
    ],
)
def test_the_suggested_report_separates_partitions(fedflat, command, variation):
    if "tune" in command:
        pytest.importorskip("optuna", minversion="4.0", reason="searches need Optuna (pip install 'fedflat[sweep]')")
    Path("mine.yaml").write_text(SWEEP.partition("grid:")[0] + variation)
    assert "fedflat report runs/mine --apart" in fedflat(*command, "mine.yaml", "--quiet").stdout
    assert fedflat("report", "runs/mine", "--apart", "--no-figures").exit_code == 0


def test_json(fedflat, swept):
    file, out = swept
    result = fedflat("sweep", file, "--out", out, "--json")
    document = json.loads(result.stdout)
    assert result.stderr == "" and document["best_by"] == "validation" and document["metric"] == "accuracy"
    means = [line["validation"]["mean"] for line in document["lines"]]
    assert means == sorted(means, reverse=True) and {run["by"] for run in document["runs"]} == {"before"}
    first = next(run for run in document["runs"] if run["name"] == "fedavg--seed-0")
    last = json.loads((out / "fedavg--seed-0" / "metrics.jsonl").read_text().splitlines()[-1])
    assert (
        first["validation"] == last["validation"]["server"]["accuracy"]
        and first["test"] == last["test"]["server"]["accuracy"]
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("gird: {seed: [0]}", "did you mean grid?"),
        ("grid: {sede: [0]}", "did you mean seed?"),
        ("grid: {algorithm: [fedsam(rhoo=1)]}", "did you mean rho?"),
        ("grid: {}", "grid and list"),
        (
            "base: {clients_per_round: 60}\ngrid: {seed: [0]}",
            "clients_per_round=60",
        ),
        (TUNE, "use fedflat tune mine.yaml"),
        ("format: 1\nseed: 0\ndata: {dataset: digits}", "is the config of one run; use fedflat run --config"),
        ("format: 1\ngrid: {seed: [0]}", "unknown key 'format' in mine.yaml; expected one of base, branch"),
        ("parameters: {}\nslots: {perturbation: [sam]}", "has the key slots; use fedflat discover"),
        ("grid: {seed: [0", "YAML"),
        (TUNE.replace("space", "prune: {min_rounds: 0}, space"), "tune.prune.min_rounds: input should be greater"),
        (TUNE.replace("space", "prune: 5, space"), "true, false, or a mapping with min_rounds, reduction"),
        (
            TUNE.replace("space", "prune: {min_rounds: 2, reductoin: 3}, space"),
            "unknown key 'reductoin' in tune.prune of mine.yaml; did you mean reduction?",
        ),
    ],
)
def test_user_errors_are_one_line(fedflat, text, words):
    Path("mine.yaml").write_text(text)
    result = fedflat("sweep", "mine.yaml")
    assert (
        result.exit_code == 2
        and words in result.stderr
        and len(result.stderr.splitlines()) == 1
        and not Path("runs").exists()
    )


def test_a_run_that_fails_is_named_after_the_table(fedflat):
    Path("mine.yaml").write_text(
        SWEEP.replace('algorithm: [fedavg, "fedsam(rho={rho})"]\n  rho: [0.05, 0.1]', "model: [mlp, bisenetv2]")
    )
    result = fedflat("sweep", "mine.yaml", "--quiet")
    assert result.exit_code == 1 and "best first" in result.stdout
    assert "model-bisenetv2--seed-0" in result.stderr and "(and 1 more)" in result.stderr


def test_a_mistake_that_fails_every_run_is_an_invalid_request(fedflat):
    Path("mine.yaml").write_text(SWEEP.replace("mlp(hidden=8)", "bisenetv2"))
    result = fedflat("sweep", "mine.yaml", "--quiet")
    assert result.exit_code == 2 and "more)" not in result.stderr


def test_branch(fedflat, swept):
    origin = shutil.copytree(swept[1] / "fedavg--seed-0", "a@3")
    assert fedflat("branch", origin, "fedavg", "--rounds", "3", "--out", "whole").exit_code == 0
    result = fedflat("branch", f"{origin}@2", "fedavg", "fedsam", "--rounds", "4", "--out", "out", "--json")
    document = json.loads(result.stdout)
    assert [run["name"] for run in document["runs"]] == ["fedavg", "fedsam"] and Path("out/start.safetensors").exists()
    rounds = [json.loads(line)["round"] for line in Path("out/fedsam/metrics.jsonl").read_text().splitlines()]
    assert rounds == [2, 3, 4]
    result = fedflat("branch", origin, "fedavg", "--set", "training.rounds=3", "--dry-run")
    assert result.exit_code == 0 and f"{origin}-at-2" in result.stdout and re.search(r"rounds +1 ", result.stdout)
    wrong = fedflat("branch", f"{origin}@1", "fedavg")
    assert wrong.exit_code == 2 and "after rounds 2" in wrong.stderr


def test_tune(fedflat):
    pytest.importorskip("optuna", minversion="4.0", reason="searches need Optuna (pip install 'fedflat[sweep]')")
    Path("mine.yaml").write_text(TUNE)
    shown = fedflat("tune", "mine.yaml", "--dry-run")
    assert shown.exit_code == 0 and "training.lr" in shown.stdout and not Path("runs").exists()
    result = fedflat("tune", "mine.yaml", "--out", "out")
    assert (
        result.exit_code == 0
        and "Best of 3 trials by validation accuracy" in result.stdout
        and "evaluated once" in result.stdout
    )
    assert result.stderr.count("validation 0.") == 3 and "trial 2: training.lr=" in result.stderr
    document = json.loads(fedflat("tune", "mine.yaml", "--out", "out", "--json").stdout)
    assert document["trial"] in (0, 1, 2) and len(document["test"]) == 1
    assert fedflat("tune", "mine.yaml", "--out", "out", "--dry-run").exit_code == 0, "the same search continues there"
    Path("other.yaml").write_text(TUNE.replace("data.validation: 0.2", "data.validation: 0.3"))
    refused = [fedflat("tune", "other.yaml", "--out", "out", *flags) for flags in ([], ["--dry-run"])]
    assert refused[0].stderr == refused[1].stderr and "data.validation=0.2" in refused[1].stderr


def test_a_search_needs_a_validation_split(fedflat):
    Path("mine.yaml").write_text(TUNE.replace(",\n  data.validation: 0.2", ""))
    result = fedflat("tune", "mine.yaml")
    assert result.exit_code == 2 and "data.validation" in result.stderr
