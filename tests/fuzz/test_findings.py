"""Invalid input that an earlier version accepted, or answered with a traceback, a hang or the wrong cause."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

import fedflat
from fedflat.algorithms import algorithm
from fedflat.cli.application import app
from fedflat.data import DATASETS, Dataset, from_arrays, from_torch, load
from fedflat.data.sources.array_files import dataset_of_arrays
from fedflat.errors import UserError
from fedflat.experiment.config import parse_config
from fedflat.experiment.setup.problem import build_problem
from fedflat.experiment.setup.weights import read_weights
from fedflat.experiment.store.export import format_of
from fedflat.experiment.store.run_folder import RunFolder, load_record
from fedflat.flatness.landscapes.grid import check_grid_size
from fedflat.papers.results import read_results
from fedflat.reporting.page.gather import gather
from fedflat.reporting.page.page import write_report
from fedflat.setting_names import SHORT_NAMES, forbidden_character
from fedflat.yaml_text import load_yaml
from tests.fuzz.workspace import STORED_RESULT, build

RNG = np.random.default_rng(0)
X, Y = RNG.random((12, 4)), np.arange(12) % 3
IMAGES = RNG.integers(0, 256, (12, 1, 8, 8), dtype=np.uint8)
TINY: dict[str, Any] = {
    "rounds": 1, "clients": 4, "clients_per_round": 2, "local_steps": 1, "partition": "iid", "workers": 1,
    "device": "cpu",
}  # fmt: skip

FEW = {"data": {"partition": "iid", "clients": 2}, "federation": {"clients_per_round": 2}}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run and a file of every format."""
    folder = tmp_path_factory.mktemp("workspace")
    build(folder)
    return folder


def arrays(inputs: Any = X, targets: Any = Y, **options: Any) -> Dataset:
    """A dataset whose training and test set are the same arrays."""
    return from_arrays(inputs, targets, inputs, targets, **options)


ARRAYS: dict[str, tuple[Callable[[], Any], str]] = {
    "lengths": (lambda: arrays(X, Y[:9]), "12 inputs, 9 targets"),
    "lengths without a test set": (
        lambda: dataset_of_arrays("a", {"inputs": X, "targets": Y[:9]}, Path("a.npz"), Path()),
        "a.npz has 12 inputs, 9 targets",
    ),
    "text inputs without a test set": (
        lambda: dataset_of_arrays("a", {"inputs": Y.astype(str), "targets": Y}, Path("a.npz"), Path()),
        "expected numbers",
    ),
    "groups": (lambda: arrays(train_groups=Y[:9]), "9 groups"),
    "0-d inputs": (lambda: arrays(np.float32(1)), "single value"),
    "0-d targets": (lambda: arrays(X, np.int64(1)), "single value"),
    "text inputs": (lambda: arrays(Y.astype(str)), "expected numbers"),
    "date targets": (lambda: arrays(X, Y.astype("M8[s]")), "neither integers nor words"),
    "struct targets": (lambda: arrays(X, np.zeros(12, [("a", "f4")])), "neither integers nor words"),
    "scalar mean": (lambda: arrays(IMAGES, mean=0.5, std=0.5), "one number per channel"),
    "words as mean": (lambda: arrays(IMAGES, mean=["a"], std=[1]), "one number per channel"),
    "NaN mean": (lambda: arrays(IMAGES, mean=[float("nan")], std=[1]), "finite mean"),
    "scalar classes": (lambda: arrays(classes=3), "list of class names"),
    "sparse labels": (lambda: arrays(X, np.where(Y == 2, 10**6, Y)), "label 1000000"),
    "huge labels": (lambda: arrays(X, np.where(Y == 2, 2 * 10**12, Y)), "label 2000000000000"),
    "NaN inputs": (lambda: arrays(np.where(X > 0.9, np.nan, X)), "NaN, infinite"),
    "inputs beyond float32": (lambda: arrays(np.where(X > 0.9, 1e300, X)), "too large for float32"),
    "targets beyond float32": (lambda: arrays(X, np.where(Y == 2, 1e300, 0.5)), "too large for float32"),
}


