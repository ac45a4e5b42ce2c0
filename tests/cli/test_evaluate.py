"""fedflat evaluate, and runs that start from given weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedflat.experiment.analysis.evaluation import PARTS
from fedflat.reporting.result import Result
from tests.cli.conftest import assert_error


@pytest.fixture(scope="module")
def held_out(tmp_path_factory):
    """A run with unseen clients and a long tail."""
    from .conftest import SMALL, call

    folder = tmp_path_factory.mktemp("held-out") / "run"
    partition = ("--partition", "iid+longtail(factor=5)+held-out", "--clients", "10", "--clients-per-round", "3")
    assert call("run", "fedavg+wima", *SMALL, *partition, "--quiet", "--out", folder).exit_code == 0
    return folder


def test_every_part_is_shown(fedflat, held_out):
    result = fedflat("evaluate", held_out)
    assert result.exit_code == 0 and result.stderr == ""
    lines = (
        "test",
        "10 classes",
        "head of the long tail",
        "tail of the long tail",
        "8 clients",
        "2 unseen clients",
        "participation gap",
    )
    for word in (*lines, "before fine-tuning", "after fine-tuning", "accuracy %", "worst 10 %", "model server"):
        assert word in result.stdout
    assert "Not on" not in result.stdout  # parts that do not apply are listed only if --on names them
    missing = fedflat("evaluate", held_out, "--on", "test,corruptions").stdout
    (corruptions,) = (line for line in missing.splitlines() if "corruptions" in line)
    assert all(name in corruptions for name in ("digits", "cifar10 ", "cifar100"))


def test_evaluation_on_nothing_is_refused(fedflat, held_out):
    result = fedflat("evaluate", held_out, "--on", "")
    assert result.exit_code == 2 and "--on is empty" in result.stderr and "test, classes" in result.stderr


def test_json_is_one_document(fedflat, held_out):
    result = fedflat("evaluate", held_out, "--average", "wima", "--json", "--tune-clients", "3", "--tune-lr", "0.01")
    document = json.loads(result.stdout)
    assert result.stderr == "" and document["folder"] == str(held_out)
    assert (document["model"], document["metric"], document["algorithm"]) == ("wima", "accuracy", "fedavg+wima")
    assert set(document["on"]) | set(document["missing"]) == set(PARTS)
    assert document["on"]["fine-tuned"]["count"] == 3 and document["on"]["fine-tuned"]["lr"] == 0.01
    assert len(document["on"]["clients"]["each"]) == 8


def test_a_model_saved_earlier(fedflat, small):
    fedflat("run", "fedavg", *small, "--save-every", "1", "--quiet", "--out", "r")
    first = json.loads(fedflat("evaluate", "r", "--on", "test", "--round", "1", "--json").stdout)
    logged = json.loads(Path("r/metrics.jsonl").read_text().splitlines()[1])
    assert first["round"] == logged["round"] == 1
    assert first["on"]["test"]["loss"] == pytest.approx(logged["test"]["server"]["loss"])
    assert Result.load("r").evaluate(on="test", rounds=1)["test"] == first["on"]["test"]
    assert "model server, round 1" in fedflat("evaluate", "r", "--on", "test", "--round", "1").stdout
    assert "has no server model of round 9" in fedflat("evaluate", "r", "--round", "9").stderr


def test_unknown_options_in_python_name_the_method(held_out):
    result = Result.load(held_out)
    for method in ("evaluate", "flatness", "post_hoc"):
        with pytest.raises(TypeError, match=f"{method}.* unexpected keyword argument 'presicion'"):
            getattr(result, method)(presicion="float64")


def test_selected_parts(fedflat, held_out):
    document = json.loads(fedflat("evaluate", held_out, "--on", "test, unseen,domains", "--json").stdout)
    assert list(document["on"]) == ["test", "unseen"] and list(document["missing"]) == ["domains"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--on", "tset"), "'tset'; did you mean test"),
        (
            ("--on", "corruptions"),
            "digits has no corrupted test images",
        ),
        (("--average", "ema"), "'ema'"),
        (("--tune-share", "1"), "share=1"),
        (("--tune-lr", "0"), "lr=0"),
    ],
)
def test_user_errors_are_one_line(fedflat, held_out, arguments, sentence):
    assert_error(fedflat("evaluate", held_out, *arguments), sentence)


def test_a_folder_without_a_run(fedflat):
    assert_error(fedflat("evaluate", "nothing"), "there is no run in nothing")


def test_a_run_with_a_damaged_or_missing_model(fedflat, small):
    fedflat("run", *small, "--quiet", "--save-every", "1", "--out", "r")
    for model, arguments, has_remedy in (("model", (), True), ("models/round-000001", ("--round", "1"), False)):
        Path(f"r/{model}.safetensors").write_bytes(b"half a file")
        damaged = fedflat("evaluate", "r", *arguments)
        assert_error(damaged, f"{model}.safetensors is damaged")
        assert ("write it again: fedflat resume r;" in damaged.stderr) == has_remedy
    Path("r/model.safetensors").unlink()
    assert_error(fedflat("evaluate", "r"), "model.safetensors is missing; if the run still has its checkpoint")
    assert fedflat("resume", "r").exit_code == fedflat("evaluate", "r").exit_code == 0
    Path("r/model.safetensors").unlink()
    Path("r/metrics.jsonl").write_text("")  # as of a run stopped before its first evaluation
    Path("r/status.json").write_text('{"status": "running"}')
    for command in ("evaluate", "export"):
        result = fedflat(command, "r")
        assert result.exit_code == 2 and "interrupted: fedflat resume r" in " ".join(result.stderr.split())


def test_initial_weights(fedflat, small):
    fedflat("run", *small, "--quiet", "--out", "first")
    result = fedflat("run", *small, "--init", "first/model.safetensors", "--out", "second", "--json")
    assert json.loads(result.stdout)["config"]["init"] == str(Path("first/model.safetensors").absolute())
    assert_error(
        fedflat("run", *small, "--model", "mlp(hidden=3)", "--init", "first/model.safetensors"),
        "weights of another architecture (mlp)",
    )
    assert_error(fedflat("run", *small, "--init", "first"), "first is a folder")
    assert not Path("runs").exists()


def test_a_dataset_with_parameters_has_a_plain_folder_name(fedflat, small):
    import numpy as np

    labels = np.arange(60) % 3
    np.savez(
        "mine.npz",
        train_inputs=np.eye(3)[labels],
        train_targets=labels,
        test_inputs=np.eye(3),
        test_targets=np.arange(3),
    )
    data = f"arrays(path={Path('mine.npz').absolute()})"
    assert fedflat("run", *small, "--dataset", data, "--partition", "iid", "--quiet", "--clients", "10").exit_code == 0
    (folder,) = Path("runs").iterdir()
    assert (folder / "config.yaml").exists() and folder.name.startswith("fedavg-arrays-path-")
