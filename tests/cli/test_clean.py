"""fedflat clean: removed and kept files; without --yes nothing is removed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from filelock import FileLock

from fedflat.experiment.store.cleanup import remove
from fedflat.experiment.store.files import LOCK_FILE

KEPT = {"config.yaml", "status.json", "partition.json", "metrics.jsonl", "timing.jsonl", "curve.png"}


@pytest.fixture
def runs(finished: Path, tmp_path: Path) -> Path:
    """A finished run with saved models, and an unfinished one."""
    others = shutil.ignore_patterns("flatness", "exported")  # what other tests added to the run
    shutil.copytree(finished, tmp_path / "runs" / "over", ignore=others)
    (tmp_path / "runs" / "over" / "models").mkdir()
    shutil.copy(finished / "model.safetensors", tmp_path / "runs" / "over" / "models" / "round-000001.safetensors")
    shutil.copytree(finished, tmp_path / "runs" / "going", ignore=others)
    (tmp_path / "runs" / "going" / "status.json").write_text('{"status": "running"}\n')
    return tmp_path / "runs"


def files(run: Path) -> dict[str, bytes]:
    return {str(path.relative_to(run)): path.read_bytes() for path in run.rglob("[!.]*") if path.is_file()}


def test_without_yes_files_are_only_listed(fedflat, runs):
    before = files(runs)
    result = fedflat("clean", runs)
    assert result.exit_code == 0 and files(runs) == before
    assert (
        "over" in result.stdout
        and "going" not in result.stdout
        and "of 1 of 2 runs can be removed; add --yes" in result.stdout
    )
    document = json.loads(fedflat("clean", runs, "--json").stdout)
    (removable,) = document["removable"]
    states = sum(len(data) for name, data in files(runs / "over").items() if name.startswith(("checkpoint/", "state/")))
    assert removable["bytes"] == {
        "checkpoint": states,
        "snapshots": len(before["over/models/round-000001.safetensors"]),
    }
    assert document["removed"] == 0


def test_yes_removes_only_listed_files(fedflat, runs):
    before = files(runs)
    result = fedflat("clean", runs, "--yes")
    assert result.exit_code == 0 and "removed" in result.stdout
    after = files(runs)
    gone = before.keys() - after.keys()
    assert gone and all(name.startswith(("over/checkpoint/", "over/state/", "over/models/")) for name in gone)
    assert all(after[name] == before[name] for name in after)
    assert {name for name in files(runs / "over") if not name.startswith("model.")} == KEPT
    again = fedflat("clean", runs, "--yes")
    assert again.exit_code == 0 and "Nothing" in again.stdout and "2 runs" in again.stdout and files(runs) == after
    assert fedflat("show", runs / "over").exit_code == 0
    assert "already finished" in fedflat("resume", runs / "over").stdout


def test_keep_snapshots_keeps_saved_models(fedflat, runs):
    assert fedflat("clean", runs, "--yes", "--keep-snapshots").exit_code == 0
    assert (runs / "over/models/round-000001.safetensors").exists() and not list(
        (runs / "over/checkpoint").glob("[!.]*")
    )


def test_a_locked_run_is_skipped(fedflat, runs):
    before = files(runs)
    with FileLock(runs / "over" / "checkpoint" / LOCK_FILE):
        result = fedflat("clean", runs, "--yes")
    assert result.exit_code == 2 and "another process" in result.stderr and files(runs) == before
    fedflat("clean", runs, "--yes")
    with FileLock(runs / "over" / "checkpoint" / LOCK_FILE):
        assert fedflat("clean", runs, "--yes").exit_code == 0, "it has nothing left to remove"


def test_the_only_copy_of_a_final_model_is_kept(fedflat, runs):
    lost = runs / "over" / "model.safetensors"
    content = lost.read_bytes()
    lost.unlink()
    before = files(runs)
    snapshot = "over/models/round-000001.safetensors"
    for arguments in ((), ("--yes",)):
        result = fedflat("clean", runs, *arguments)
        assert result.exit_code == 0
        assert "over is kept, because a final model is missing" in result.stderr and "fedflat resume" in result.stderr
    assert before.keys() - files(runs).keys() == {snapshot}
    assert "fedflat resume" in fedflat("evaluate", runs / "over").stderr
    assert "written again" in fedflat("resume", runs / "over").stderr and lost.read_bytes() == content
    assert "removed" in fedflat("clean", runs, "--yes").stdout and not list(runs.glob("over/checkpoint/*.safetensors"))


def test_models_removed_on_request_do_not_count_as_lost(fedflat, runs, monkeypatch):
    """Nor if the removal is interrupted."""

    def interrupt(path):
        path.unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as interrupted, pytest.raises(KeyboardInterrupt):
        interrupted.setattr("fedflat.experiment.store.cleanup._delete", interrupt)
        remove(runs / "over", ["models"])
    result = fedflat("clean", runs, "--yes")
    assert not result.stderr and "removed" in result.stdout
    assert {name for name in files(runs / "over") if not name.startswith("model.")} == KEPT


@pytest.mark.parametrize(
    ("folder", "words"),
    [
        ("nowhere", "there is no folder nowhere"),
        (__file__, "test_clean.py is a file; expected a folder of runs"),
        (".", "there are no runs in ."),
    ],
)
def test_user_errors_are_one_line(fedflat, tmp_path, folder, words):
    result = fedflat("clean", folder)
    assert result.exit_code == 2 and words in result.stderr and len(result.stderr.splitlines()) == 1