@pytest.mark.parametrize(("make", "message"), ARRAYS.values(), ids=ARRAYS)
def test_arrays_are_checked(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make()


def run(**settings: Any) -> Any:
    return fedflat.run("fedavg", progress=False, **{**TINY, "dataset": arrays(), **settings})


def broken_model() -> torch.nn.Module:
    model = torch.nn.Linear(4, 3)
    torch.nn.init.constant_(model.bias, float("nan"))
    return model


RUNS: dict[str, tuple[Callable[[], Any], str]] = {
    "model too large": (lambda: run(model="mlp(hidden=1e12)"), "GB of memory"),
    "model too large to count": (lambda: run(model="mlp(hidden=1e12,layers=3)"), "GB of memory"),
    "parameter beyond 64 bits": (lambda: run(model="mlp(hidden=1e30)"), "out of range"),
    "NaN weights": (lambda: run(model=broken_model()), "initial weights .* NaN"),
    "held-out": (lambda: run(partition="iid+held-out(share=0.99)"), "exceeds the partition's 1 clients"),
    "cutout": (lambda: run(dataset=arrays(IMAGES), augmentation="cutout(size=1000)"), "erases images of 8 pixels"),
    "boolean seed": (lambda: parse_config({"seed": True}), "seed=True is invalid: expected a number"),
    "many rounds": (lambda: parse_config({"training": {"rounds": 10**12}}), "expected at most"),
    "NUL in a path": (lambda: parse_config({"data": {"dataset": "a\0b"}}), "NUL"),
    "text that is not UTF-8": (lambda: parse_config({"engine": {"ray_address": "\udcff"}}), "not UTF-8"),
    "state beyond float32": (lambda: algorithm("fedavg+adam(tau=1e30)"), "at most"),
    "models without end": (lambda: algorithm("fedavg+ghbm(tau=1e12)"), "at most 10000"),
    "steps without end": (lambda: algorithm("fedavg+awa(server_steps=1e12)"), "at most 10000"),
    "initial state beyond float32": (lambda: algorithm("fedavg+adam(v_init=1e40)"), "at most"),
    "large client": (lambda: run(partition="virtual(size=1e12)"), "at most"),
    "evaluation of nothing": (lambda: run().evaluate(on=[]), "selects nothing"),
    "large grid": (lambda: check_grid_size(99999999**2), "days"),
    "format and extension": (lambda: format_of(Path("x.safetensors"), "torch"), "extension of safetensors"),
}


@pytest.mark.parametrize(("make", "message"), RUNS.values(), ids=RUNS)
def test_runs_are_checked(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make()


def test_divergence_names_its_cause(tmp_path: Path) -> None:
    settings = {**TINY, "rounds": 3, "dataset": arrays()}
    for rounds, message in (
        (fedflat.rounds("fedavg", lr=1e30, **settings), "the run diverged: .* learning rate"),
        (
            fedflat.rounds("fedavg", loss=lambda output, _: output.sum() * float("nan"), **settings),
            "loss of CustomLoss",
        ),
    ):
        with pytest.raises(UserError, match=message):
            [round.accuracy for round in rounds]
    for name, values in {"inputs": np.where(X > 0.9, np.nan, X).astype(np.float32), "targets": Y}.items():
        np.save(tmp_path / f"{name}.npy", values)
    train = np.load(tmp_path / "inputs.npy", mmap_mode="r")  # a mapped file is not read in full at the start
    dataset = from_arrays(train, Y, X.astype(np.float32), Y)
    assert "training inputs of arrays contain infinite or NaN" in run(dataset=dataset, rounds=3).record.reason


def test_float64_data_keep_their_precision(tmp_path: Path) -> None:
    numbers = X[:, 0] / 3
    table = tmp_path / "table.csv"
    rows = [",".join(map(repr, row)) for row in np.column_stack([X, numbers]).tolist()]
    table.write_text("\n".join(["a,b,c,d,target", *rows]))
    items = list(zip(X, numbers, strict=True))
    for dataset in (arrays(X, numbers), from_torch(items, items), load(f"arrays(path={table})", tmp_path)):
        for precision, dtype in (("float64", torch.float64), ("float32", torch.float32)):
            settings = parse_config(
                {"model": "mlp(hidden=2)", "engine": {"precision": precision, "device": "cpu"}, **FEW}
            )
            problem, _ = build_problem(settings, dataset)
            for examples in (problem.data.train, *problem.evaluation_sets.values()):
                for values in (problem.normalised(examples.inputs), examples.targets):
                    is_rounded = torch.equal(values, values.float())
                    assert values.dtype == dtype and is_rounded == (precision == "float32")
    mixed = from_arrays(X, Y, X.astype(np.float32), Y)
    assert mixed.train.inputs.dtype == mixed.test.inputs.dtype == torch.float32


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("status.json", {"status": "done"}, "has no status; expected one of running, paused"),
        ("status.json", {"rounds": 9}, "status.json does not fit the other files: finished after 9 rounds"),
        ("status.json", {"rounds": 1}, "status.json does not fit the other files: finished after 1 rounds"),
        ("status.json", {"averages": 5}, "invalid value of averages"),
        ("status.json", {"metric": "rmse"}, "of different runs: the metric is rmse"),
        ("partition.json", {"sizes": {"min": 1}}, "partition.json is incomplete: it has no valid sizes"),
        ("partition.json", {"histogram": [[], 1]}, "partition.json is incomplete: it has no valid histogram"),
        ("partition.json", {"hash": None}, "partition.json is incomplete: it has no valid hash"),
        ("partition.json", {"partitioner": "dirichlet"}, "of another run: its partitioner is dirichlet, .* iid"),
        ("partition.json", {"seed": 7}, "of another run: its seed is 7, .* 0"),
    ],
)
def test_files_of_a_run_fit_each_other(
    workspace: Path, tmp_path: Path, file: str, change: dict[str, Any], message: str
) -> None:
    run_folder = shutil.copytree(workspace / "run", tmp_path / "run")
    content = json.loads((run_folder / file).read_text()) | change
    (run_folder / file).write_text(json.dumps(content))
    with pytest.raises(UserError, match=message):
        gather([run_folder])
    with pytest.raises(UserError, match=message):  # a status that is wrong must not end a run
        RunFolder(run_folder).partition() if file == "partition.json" else load_record(run_folder)


