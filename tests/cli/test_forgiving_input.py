"""Names in any case, positional numbers and short settings work, or the error shows the correct form."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import fedflat as library
from fedflat.data import load_corruptions
from fedflat.errors import UserError

NATURAL = {
    "algorithm": "FedAvg+WiMA(50)",
    "model": "ResNet-18(norm = batch)",
    "dataset": "CIFAR-10",
    "partition": "Dirichlet(0.1) + Held_Out",
    "augmentation": "Crop_Flip(4)+CutOut",
}
CANONICAL = {
    "algorithm": "fedavg+wima(window=50)",
    "model": "resnet18(norm=batch)",
    "dataset": "cifar10",
    "partition": "dirichlet(alpha=0.1)+held-out",
    "augmentation": "crop-flip(padding=4)+cutout",
}


def stored(document: dict) -> dict:
    """The components of a config, by short name."""
    data = {name: document["data"][name] for name in ("dataset", "partition", "augmentation")}
    return {"algorithm": document["algorithm"], "model": document["model"], **data}


def test_names_are_stored_in_their_canonical_spelling(fedflat):
    flags = [text for name, value in list(NATURAL.items())[1:] for text in (f"--{name}", value)]
    Path("natural.yaml").write_text("".join(f"{name}: {text}\n" for name, text in NATURAL.items()))
    assignments = [text for name, value in NATURAL.items() for text in ("--set", f"{name}={value}")]
    for arguments in ([NATURAL["algorithm"], *flags], ["--config", "natural.yaml"], assignments):
        result = fedflat("run", *arguments, "--dry-run", "--json")
        assert result.exit_code == 0, result.output
        assert stored(json.loads(result.stdout)) == CANONICAL


def test_a_run_folder_has_the_canonical_spelling(tmp_path):
    settings = {"model": "MLP(8)", "dataset": "Digits", "partition": "IID", "augmentation": "None"}
    run = library.run("FedAvg", out=tmp_path / "run", rounds=1, local_steps=1, lr=0.05, workers=1, **settings)
    assert run.config.training.lr == 0.05
    text = (tmp_path / "run" / "config.yaml").read_text()
    for line in ("algorithm: fedavg", "model: mlp(hidden=8)", "dataset: digits", "partition: iid"):
        assert line in text


@pytest.mark.parametrize("text", ["lr: 0.05", "training.lr: 0.05", "training:\n  lr: 0.05"])
def test_short_settings_in_yaml_and_set(fedflat, text):
    Path("c.yaml").write_text(f"{text}\n")
    for arguments in (("--config", "c.yaml"), ("--set", "lr=0.05"), ("--config", "c.yaml", "--set", "lr=0.05")):
        document = json.loads(fedflat("run", *arguments, "--dry-run", "--json").stdout)
        assert document["training"]["lr"] == 0.05


def test_a_setting_given_twice_is_refused(fedflat):
    Path("c.yaml").write_text("lr: 0.05\ntraining:\n  lr: 0.1\n")
    for arguments in (("--config", "c.yaml"), ("--lr", "0.05", "--set", "lr=0.1")):
        assert "training.lr is given twice" in fedflat("run", *arguments, "--dry-run").stderr


@pytest.mark.parametrize("text", ["fedavg(lr=0.1)", "FedAvg+WiMA(learning_rate=0.1)"])
def test_a_setting_among_the_parameters_of_an_algorithm(fedflat, text):
    assert "use --lr 0.1 (Python: lr=0.1, YAML: 'lr: 0.1')" in fedflat("run", text).stderr
    assert "use --lr 0.1" in fedflat("algorithms", text).stderr
    with pytest.raises(UserError, match=r"use --lr 0.1 \(Python: lr=0.1"):
        library.run(text)


@pytest.mark.parametrize(
    ("arguments", "correction"),
    [
        (("--partition", "dirichlet 0.1"), "did you mean 'dirichlet(0.1)'?"),
        (("--dataset", "images(path=pets (old))"), "quote a value that contains parentheses"),
        (("fedavg+wima=5",), "did you mean 'fedavg+wima(5)'?"),
        (("fedavg,fedsam",), "pass several algorithms as separate arguments"),
        (("lr=0.1",), "use --set lr=0.1 (Python: lr=0.1)"),
        (("fedavg", "lr=0.1"), "use --set lr=0.1"),
    ],
)
def test_a_number_without_parentheses_or_flag(fedflat, arguments, correction):
    assert correction in fedflat("run", *arguments).stderr


def test_a_file_of_arrays_is_a_dataset(fedflat):
    rng = np.random.default_rng(0)
    np.savez("Wine.npz", x_train=rng.random((40, 3)), y_train=np.arange(40) % 2, x_test=rng.random((4, 3)),
             y_test=np.arange(4) % 2)  # fmt: skip
    document = json.loads(
        fedflat("run", "--dataset", "Wine.npz", "--partition", "iid", "--clients", "10", "--dry-run", "--json").stdout
    )
    assert document["data"]["dataset"] == f"arrays(path={Path.cwd()}/Wine.npz)"
    assert json.loads(fedflat("data", "describe", "Wine.npz", "--json").stdout)["train"] == 40


def test_downloads_and_corruptions_by_natural_names(fedflat, monkeypatch):
    monkeypatch.setattr("fedflat.data.fetch", lambda name, folder, progress: None)
    assert json.loads(fedflat("data", "get", "CIFAR-10", "--json").stdout)["name"] == "cifar10"
    with pytest.raises(UserError, match="cifar10_c is incomplete"):
        load_corruptions("CIFAR-10", data_dir=".", download=False)


def test_a_tilde_is_the_home_directory(fedflat, monkeypatch, tmp_path):
    """Even where the shell does not replace it."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("USERPROFILE", str(tmp_path / "home"))
    few = ("--rounds", "1", "--local-steps", "1", "--workers", "1", "--quiet")
    assert fedflat("run", "fedavg", *few, "--out=~/first").exit_code == 0
    assert fedflat("show", "~/first").exit_code == 0
    library.run("fedavg", out="~/second", rounds=1, local_steps=1, workers=1)
    assert {path.name for path in (tmp_path / "home").iterdir()} >= {"first", "second"}
    assert not Path("~").exists()


def test_a_mistaken_path_is_corrected(fedflat):
    np.savez("wine.npz", X=np.zeros((4, 2)), y=np.arange(4))
    (Path("pets") / "cat").mkdir(parents=True)
    Path("mine.yaml").write_text("base: {rounds: 2}\ntune: {trials: 2}\n")
    library.run("fedavg", out=Path("demo") / "fedavg", rounds=1, local_steps=1, workers=1)
    for arguments, correction in (
        (("data", "describe", "pets"), "images(path=pets)"),
        (("data", "describe", "images(path=pet)"), "did you mean pets?"),
        (("data", "describe", "wines.npz"), "did you mean wine.npz?"),
        (("run", "fedavg", "--config", "mine.yml"), "did you mean mine.yaml?"),
        (("run", "fedavg", "--config", "mine.yaml"), "mine.yaml has the key tune; use fedflat tune FILE"),
        (("data", "describe", "wine.npz"), "expected inputs and targets"),
        (("flatness", "spectrum", "demo"), str(Path("demo") / "*")),
    ):
        result = fedflat(*arguments)
        assert result.exit_code != 0 and correction in " ".join(result.stderr.split()), result.stderr
    assert "did you mean" not in fedflat("run", "fedavg", "--config", "other.yaml").stderr
    assert "mean 0.305" in fedflat("data", "describe", "digits").stdout
