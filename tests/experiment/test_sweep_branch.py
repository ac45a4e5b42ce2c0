"""Branches: several algorithms start from one model of a run; what they inherit and what starts fresh."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedflat
from fedflat.errors import UserError
from fedflat.experiment.analysis.reopen import saved_tensors
from fedflat.experiment.callback import Callback
from fedflat.experiment.campaign.branch import branch_point, branchable_rounds
from fedflat.experiment.campaign.sweep import Sweep, plan_sweep, run_sweep
from fedflat.experiment.campaign.sweep_file import read_sweep
from fedflat.experiment.config import Config
from fedflat.experiment.store.files import LOCK_FILE
from fedflat.experiment.store.run_folder import RunFolder, load_record
from tests.cli.conftest import call

SMALL = {
    "local_steps": 2,
    "clients_per_round": 3,
    "clients": 8,
    "model": "mlp(hidden=8)",
    "workers": 1,
    "device": "cpu",
    "lr_decay": 0.5,
}


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("origin") / "run"
    fedflat.run("fedavg", rounds=6, save_every=2, out=folder, **SMALL)
    return folder


def branch(text: object, out: Path, *algorithms: str, **base: object) -> Sweep:
    made = plan_sweep(read_sweep({"branch": str(text), "grid": {"algorithm": list(algorithms)}, "base": base}), out)
    assert all(done.error is None for done in run_sweep(made))
    return made


def test_a_branch_with_the_same_algorithm_continues_the_run(origin: Path, tmp_path: Path) -> None:
    (run,) = branch(f"{origin}@2", tmp_path, "fedavg").runs
    whole, later = RunFolder(origin).metrics(), RunFolder(run.folder).metrics()
    assert [line["round"] for line in later] == [2, 3, 4, 5, 6]
    assert [line["test"] for line in later] == [line["test"] for line in whole[2:]], (
        "cohorts, batches and decayed rates are those of the run"
    )
    assert [line["train_loss"] for line in later[1:]] == [line["train_loss"] for line in whole[3:]]
    for name, tensor in saved_tensors(load_record(origin), "server").items():
        assert torch.equal(tensor, saved_tensors(load_record(run.folder), "server")[name])


def test_other_algorithms_start_from_the_same_model_with_fresh_state(origin: Path, tmp_path: Path) -> None:
    runs = branch(f"{origin}@4", tmp_path, "fedavg", "scaffold", "fedsam", rounds=7).runs
    histories = [RunFolder(run.folder).metrics() for run in runs]
    assert all([line["round"] for line in history] == [4, 5, 6, 7] for history in histories)
    assert len({str(history[0]["test"]) for history in histories}) == 1
    assert histories[0][1]["test"] == histories[1][1]["test"], (
        "control variates start at zero, so scaffold's first round is fedavg's"
    )
    assert histories[0][-1]["test"] != histories[1][-1]["test"] != histories[2][-1]["test"]


def test_the_last_model_is_the_default(origin: Path) -> None:
    assert branchable_rounds(origin) == [0, 2, 4, 6]
    assert branch_point(str(origin)).rounds == 6 and branch_point(f"{origin}@0").rounds == 0


class Crash(Callback):
    def round_done(self, run) -> None:
        if run.rounds == 4:
            raise KeyboardInterrupt


def test_branching_from_the_checkpoint_of_an_unfinished_run(origin: Path, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        settings = {**SMALL, "engine__checkpoint_every": 3, "model": "mlp(hidden=8)"}
        fedflat.run("fedavg", rounds=6, out=tmp_path / "run", callbacks=[Crash()], **settings)
    assert branchable_rounds(tmp_path / "run") == [3]
    (run,) = branch(f"{tmp_path / 'run'}@3", tmp_path / "out", "fedavg").runs
    branch(f"{tmp_path / 'run'}@3", tmp_path / "out", "fedavg")
    assert [line["test"] for line in RunFolder(run.folder).metrics()] == [
        line["test"] for line in RunFolder(origin).metrics()[3:]
    ]


def test_a_branch_is_resumed_without_its_origin(origin: Path, tmp_path: Path) -> None:
    made = plan_sweep(
        read_sweep({"branch": f"{origin}@2", "grid": {"algorithm": ["fedavg+swa(start=0.1)+wima(window=2)"]}}), tmp_path
    )
    config = made.runs[0].config
    assert config.init == tmp_path / "start.safetensors" and config.init_rounds == 2
    with pytest.raises(KeyboardInterrupt):
        list(run_sweep(made, (Crash(),)))
    (done,) = run_sweep(made)
    straight = branch(f"{origin}@2", tmp_path / "straight", "fedavg+swa(start=0.1)+wima(window=2)").runs[0].folder
    assert done.record is not None and done.record.history == RunFolder(straight).metrics()
    first = load_record(straight).history[1]["test"]
    assert set(first) == {"server", "swa(start=0.1)", "wima(window=2)"}, (
        "averages that would have begun before begin here"
    )


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("other") / "run"
    fedflat.run("scaffold", rounds=2, save_every=2, lr=0.01, out=folder, **SMALL)
    return folder


def test_a_folder_with_branches_of_another_model_is_refused(origin: Path, other: Path, tmp_path: Path) -> None:
    branch(f"{origin}@2", tmp_path, "fedavg", rounds=3)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for text, rounds in ((f"{other}@2", 2), (f"{origin}@4", 4)):
        run = text.partition("@")[0]
        with pytest.raises(UserError, match=f"{origin} at round 2.*{run} at round {rounds}.*--out"):
            branch(text, tmp_path, "fedsam", rounds=5)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_plan_made_before_another_sweep_began_is_refused(origin: Path, other: Path, tmp_path: Path) -> None:
    late = plan_sweep(
        read_sweep({"branch": f"{other}@2", "grid": {"algorithm": ["fedsam"]}, "base": {"rounds": 3}}), tmp_path
    )
    branch_point(f"{origin}@2").write(tmp_path)
    with pytest.raises(UserError, match="--out"):
        list(run_sweep(late))
    assert {path.name for path in tmp_path.iterdir()} == {LOCK_FILE, "start.safetensors"}


def test_branches_continue_after_the_origin_was_moved(origin: Path, other: Path, tmp_path: Path) -> None:
    branch_point(f"{origin}@2").write(tmp_path / "out")
    shutil.copytree(origin, tmp_path / "moved")
    branch_point(f"{tmp_path / 'moved'}@2").write(tmp_path / "out")
    tensors, _ = RunFolder(tmp_path / "out").read_tensors("start.safetensors")
    RunFolder(tmp_path / "out").write_tensors(
        "start.safetensors", tensors, {"rounds": 2}
    )  # as in the model.safetensors of a run
    branch_point(f"{origin}@2").check(tmp_path / "out")
    with pytest.raises(UserError, match="another model at round 2"):
        branch_point(f"{other}@2").check(tmp_path / "out")


def test_a_diverged_model_has_no_branches(other: Path, tmp_path: Path) -> None:
    folder = RunFolder(Path(shutil.copytree(other, tmp_path / "run")))
    tensors, about = folder.read_tensors("models/round-000002.safetensors")
    folder.write_tensors(
        "models/round-000002.safetensors", {name: tensor * torch.nan for name, tensor in tensors.items()}, about
    )
    with pytest.raises(UserError, match="run after round 2 contains infinite or NaN values"):
        branch_point(f"{folder.path}@2").write(tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("at", "words"),
    [
        ("@3", "after round 3;.*0, 2, 4, 6"),
        (":server@2", "from the server model; write .*run@2"),
        (":wimaa@2", "'wimaa'"),
        ("@x", "'x'"),
        ("@²", "'²'"),
        ("@", "''"),
    ],
)
def test_missing_rounds_are_rejected(origin: Path, at: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        branch_point(f"{origin}{at}")


def test_impossible_branches(origin: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"init_rounds=6.*training\.rounds=6"):
        branch(origin, tmp_path, "fedavg")
    with pytest.raises(UserError, match="init and branch"):
        branch(f"{origin}@2", tmp_path, "fedavg", init="other.safetensors")
    with pytest.raises(UserError, match="init_rounds=3"):
        Config(init_rounds=3)


def test_an_average_is_not_branched_but_can_be_the_initial_weights(tmp_path: Path) -> None:
    settings: dict[str, Any] = {**SMALL, "out": tmp_path / "run"}
    fedflat.run("fedavg+wima(window=2)", rounds=2, save_every=1, **settings)
    for at, file in (("@1", "models/round-000001.wima-window-2"), ("", "model.wima-window-2")):
        with pytest.raises(UserError, match=f"start from the server model, .* --init .*{file}.safetensors --set init_"):
            branch_point(f"{tmp_path / 'run'}:wima{at}")
        assert (tmp_path / "run" / f"{file}.safetensors").exists()
    with pytest.raises(UserError, match="saved rounds: 1, 2"):
        branch_point(f"{tmp_path / 'run'}:wima@9")


def test_a_run_of_python_objects_is_branched_in_python(tmp_path: Path) -> None:
    settings = {"rounds": 1, "local_steps": 1, "workers": 1, "partition": "iid", "clients": 2, "clients_per_round": 2}
    fedflat.run("fedavg", model=nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), out=tmp_path / "run", **settings)
    with pytest.raises(
        UserError, match=r"used Python objects.* fedflat\.compare\(ALGORITHMS, base=.*init_rounds=1, rounds="
    ):
        branch_point(str(tmp_path / "run"))
    message = " ".join(call("resume", tmp_path / "run").stdout.split())
    assert "already finished; nothing to resume. For more rounds: fedflat.compare(ALGORITHMS, base=" in message
