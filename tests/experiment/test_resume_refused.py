"""A run whose files were lost or changed is not resumed to a different result."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import fedflat
from fedflat.errors import UserError
from fedflat.experiment.analysis.post_hoc import post_hoc
from fedflat.experiment.analysis.run_model import open_model, replay_after
from fedflat.experiment.campaign.branch import branchable_rounds
from fedflat.experiment.store.checkpoint import CHECKPOINT, PREVIOUS
from fedflat.experiment.store.run_folder import RunFolder, load_record

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


def flip(path: Path, position: int) -> None:
    """Change one bit of a file."""
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("file", [CHECKPOINT, "state/clients/rows.bin", "state/clients/index.bin"])
def test_a_flipped_bit_in_the_state_is_detected(run: Path, whole: dict[str, bytes], file: str) -> None:
    for position in (16, 32) if file.endswith("index.bin") else (-1,):  # the checksums of both copies of the first row
        flip(run / file, position)
    with pytest.raises(UserError, match=r"state.*\.(safetensors|bin) is damaged.*; .*delete .*checkpoint"):
        fedflat.resume(run)
    shutil.rmtree(run / "checkpoint")
    fedflat.resume(run)
    assert contents(run) == whole


def test_a_run_without_client_state_continues_from_the_previous_checkpoint(tmp_path: Path) -> None:
    rounds = fedflat.rounds("fedavg", out=tmp_path / "run", **SETTINGS)
    for _ in range(4):
        next(rounds)
    for name in ("damaged", "renamed"):
        shutil.copytree(tmp_path / "run", tmp_path / name)
    flip(tmp_path / "damaged" / CHECKPOINT, -1)
    (tmp_path / "renamed" / CHECKPOINT).replace(tmp_path / "renamed" / PREVIOUS)  # before the next one was written
    assert [round.number for round in rounds] == [5, 6]
    with pytest.warns(UserWarning, match="state.safetensors is damaged; the checkpoint before it is used"):
        assert branchable_rounds(tmp_path / "damaged") == [2]
        fedflat.resume(tmp_path / "damaged")
    assert branchable_rounds(tmp_path / "renamed") == [4]
    assert [moment.rounds for moment in post_hoc(load_record(tmp_path / "renamed")).moments()[0]] == [0, 4]
    fedflat.resume(tmp_path / "renamed")
    assert contents(tmp_path / "renamed") == contents(tmp_path / "damaged") == contents(tmp_path / "run")
    (tmp_path / "renamed" / CHECKPOINT).replace(tmp_path / "renamed" / PREVIOUS)
    assert replay_after(open_model(load_record(tmp_path / "renamed")), 6).moment.rounds == 6


def test_every_flipped_byte_of_a_model_is_detected(run: Path) -> None:
    folder, file = RunFolder(run), run / "model.safetensors"
    tensors, about = folder.read_tensors(file.name)
    intact, values = file.read_bytes(), {name: tensor.tolist() for name, tensor in tensors.items()}
    draw = random.Random(0)
    positions = {*range(8, 700, 5), *(draw.randrange(len(intact)) for _ in range(50))}
    for position in positions:
        flip(file, position)
        try:
            changed_tensors, changed_about = folder.read_tensors(file.name)
        except UserError as error:
            assert str(file) in str(error)
        else:  # only white space in the header may change
            assert ({name: tensor.tolist() for name, tensor in changed_tensors.items()}, changed_about) == (
                values,
                about,
            )
        file.write_bytes(intact)


@pytest.mark.parametrize(
    "content", [b'{"round": 0, "sec', b'{"round": 0, "sec{"round": 1, "seconds": 2}\n', b"\0\xff\n"]
)
def test_a_damaged_timing_does_not_matter(run: Path, whole: dict[str, bytes], content: bytes) -> None:
    with (run / "timing.jsonl").open("ab") as file:
        file.write(content)
    assert fedflat.load(run).record.seconds > 0
    fedflat.resume(run)
    assert contents(run) == whole
    lines = [json.loads(line) for line in (run / "timing.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == list(range(7))


def test_a_damaged_status_is_repaired(run: Path, whole: dict[str, bytes]) -> None:
    (run / "status.json").write_text("")
    fedflat.resume(run)
    assert contents(run) == whole and RunFolder(run).status()["status"] == "finished"
