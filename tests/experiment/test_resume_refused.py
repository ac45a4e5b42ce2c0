"""A run whose files were lost or changed is not resumed to a different result."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import fedflat
from fedflat.errors import UserError
from fedflat.experiment.store.checkpoint import CHECKPOINT
from fedflat.experiment.store.run_folder import RunFolder

SETTINGS = {
    "rounds": 6,
    "clients": 12,
    "clients_per_round": 4,
    "local_steps": 2,
    "workers": 1,
    "model": "mlp(hidden=8)",
    "engine__checkpoint_every": 2,
}
Harm = Callable[[Path], object]


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("half") / "run"
    rounds = fedflat.rounds("scaffold+wima(window=3)", out=folder, **SETTINGS)
    for _ in range(4):
        next(rounds)
    rounds.close()
    assert RunFolder(folder).status()["status"] == "paused"
    return folder


@pytest.fixture(scope="module")
def whole(half: Path) -> dict[str, bytes]:
    shutil.copytree(half, half.with_name("whole"))
    fedflat.resume(half.with_name("whole"))
    return contents(half.with_name("whole"))


@pytest.fixture
def run(half: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(half, tmp_path / "run"))


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in ("model.safetensors", "metrics.jsonl", CHECKPOINT)}


def changed(old: str, new: str) -> Harm:
    """Replace a piece of the config, which must be present."""

    def change(run: Path) -> None:
        text = (run / "config.yaml").read_text()
        assert old in text
        (run / "config.yaml").write_text(text.replace(old, new))

    return change


@pytest.mark.parametrize(
    ("harm", "told"),
    [
        (
            lambda run: shutil.rmtree(run / "state" / "clients"),
            r"state/clients has lost rows: it has 0, .* needs \d+; .*delete .*checkpoint",
        ),
        (lambda run: (run / "state" / "clients" / "rows.bin").unlink(), "state/clients/rows.bin is damaged"),
        (
            lambda run: shutil.rmtree(run / "state" / "wima-3-all"),
            "state/wima-3-all has lost rows: it has 0, .* needs 3",
        ),
        (
            lambda run: (run / "metrics.jsonl").unlink(),
            r"metrics.jsonl has lost lines: it has 0 bytes, .* needs \d+; .*fedflat run",
        ),
        (
            changed("\nseed: 0\n", "\nseed: 1\n"),
            r"config.yaml was changed .*\(seed=1 instead of 0\)",
        ),
        (changed("clients: 12", "clients: 13"), "data.clients=13 instead of 12"),
        (changed("scaffold+wima(window=3)", "fedavg"), r"algorithm=fedavg instead of scaffold\+wima\(window=3\)"),
        (changed("mlp(hidden=8)", "mlp(hidden=7)"), r"model=mlp\(hidden=7\) instead of mlp\(hidden=8\)"),
        (changed("precision: float32", "precision: float64"), "engine.precision=float64 instead of float32"),
    ],
)
def test_a_run_with_lost_or_changed_files_is_refused(run: Path, harm: Harm, told: str) -> None:
    harm(run)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    for _ in range(2):  # a refused resume must not change the files
        with pytest.raises(UserError, match=told):
            fedflat.resume(run)
    assert before.items() <= {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}.items()


def test_execution_and_stop_settings_may_change(run: Path, whole: dict[str, bytes], tmp_path: Path) -> None:
    changed("target: null", "target: 2.0")(run)
    fedflat.resume(run, engine="loop", data_dir=tmp_path)
    assert contents(run) == whole


def test_a_run_without_its_checkpoint_starts_from_the_beginning(run: Path, whole: dict[str, bytes]) -> None:
    shutil.rmtree(run / "checkpoint")
    fedflat.resume(run)
    assert contents(run) == whole


def test_a_checkpoint_of_an_earlier_version_is_refused(run: Path) -> None:
    """Earlier checkpoints have no format, and their row files no checksums."""
    _, about = RunFolder(run).read_tensors(CHECKPOINT)
    del about["format"]
    save_file(load_file(run / CHECKPOINT), run / CHECKPOINT, {"fedflat": json.dumps(about)})
    with pytest.raises(UserError, match=r"state.safetensors was written by an earlier version .* delete .*checkpoint"):
        fedflat.resume(run)
