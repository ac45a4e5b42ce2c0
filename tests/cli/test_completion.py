"""The shell completes commands, flags, components, settings and run folders."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedflat.cli.application import app
from fedflat.experiment.config import setting_names


def completed(words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What bash offers for the last of ``words``."""
    monkeypatch.setenv("_FEDFLAT_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split(" ")) - 1))
    with pytest.raises(SystemExit):
        app(prog_name="fedflat")
    return capsys.readouterr().out.split()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("fedflat do", ["doctor"]),
        ("fedflat run --init-h", ["--init-head"]),
        ("fedflat compare fedavg fedlesam-", ["fedlesam-s", "fedlesam-d"]),
        ("fedflat run fedavg+wi", ["fedavg+wima"]),
        ("fedflat run --dataset cifar100", ["cifar100", "cifar100_c"]),
        ("fedflat data describe fem", ["femnist"]),
        ("fedflat run --model resnet", ["resnet18", "resnet20"]),
        ("fedflat models vgg", ["vgg11"]),
        ("fedflat run --partition dirichlet-", ["dirichlet-reuse", "dirichlet-classwise", "dirichlet-lda"]),
        ("fedflat run --partition iid+", ["iid+longtail", "iid+held-out"]),
        ("fedflat run --augmentation crop-flip+c", ["crop-flip+crop-flip", "crop-flip+cutout"]),
        ("fedflat run --engine l", ["loop", "lanes"]),
        ("fedflat run --set training.lr", ["training.lr=", "training.lr_decay="]),
        ("fedflat run --set ", [f"{name}=" for name in setting_names()]),
    ],
)
def test_completions(words, expected, monkeypatch, capsys):
    assert completed(words, monkeypatch, capsys) == expected


@pytest.mark.parametrize("command", ["show", "watch", "resume", "report", "branch", "flatness path r"])
def test_run_folders(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for run in ("runs/first", "runs/grid/second"):
        Path(run).mkdir(parents=True)
        Path(run, "config.yaml").touch()
    for folder in ("results", ".hidden/run"):
        Path(folder).mkdir(parents=True)
    Path(".hidden/run/config.yaml").touch()
    everything = ["runs", "runs/first", "runs/grid", "runs/grid/second"]
    assert completed(f"fedflat {command} ", monkeypatch, capsys) == everything
    assert completed(f"fedflat {command} runs/f", monkeypatch, capsys) == ["runs/first"]
    assert completed(f"fedflat {command} res", monkeypatch, capsys) == []  # the shell completes files instead