def test_rounds_of_a_finished_run_fit_its_config(workspace: Path, tmp_path: Path) -> None:
    run_folder = shutil.copytree(workspace / "run", tmp_path / "run")
    text = (run_folder / "config.yaml").read_text()
    (run_folder / "config.yaml").write_text(text.replace("rounds: 2", "rounds: 3"))
    with pytest.raises(UserError, match=r"config.yaml was changed: it has 3 rounds, .* finished after 2; .*branch"):
        load_record(run_folder)


def test_a_lost_status_is_written_again_from_the_checkpoint(workspace: Path, tmp_path: Path) -> None:
    run_folder = shutil.copytree(workspace / "run", tmp_path / "run")
    (run_folder / "status.json").unlink()
    with pytest.raises(UserError, match=r"status.json is missing or damaged; write it again \(fedflat resume "):
        load_record(run_folder)
    shutil.rmtree(run_folder / "checkpoint")
    with pytest.raises(UserError, match=r"status.json is missing or damaged; restore it, or start again"):
        load_record(run_folder)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"round": 1, "test": {"server": {}}}', "line 4 is of round 1, after one of round 2"),
        ('{"round": 3, "test": {"wima": {}}}', "line 4 has no round and test"),
        ('{"round": 3, "test": {"server": {}, "wima": 1}}', "line 4 has no scores of a model"),
        ('{"round": 3, "test": {"server": {}}}', "metrics.jsonl is of another run: it has round 3, .* rounds 0 to 2"),
    ],
)
def test_metrics_fit_the_run(workspace: Path, tmp_path: Path, line: str, message: str) -> None:
    run_folder = shutil.copytree(workspace / "run", tmp_path / "run")
    with (run_folder / "metrics.jsonl").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(UserError, match=message):
        load_record(run_folder)


