"""A run whose files were lost or changed is not resumed to a different result."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import save_file

import fedflat
from fedflat.errors import UserError
from fedflat.experiment.analysis.post_hoc import post_hoc
from fedflat.experiment.analysis.run_model import open_model, replay_after
from fedflat.experiment.callback import Callback, RunView
from fedflat.experiment.campaign.branch import branch_point, branchable_rounds
from fedflat.experiment.store.checkpoint import CHECKPOINT, PREVIOUS
from fedflat.experiment.store.run_folder import RunFolder, load_record, saved_rounds
from fedflat.experiment.store.tensor_files import checksum

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


def with_newer_format(run: Path) -> None:
    """Write the checkpoint as a later version of fedflat."""
    tensors, header = RunFolder(run).read_tensors(CHECKPOINT)
    header["format"] = 3
    save_file(tensors, run / CHECKPOINT, {"fedflat": json.dumps({**header, "sha256": checksum(tensors, header)})})


def with_other_losses(run: Path) -> None:
    """Change the losses in metrics.jsonl but not its length, as if it were the file of another run."""
    text = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(
        re.sub(r'("train_loss": \d\.)(\d)', lambda match: f"{match[1]}{9 - int(match[2])}", text)
    )


@pytest.mark.parametrize(
    ("harm", "told"),
    [
        (with_other_losses, r"metrics.jsonl is of another run: its line of round 4 does not match the checkpoint"),
        (
            lambda run: shutil.copy(run / "model.safetensors", run / CHECKPOINT),
            r"state.safetensors is not a checkpoint; restore it",
        ),
        (with_newer_format, r"state.safetensors has format 3, .* reads format 2; upgrade fedflat"),
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


def test_execution_stop_and_save_settings_may_change(run: Path, whole: dict[str, bytes], tmp_path: Path) -> None:
    changed("target: null", "target: 2.0")(run)
    tensors, header = RunFolder(run).read_tensors(CHECKPOINT)
    header["settings"]["evaluation"]["save_every"] = 3  # it may change
    RunFolder(run).write_tensors(CHECKPOINT, tensors, header)
    fedflat.resume(run, engine="loop", data_dir=tmp_path, save_every=1)
    assert contents(run) == whole and saved_rounds(run) == [5, 6]


def test_a_run_without_its_checkpoint_starts_from_the_beginning(run: Path, whole: dict[str, bytes]) -> None:
    shutil.rmtree(run / "checkpoint")
    fedflat.resume(run)
    assert contents(run) == whole


@pytest.mark.parametrize("algorithm", ["scaffold+wima(window=3)", "fedavg"])
@pytest.mark.parametrize("more", [{}, {"stop__target": 0.0, "evaluation__every": 3}])  # finished, or stopped at round 3
def test_resume_writes_lost_final_models_again(algorithm: str, more: dict[str, object], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    status = fedflat.run(algorithm, out=folder, **SETTINGS, **more).status
    guaranteed = ("*.json", "metrics.jsonl", "config.yaml", "model*.safetensors", CHECKPOINT)
    files = {path: path.read_bytes() for pattern in guaranteed for path in folder.glob(pattern)}
    models = sorted(folder.glob("model*.safetensors"))
    models[0].write_bytes(models[0].read_bytes()[:-1])
    models[-1].unlink(missing_ok=True)
    with pytest.raises(UserError, match=r"model.*(damaged|missing)"):
        fedflat.load(folder).evaluate()
    assert fedflat.resume(folder).status == status == ("stopped" if more else "finished")
    assert {path: path.read_bytes() for path in files} == files


def test_a_run_killed_while_its_models_are_restored_can_be_resumed(tmp_path: Path) -> None:
    class Killed(Callback):
        def round_done(self, run: RunView) -> None:
            raise KeyboardInterrupt

    settings = {**SETTINGS, "stop__target": 0.0, "evaluation__every": 3}
    fedflat.run("fedavg", out=tmp_path / "run", **settings)
    before = (tmp_path / "run" / "model.safetensors").read_bytes()
    (tmp_path / "run" / "model.safetensors").unlink()
    with pytest.raises(KeyboardInterrupt):
        fedflat.resume(tmp_path / "run", callbacks=[Killed()])
    assert load_record(tmp_path / "run").status == "running"
    assert fedflat.resume(tmp_path / "run").status == "stopped"
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == before


def test_saved_models_of_a_run_do_not_need_its_checkpoint(saving: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(saving, tmp_path / "run"))
    with_newer_format(run)
    with pytest.warns(UserWarning, match="upgrade fedflat"):
        assert branchable_rounds(run) == [0, 1, 2]
    moments, reason = post_hoc(load_record(run)).moments()
    assert [moment.rounds for moment in moments] == [0, 1, 2] and "upgrade fedflat" in reason
    assert replay_after(open_model(load_record(run)), 1).moment.rounds == 1
    with pytest.raises(UserError, match="upgrade fedflat"):
        replay_after(open_model(load_record(run)))
    shutil.rmtree(run / "models")
    (run / "model.safetensors").unlink()
    with pytest.raises(UserError, match="upgrade fedflat"):
        branch_point(str(run))


@pytest.fixture(scope="module")
def saving(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without client state that saves its model after every round."""
    folder = tmp_path_factory.mktemp("saving") / "run"
    fedflat.run("fedavg", out=folder, progress=False, **{**SETTINGS, "rounds": 2, "save_every": 1})
    return folder


def test_a_checkpoint_of_other_settings_is_not_replayed(run: Path, saving: Path) -> None:
    shutil.copy(saving / CHECKPOINT, run / CHECKPOINT)
    with pytest.raises(UserError, match=r"of another run \(algorithm=scaffold\+wima\(window=3\) instead of fedavg"):
        replay_after(open_model(load_record(run)))
    with pytest.warns(UserWarning, match="the checkpoint is of another run"):
        assert branchable_rounds(run) == [4]  # the final model


def test_server_state_may_change_its_shape(tmp_path: Path) -> None:
    """FedAWA's server keeps the number 0 before the first round, and then one number per client."""
    rounds = fedflat.rounds("fedawa", out=tmp_path / "half", **SETTINGS)
    next(rounds)
    rounds.close()
    fedflat.resume(tmp_path / "half")
    fedflat.run("fedawa", out=tmp_path / "whole", progress=False, **SETTINGS)
    assert contents(tmp_path / "half") == contents(tmp_path / "whole")


def test_a_checkpoint_of_other_data_is_refused(tmp_path: Path) -> None:
    """The partition of both datasets is the same, because it depends on the labels only."""
    for features in (3, 4):
        inputs = np.random.default_rng(0).random((40, features), dtype=np.float32)
        np.savez(tmp_path / "data.npz", inputs=inputs, targets=np.arange(40) % 2)
        if features == 3:
            dataset = str(tmp_path / "data.npz")
            rounds = fedflat.rounds("fedavg", out=tmp_path / "run", dataset=dataset, **{**SETTINGS, "partition": "iid"})
            next(rounds)
            rounds.close()
    with pytest.raises(UserError, match=r"data.npz\) have changed since the run in .*restore them"):
        fedflat.resume(tmp_path / "run")


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


def test_metrics_that_were_deleted_during_the_run_are_missed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    rounds = fedflat.rounds("fedavg", out=folder, **SETTINGS)
    for number in range(1, 6):
        if number == 4:
            (folder / "metrics.jsonl").unlink()
        next(rounds)
    rounds.close()
    for read in (load_record, fedflat.resume):
        with pytest.raises(UserError, match=r"metrics.jsonl has lost lines: it begins at round 4, but .* round 0"):
            read(folder)
