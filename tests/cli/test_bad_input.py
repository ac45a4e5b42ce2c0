"""User errors print one line on stderr and exit with code 2."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch

from tests.cli.conftest import assert_error

WRONG = {
    "unknown algorithm": (("run", "fedsma"), "'fedsma'; did you mean fedswa, fedsam"),
    "unknown parameter": (("run", "fedsam(roh=1)"), "'roh'; did you mean rho"),
    "unknown part": (("run", "fedavg+wim"), "'wim'; did you mean wima"),
    "a part alone": (("run", "sam"), "'sam' is a part, not an algorithm"),
    "two perturbations": (("run", "fedsam+asam"), "perturbation twice"),
    "unreadable text": (("run", "fedavg++sam"), "cannot read 'fedavg++sam'"),
    "negative alpha": (
        ("run", "--partition", "dirichlet(alpha=-1)"),
        "alpha=-1 is out of range; expected a number at least 0",
    ),
    "unknown partition": (("run", "--partition", "dirichle"), "'dirichle'; did you mean dirichlet"),
    "too many clients": (("run", "--clients", "5000"), "5000 clients"),
    "cohort above clients": (
        ("run", "--clients-per-round", "51"),
        "federation.clients_per_round=51 exceeds data.clients=50",
    ),
    "unknown setting": (("run", "--set", "training.rouns=3"), "'rouns'; did you mean rounds"),
    "unknown group": (("run", "--set", "trainin.rounds=3"), "'trainin.rounds'; did you mean training.rounds"),
    "set without a value": (
        ("run", "--set", "training.rounds"),
        "cannot read --set 'training.rounds'; expected key=value",
    ),
    "set nonsense": (("run", "--set", "=;"), "cannot read --set '=;'"),
    "set a group to a value": (("run", "--set", "training=3"), "training=3 is invalid"),
    "set below a value": (("run", "--set", "seed.a=3", "--set", "seed.b.c=1"), "seed"),
    "no rounds": (("run", "--rounds", "0"), "training.rounds=0 is invalid"),
    "infinite rate": (("run", "--set", "training.lr=.inf"), "training.lr"),
    "missing folder": (("run", "--dataset", "images/none"), "images/none does not exist; expected a file of arrays"),
    "unknown dataset": (("run", "--dataset", "cifr10"), "'cifr10'; did you mean cifar10"),
    "unknown model": (("run", "--model", "resnet81"), "'resnet81'; did you mean resnet18"),
    "model for larger images": (("run", "--model", "cnn"), "cnn needs images of at least 16x16 pixels"),
    "unknown augmentation": (("run", "--augmentation", "crop-flop"), "'crop-flop'"),
    "huge count": (("flatness", "sharpness", "r", "--ascent-steps", "9" * 11), "--ascent-steps 99999999999 is too"),
    "unknown device": (("run", "--device", "gpu"), "engine.device='gpu' is invalid"),
    "no config file": (("run", "--config", "missing.yaml"), "no file missing.yaml; expected a YAML file"),
    "no sweep file": (("sweep", "missing.yaml"), "no file missing.yaml; expected a YAML file"),
    "folder for a sweep file": (("sweep", "."), ". is a folder; expected a YAML file"),
    "empty algorithm": (("run", ""), "the algorithm is empty; expected e.g. fedavg"),
    "overlong algorithm": (("run", "a" * 300, "--dry-run"), f"unknown algorithm '{'a' * 60}…'"),
    "unclosed parenthesis": (
        ("run", "--partition", "dirichlet(alpha=0.1"),
        "cannot read 'dirichlet(alpha=0.1': missing )",
    ),
    "unknown short name": (("run", "--set", "roundss=3"), "'roundss'; did you mean rounds"),
    "resume of nothing": (("resume", "nothing"), "in nothing"),
    "show of nothing": (("show", "nothing"), "in nothing"),
    "comparison with itself": (("compare", "fedavg", "fedavg"), "fedavg"),
    "unreadable seeds": (("compare", "fedavg", "--seeds", "a,b"), "cannot read --seeds 'a,b'"),
    "unknown axis": (("compare", "fedavg", "--over", "time"), "'time'"),
    "unknown figure": (("compare", "fedavg", "--figure", "f.xyz"), "f.xyz"),
    "unknown in compare": (("compare", "fedavg", "fedsma"), "'fedsma'"),
    "algorithms of an unknown": (("algorithms", "fedsma"), "'fedsma'"),
    "models of an unknown": (("models", "resnet81"), "'resnet81'; did you mean resnet18"),
    "a model's parameter": (
        ("models", "resnet18(nrm=batch)"),
        "model resnet18 has no parameter 'nrm'; did you mean norm",
    ),
    "data get of an unknown": (("data", "get", "cifr10"), "'cifr10'; did you mean cifar10"),
    "data verify of an unknown": (("data", "verify", "cifr10"), "'cifr10'"),
    "data verify of what is not there": (("data", "verify", "cifar10", "--data-dir", "."), "cifar10"),
    "data describe of an unknown": (("data", "describe", "cifr10"), "'cifr10'"),
    "no natural partition": (("data", "describe", "digits", "--partition", "natural"), "natural"),
}
USAGE = {
    "unknown command": (("rn",), "'rn'"),
    "unknown option": (("run", "--rouns", "3"), "--rouns"),
    "word for a number": (("run", "--rounds", "many"), "--rounds"),
    "missing argument": (("compare",), "ALGORITHM"),
    "no clients": (("data", "describe", "digits", "--clients", "0"), "--clients"),
}


@pytest.mark.parametrize(("arguments", "sentence"), WRONG.values(), ids=WRONG)
def test_user_errors_are_one_line(fedflat, arguments, sentence):
    assert_error(fedflat(*arguments), sentence)
    assert not list(Path().rglob("config.yaml"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_missing_gpu_is_reported_before_the_download(fedflat):
    result = fedflat("run", "--dataset", "cifar10", "--device", "cuda", "--set", "data.dir=nowhere")
    assert_error(result, "engine.device=cuda")


@pytest.mark.parametrize(("arguments", "word"), USAGE.values(), ids=USAGE)
def test_wrong_usage_exits_with_2(fedflat, arguments, word):
    result = fedflat(*arguments)
    assert result.exit_code == 2 and result.stdout == "" and word in result.stderr


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("algoritm: fedavg\n", "'algoritm'; did you mean algorithm"),
        ("training:\n  rouns: 3\n", "'rouns'; did you mean rounds"),
        ("training:\n", "training"),
        ("training: 5\n", "training"),
        ("format: 99\n", "this config has format 99, but this version of fedflat reads format 1; upgrade fedflat"),
        ("format: old\n", "this config has format old, but this version of fedflat reads format 1; use format: 1"),
        (
            "algorithm: [\n",
            "c.yaml is not valid YAML: while parsing a flow node did not find expected node content at line 2",
        ),
        ("just words\n", "c.yaml contains no settings"),
        ("", "c.yaml contains no settings"),
    ],
)
@pytest.mark.parametrize("flags", [(), ("--rounds", "3"), ("--set", "training.rounds=3")])
def test_a_wrong_config_file(fedflat, text, sentence, flags):
    Path("c.yaml").write_text(text)
    assert_error(fedflat("run", "--config", "c.yaml", "--dry-run", *flags), sentence)


def test_a_run_of_another_version(fedflat, small):
    fedflat("run", *small, "--quiet", "--out", "old")
    config = Path("old/config.yaml")
    config.write_text(config.read_text().replace("format: 1", "format: 99"))
    for command in ("resume", "show"):
        assert_error(fedflat(command, "old"), "format 1; upgrade fedflat with pip install --upgrade fedflat")
        assert "damaged" not in fedflat(command, "old").stderr


def test_a_run_without_its_status(fedflat, small):
    fedflat("run", *small, "--quiet", "--out", "r")
    Path("r/status.json").unlink()
    assert_error(fedflat("show", "r"), "status.json is missing or damaged")


@pytest.mark.parametrize(
    ("file", "text", "sentence"),
    [
        ("status.json", "{}", "status.json has no status"),
        ("status.json", "null", "status.json is missing or damaged"),
        ("status.json", "[1]", "status.json is missing or damaged"),
        ("metrics.jsonl", '{"round": 2}\n', "metrics.jsonl is damaged: line 1"),
        ("metrics.jsonl", "[]\n", "metrics.jsonl is damaged: line 1"),
    ],
)
def test_edited_run_files_are_reported(fedflat, finished, file, text, sentence):
    shutil.copytree(finished, "r")
    Path("r", file).write_text(text)
    for command in ("show", "report"):
        assert_error(fedflat(command, "r"), sentence)


def test_an_output_folder_that_is_a_file(fedflat, small):
    Path("file").write_text("")
    for folder in ("file", "file/runs"):
        message = "fedflat: file is a file; expected a folder"
        assert_error(fedflat("compare", "fedavg", *small, "--quiet", "--out", folder), message)
        assert_error(fedflat("report", "nowhere", "--out", folder), message)  # before the runs are read
        assert_error(fedflat("new", "algorithm", "mine", "--out", folder), message)
    assert_error(fedflat("run", *small, "--out", "file/run"), message)
    assert_error(fedflat("run", *small, "--out", "file"), "file exists and is not a run")


def test_a_data_folder_that_is_a_file_or_missing(fedflat):
    Path("file").write_text("")
    for command in ("get", "verify"):
        assert_error(
            fedflat("data", command, "cifar10", "--data-dir", "file"), "file is a file; expected the data folder"
        )
    missing = fedflat("data", "verify", "cifar10", "--data-dir", "nowhere")
    assert_error(missing, "cifar10 is missing: there is no folder nowhere; expected")


def test_a_search_without_a_tune_section(fedflat):
    Path("sw.yaml").write_text("base: {rounds: 3}\n")
    assert_error(fedflat("tune", "sw.yaml"), "sw.yaml has no tune section")


def test_a_folder_that_contains_a_run_is_refused(fedflat, finished):
    assert_error(
        fedflat("run", "--out", finished),
        f"fedflat resume {finished}",
    )


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may read everything")
def test_an_unreadable_folder(fedflat, small):
    fedflat("run", *small, "--quiet", "--out", "r")
    Path("r/metrics.jsonl").chmod(0)
    assert_error(fedflat("show", "r"), "permission denied")


def test_warnings_are_one_line(fedflat):
    result = fedflat(
        "run",
        "fedavg",
        "--rounds",
        "1",
        "--local-steps",
        "1",
        "--model",
        "mlp",
        "--set",
        "training.statistics=own",
        "--quiet",
    )
    assert result.exit_code == 0
    assert result.stderr.startswith("fedflat: training.statistics=own") and "mlp" in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("command", "flag", "ours"),
    [
        ("run", "--learning-rate", "--lr"),
        ("compare", "--per-round", "--clients-per-round"),
        ("run", "--split", "--partition"),
        ("export", "--model", "--average"),
    ],
)
def test_flags_of_other_frameworks_suggest_ours(fedflat, command: str, flag: str, ours: str) -> None:
    result = fedflat(command, "fedavg", flag, "1")
    assert result.exit_code == 2 and ours in result.stderr and "--seed" not in result.stderr