def test_damaged_measurements_are_left_out_of_a_report(workspace: Path, tmp_path: Path) -> None:
    run_folder = shutil.copytree(workspace / "run", tmp_path / "run")
    (run_folder / "flatness").mkdir()
    contents = {
        "spectrum": '{"models": {"server": {"subsets": [{}]}}}',
        "clients": "[1]",
        "landscape": '{"landscapes": {"a": {"format": 1}}}',
    }
    for name, content in contents.items():
        (run_folder / "flatness" / f"{name}.json").write_text(content)
    with pytest.warns(UserWarning) as caught:
        write_report(gather([run_folder]), tmp_path / "report", figures=False)
    for name in contents:
        assert any(f"{name}.json is damaged or of another version" in str(warning.message) for warning in caught)


def test_results_with_another_protocol_are_refused(tmp_path: Path) -> None:
    text = STORED_RESULT.read_text()
    (tmp_path / "result.json").write_text(text)
    assert len(read_results(tmp_path)) == 1
    for changed in (text.replace('"protocol_hash": "', '"protocol_hash": "0'), text.replace('"algorithm":', '"a":', 1)):
        (tmp_path / "result.json").write_text(changed)
        with pytest.raises(UserError, match=r"result.json was changed: its protocol_hash"):
            read_results(tmp_path)
    (tmp_path / "result.json").write_bytes(b"\xff")
    with pytest.raises(UserError, match="not UTF-8"):
        read_results(tmp_path)


def test_text_that_the_locale_cannot_decode_is_reported_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsencode", lambda text: text.encode("ascii", "surrogateescape"))
    as_ascii = "µ.npz".encode().decode("ascii", "surrogateescape")
    assert "set PYTHONUTF8=1" in forbidden_character(as_ascii)
    assert forbidden_character("\udcff") == "bytes that are not UTF-8"


def test_words_of_settings_ignore_case() -> None:
    settings = parse_config({"training": {"task": "MSE"}, "engine": {"device": " CPU", "compile": "Off"}})
    assert (settings.training.task, settings.engine.device, settings.engine.compile) == ("mse", "cpu", "off")


def test_paths_may_be_quoted(tmp_path: Path) -> None:
    path = tmp_path / "a (1), b" / "d.npz"
    path.parent.mkdir()
    np.savez(path, x_train=X, y_train=Y, x_test=X, y_test=Y)
    for text in (f'arrays(path="{path}")', f"arrays('{path}')", str(path)):
        stored = parse_config({"data": {"dataset": text}}).data.dataset
        assert len(load(stored, tmp_path).train) == 12


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\na: 2\n", "a is given twice"),
        ("[" * 5000, "nested"),
        ("a: &a [*a]", "contains itself"),
        ("a: !!bool x", "does not fit its tag"),
        (
            "\n".join(["a0: &a0 [x]"] + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]),
            "aliases",
        ),
    ],
)
def test_yaml_traps_are_rejected(text: str, message: str) -> None:
    with pytest.raises(Exception, match=message):
        load_yaml(text)


def test_yaml_aliases_and_merged_keys_are_allowed() -> None:
    assert load_yaml("a: &a [1, 2]\nb: *a\n") == {"a": [1, 2], "b": [1, 2]}
    assert load_yaml("a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}\n")["b"] == {"x": 1, "y": 3}


def test_damaged_weights_are_reported(workspace: Path, tmp_path: Path) -> None:
    data = (workspace / "weights.pt").read_bytes()
    for position in range(0, len(data), 97):
        flipped = bytearray(data)
        flipped[position] ^= 0x41
        (tmp_path / "weights.pt").write_bytes(flipped)
        try:
            read_weights(tmp_path / "weights.pt")
        except UserError as error:
            assert "weights.pt" in str(error)
    for metadata in ("{", "[1]", '"text"'):
        save_file({"weight": torch.zeros(1)}, tmp_path / "weights.safetensors", {"fedflat": metadata})
        with pytest.raises(UserError, match=r"weights.safetensors is damaged .*expected a complete file"):
            read_weights(tmp_path / "weights.safetensors")


def test_damaged_arrays_are_reported(workspace: Path, tmp_path: Path) -> None:
    (tmp_path / "inputs.npy").write_bytes((workspace / "folder/inputs.npy").read_bytes())
    data = (workspace / "folder/targets.npy").read_bytes()
    (tmp_path / "targets.npy").write_bytes(data.replace(b"{'descr'", b"{('descr'"))  # a bracket that is never closed
    with pytest.raises(UserError, match=r"targets.npy is not a complete .npy file"):
        load(f"arrays(path={tmp_path})", tmp_path)


