"""Run folders: relative paths, locks and unreadable files."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from threading import Timer

import numpy as np
import pytest
from filelock import FileLock

import fedflat
from fedflat.errors import UserError
from fedflat.experiment.config import Config, parse_config
from fedflat.experiment.store import run_folder
from fedflat.experiment.store.files import (
    LOCK_FILE,
    Lock,
    LockedError,
    explain_os_error,
    is_free,
    locked,
    write_atomically,
)
from fedflat.experiment.store.run_folder import RunFolder

SMALL = {"rounds": 2, "clients": 12, "clients_per_round": 4, "local_steps": 2, "workers": 1, "model": "mlp(hidden=4)"}


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder other than the initial working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    return tmp_path / "elsewhere"


def test_a_run_stays_in_its_folder_if_the_working_directory_changes(elsewhere: Path) -> None:
    loop = fedflat.rounds("scaffold", out="run", save_every=1, **SMALL)
    next(loop)
    os.chdir(elsewhere)
    assert next(loop).number == 2
    result = loop.result()
    result.export("model.pt")
    assert result.status == "finished" and (elsewhere / "model.pt").exists()
    assert (elsewhere.parent / "run" / "models").is_dir() and not (elsewhere / "run").exists()


def test_a_relative_path_is_shown_as_given_while_it_is_valid(elsewhere: Path) -> None:
    folder = RunFolder(Path("run"))
    assert folder.path == Path("run")
    os.chdir(elsewhere)
    assert folder.path == elsewhere.parent / "run"
    os.chdir(elsewhere.parent)
    assert folder.path == Path("run")


def test_a_folder_of_runs_is_no_run(tmp_path: Path) -> None:
    for seed in range(2):
        (tmp_path / f"runs/seed-{seed}").mkdir(parents=True)
        (tmp_path / f"runs/seed-{seed}/config.yaml").touch()
        expected = ("did you mean .*seed-0[?]", "choose one of its 2 runs, e.g. .*seed-0, or show all")[seed]
        with pytest.raises(UserError, match=expected):
            RunFolder(tmp_path / "runs").config()


def test_a_folder_without_permission_should_be_made_writable() -> None:
    with pytest.raises(UserError, match="make it writable"), explain_os_error(Path("run")):
        raise PermissionError(errno.EACCES, "Permission denied")


def test_only_regular_files_are_written_and_symlinks_are_followed(tmp_path: Path) -> None:
    target, link, fifo = (tmp_path / name for name in ("target", "link", "fifo"))
    link.symlink_to("target")
    for content in ("first", "second"):  # the target is missing, then exists
        write_atomically(link, content)
        assert link.is_symlink() and target.read_text() == content
    os.mkfifo(fifo)
    for path, kind in ((fifo, "not a regular file"), (tmp_path, "a folder")):
        with pytest.raises(UserError, match=f"{path.name} is {kind}; choose another name"):
            write_atomically(path, "text")
    assert {path.name for path in tmp_path.iterdir()} == {"target", "link", "fifo"} and fifo.is_fifo()


def test_a_run_of_a_relative_file_can_be_resumed_from_elsewhere(elsewhere: Path) -> None:
    labels = np.arange(60) % 3
    np.savez("mine.npz", inputs=np.eye(3)[labels], targets=labels)
    loop = fedflat.rounds("fedavg", dataset="arrays(path=mine.npz)", partition="iid", out="run", **SMALL)
    next(loop)
    loop.close()
    os.chdir(elsewhere)
    resumed = fedflat.resume("../run")
    assert resumed.status == "finished" and resumed.evaluate(on="test")


def test_dataset_paths_are_stored_as_absolute_paths(elsewhere: Path) -> None:
    here = elsewhere.parent
    found = parse_config(
        {"data": {"dataset": "images( size=8, path = pets )", "partition": "listed(path=a.json,hash=x)", "dir": "sets"}}
    ).data
    assert (found.dataset, found.partition) == (
        f"images(size=8,path={here}/pets)",
        f"listed(path={here}/a.json,hash=x)",
    )
    assert found.dir == here / "sets"
    for unchanged in ("hub(path=ylecun/mnist)", "digits", "custom:arrays(path=mine)", "arrays(path=/mine.npz)"):
        assert parse_config({"data": {"dataset": unchanged}}).data.dataset == unchanged


def test_a_folder_is_locked_while_a_run_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second run starts while the first one writes its folder."""
    first, second = RunFolder(tmp_path / "run"), RunFolder(tmp_path / "run")
    refusals: list[UserError] = []

    def write_status(status: str, **more: object) -> None:
        with pytest.raises(LockedError, match=f"working on {tmp_path / 'run'}") as refused:
            second.create(Config(), {}, "accuracy")
        refusals.append(refused.value)

    monkeypatch.setattr(first, "write_status", write_status)
    first.create(Config(), {}, "accuracy")
    first.release_lock()
    assert len(refusals) == 1 and first.exists
    with pytest.raises(UserError, match="already has a run"):
        second.create(Config(), {}, "accuracy")


@pytest.mark.parametrize("why", ["is a directory", "permission denied"])
def test_an_unreadable_model_is_not_reported_as_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    folder = RunFolder(tmp_path)
    with pytest.raises(UserError, match=r"model.safetensors is missing"):
        folder.read_tensors("model.safetensors")
    (tmp_path / "model.safetensors").mkdir()
    if why == "permission denied":

        def refuse(path: Path, mode: str) -> None:
            raise PermissionError(13, "Permission denied", str(path))

        monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(UserError, match=f"cannot read .*model.safetensors: {why}"):
        folder.read_tensors("model.safetensors")


def test_a_run_in_progress_names_its_primary_metric(tmp_path: Path) -> None:
    loop = fedflat.rounds("fedavg", out=tmp_path / "run", **SMALL)
    next(loop)
    expected = {"status": "running", "metric": "accuracy", "lower_is_better": False, "averages": []}
    assert RunFolder(tmp_path / "run").status() == expected
    assert fedflat.load(tmp_path / "run").metric == "accuracy"
    loop.close()


@pytest.mark.parametrize("reached", ["another process", "this process"])
def test_a_locked_run_names_its_owner(reached: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    lock = FileLock(folder / LOCK_FILE) if reached == "another process" else Lock(folder)
    folder.mkdir()
    lock.acquire()
    assert not is_free(folder)
    with pytest.raises(LockedError, match=f"{reached} .*{folder}"), locked(folder):
        pass
    lock.release()
    with locked(folder, wait=True):
        assert not is_free(folder)
    assert is_free(folder)


def test_resuming_waits_while_another_process_looks_at_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_folder.LOCK_TIMEOUT > 0
    monkeypatch.setattr(run_folder, "LOCK_TIMEOUT", 60)  # in case the machine is busy
    folder, lock = RunFolder(tmp_path), FileLock(tmp_path / "checkpoint" / LOCK_FILE, thread_local=False)
    (tmp_path / "checkpoint").mkdir()
    lock.acquire()
    Timer(0.1, lock.release).start()
    folder.acquire_lock()
    folder.release_lock()