DRY = ("--dry-run", "--dataset", "data.npz", "--clients", "10", "--clients-per-round", "5")
COMMANDS: dict[str, tuple[tuple[str, ...], str]] = {
    "NUL": (("run", "a\0b"), "NUL"),
    "bytes": (("show", "\udcff"), "not UTF-8"),
    "NaN": (("show", "run", "--target", "nan"), "finite"),
    "count": (("flatness", "spectrum", "run", "--examples", "1000000000000"), "at most"),
    "seeds": (("compare", "fedavg", "--seeds", "1000000000000"), "more than 10000 runs"),
    "grid": (("flatness", "landscape", "run", "--points", "99999999"), "days"),
    "sites": (("deploy", "init", "new", "--clients", "99999999"), "99999999 is not in the range 1<=x<=10000"),
    "keys": (("deploy", "certificates", "new", "--sites", "99999999"), "99999999 is not in the range 0<=x<=10000"),
    "host": (("deploy", "certificates", "new", "--host", "bad host!"), "is not a host"),
    "validity": (("deploy", "certificates", "new", "--days", "99999999"), "--days"),
    "certificate": (("deploy", "check", "localhost:1", "--root-certificates", "."), "not a readable PEM certificate"),
    "inside a run": (("compare", "fedavg", "fedsam", "--rounds", "1", "--out", "run/new"), "is in the run folder"),
    "sweep": (("sweep", "large.yaml", "--dry-run"), "10000000000 combinations"),
    "journal": (("tune", "tune.yaml", "--out", "search"), "tune.journal is damaged: line 1"),
    "missing partition": (("run", *DRY, "--partition", "listed(path=missing.json)"), "cannot read the partition"),
    "impossible partition": (("run", *DRY, "--partition", "natural"), "natural"),
    "too few clients": (("run", *DRY, "--partition", "iid+held-out(share=0.9)"), "exceeds the partition's"),
    "impossible model": (("run", *DRY, "--model", "lenet"), "lenet"),
    "missing weights": (("run", *DRY, "--init", "missing.pt"), "missing.pt does not exist"),
    "missing data": (("run", "--dry-run", "--dataset", "missing.npz"), "missing.npz"),
    "unknown model": (("run", "--dry-run", "--dataset", "cifar10", "--data-dir", ".", "--model", "lenett"), "lenett"),
}


@pytest.mark.parametrize(("arguments", "message"), COMMANDS.values(), ids=COMMANDS)
def test_commands_are_checked(
    workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], message: str
) -> None:
    if arguments[0] == "deploy":
        pytest.importorskip("flwr")
    if arguments[0] == "tune":
        pytest.importorskip("optuna")
    shutil.copytree(workspace, tmp_path / "work")
    monkeypatch.chdir(tmp_path / "work")
    ten = list(range(10))
    names = list(SHORT_NAMES)[:10]
    Path("large.yaml").write_text(f"grid: {dict.fromkeys(names, ten)}\n")
    Path("search/tune.journal").write_text("garbage\n")
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 2 and isinstance(result.exception, SystemExit), result.exception
    assert message in " ".join(result.stderr.replace("│", " ").split())


def test_a_dry_run_downloads_nothing(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workspace)
    result = CliRunner().invoke(app, ["run", "--dry-run", "--dataset", "cifar10", "--data-dir", "datasets"])
    assert result.exit_code == 0 and "algorithm: fedavg" in result.stdout
    assert "not checked, because cifar10 is missing" in result.stderr and not Path("datasets").exists()


def test_one_algorithm_with_one_seed_gets_a_warning(
    workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in TINY.items()]
    line = ["compare", "fedavg", "--seeds", "1", "--quiet", "--dataset", str(workspace / "data.npz"), *flags]
    result = CliRunner().invoke(app, line)
    assert result.exit_code == 0 and "not a comparison" in result.stderr


def test_downloads_are_encrypted_and_verified() -> None:
    downloads = [download for source in DATASETS.values() for download in source.downloads]
    assert downloads and all(item.url.startswith("https://") and len(item.md5) == 32 for item in downloads)
