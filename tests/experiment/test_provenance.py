"""A run that began with another dataset, model or task is neither resumed nor reused."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

import fedflat
from fedflat.cli.shared.several_runs import verdict
from fedflat.data import Dataset, load
from fedflat.engines.problem.task import Classification
from fedflat.errors import UserError
from fedflat.experiment.callback import Callback
from fedflat.experiment.store.provenance import METADATA_KEY, fingerprint, fingerprints, recorded_data
from fedflat.experiment.store.run_folder import RunFolder
from fedflat.models import build
from fedflat.reporting.page.document import report_document
from fedflat.reporting.page.gather import gather
from fedflat.reporting.row import MIXED_DATA, mixed_data

SETTINGS: dict[str, Any] = {"rounds": 3, "clients": 4, "clients_per_round": 2, "local_steps": 1, "workers": 1}


@dataclass(frozen=True)
class Sharper(Classification):
    """Cross-entropy of scaled outputs."""

    times: float = 2.0

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.times * output, target)


def network(hidden: int = 8, between: Callable[[], nn.Module] = nn.ReLU) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, hidden), between(), nn.Linear(hidden, 10))


def digits() -> Dataset:
    return load("digits")


def dimmed() -> Dataset:
    data = digits()
    return replace(data, train=replace(data.train, inputs=data.train.inputs // 2))


def paused(folder: Path, **own: Any) -> Path:
    rounds = fedflat.rounds("scaffold", out=folder, **SETTINGS, **own)
    next(rounds)
    rounds.close()
    return folder


OTHERS = [
    (
        {"task": Sharper()},
        {},
        r"began with task Sharper\(.*times=2.0\), .* no user-supplied task; .*task=",
    ),
    ({}, {"task": Sharper()}, "began with no user-supplied task, .* task Sharper"),
    ({"task": Sharper()}, {"task": Sharper(times=3.0)}, r"this is task Sharper\(.*times=3.0\)"),
    ({"model": network()}, {"model": network(9)}, "began with model Sequential .* this is model Sequential"),
    ({"model": network()}, {"model": network(8, nn.Tanh)}, "this is model Sequential"),
    ({"dataset": digits()}, {"dataset": dimmed()}, r"data of custom:digits have changed .*\(hash .*dataset="),
]


@pytest.mark.parametrize(("first", "then", "told"), OTHERS)
def test_resuming_with_different_objects_is_refused(
    first: dict[str, Any], then: dict[str, Any], told: str, tmp_path: Path
) -> None:
    folder = paused(tmp_path / "run", **first)
    with pytest.raises(UserError, match=told):
        fedflat.resume(folder, **then)
    assert RunFolder(folder).status()["status"] == "paused"
    assert fedflat.resume(folder, **first).record.history[-1]["round"] == 3


class Killed(Callback):
    def __init__(self, after: int) -> None:
        self.after = after

    def round_done(self, run: Any) -> None:
        if run.rounds == self.after:
            raise KeyboardInterrupt


def killed(folder: Path, algorithm: str = "scaffold", after: int = 2, **settings: Any) -> Path:
    """A run with client state that was killed after two of three rounds, one of which is in its checkpoint."""
    settings = {**SETTINGS, "engine__checkpoint_every": 1, **settings}
    with pytest.raises(KeyboardInterrupt):
        fedflat.run(algorithm, out=folder, callbacks=[Killed(after)], **settings)
    return folder


def weights_file(path: Path, seed: int = 5) -> Path:
    """A file with initial weights for digits."""
    torch.manual_seed(seed)
    save_file(build("mlp", (1, 8, 8), 10).state_dict(), path)
    return path


def test_changed_initial_weights_are_detected(tmp_path: Path) -> None:
    init = weights_file(tmp_path / "init.safetensors")
    content = init.read_bytes()
    compare = partial(fedflat.compare, seeds=1, out=tmp_path / "compared", jobs=1, init=init, **SETTINGS)
    compare(["fedavg"])
    run = killed(tmp_path / "run", after=1, init=init)
    old = Path(shutil.copytree(run, tmp_path / "old"))  # of a version that did not record the weights
    recorded = json.loads((old / "partition.json").read_text())
    assert recorded["own"].pop("init")
    (old / "partition.json").write_text(json.dumps(recorded))
    weights_file(init, seed=6)
    with pytest.raises(
        UserError, match=r"initial weights .*init.safetensors have changed since .*choose another --out"
    ):
        compare(["fedavg", "fedsam"])
    with pytest.raises(UserError, match=r"initial weights .* have changed since the run .*restore that file, or start"):
        fedflat.resume(run)
    assert fedflat.resume(old).status == "finished"
    init.write_bytes(content)
    assert fedflat.resume(run).status == "finished" and len(compare(["fedavg", "fedsam"]).records) == 2
    init.unlink()
    compare(["fedavg", "fedsam"])  # finished runs do not need it


def test_a_checkpoint_replaces_the_initial_weights(tmp_path: Path) -> None:
    init = weights_file(tmp_path / "init.safetensors")
    fedflat.run("scaffold", out=tmp_path / "whole", init=init, engine__checkpoint_every=1, **SETTINGS)
    removed = killed(tmp_path / "removed", init=init)
    changed = Path(shutil.copytree(removed, tmp_path / "changed"))
    needing = {
        "clients": killed(tmp_path / "clients", "fedavg+dyn(all_mean=true)", init=init),
        "frozen": killed(tmp_path / "frozen", "fedavg", init=init, train="head"),
        "no checkpoint": killed(tmp_path / "first", after=1, init=init),
    }
    weights_file(init, seed=6)
    fedflat.resume(changed)
    init.unlink()
    fedflat.resume(removed)
    for folder in (removed, changed):
        for file in ("config.yaml", "metrics.jsonl", "model.safetensors"):
            assert (folder / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()
    for reason, folder in needing.items():
        words = "frozen part .*restore the initial weights" if reason == "frozen" else "initial weights"
        with pytest.raises(UserError, match=rf"{words} .*init.safetensors"):
            fedflat.resume(folder)


@pytest.mark.parametrize(("first", "then", "told"), OTHERS[2:])
def test_a_comparison_refuses_runs_of_different_objects(
    first: dict[str, Any], then: dict[str, Any], told: str, tmp_path: Path
) -> None:
    once = fedflat.compare(["fedavg"], seeds=1, out=tmp_path, **SETTINGS, **first)
    with pytest.raises(UserError, match=told):
        fedflat.compare(["fedavg"], seeds=1, out=tmp_path, **SETTINGS, **then)
    again = fedflat.compare(["fedavg"], seeds=1, out=tmp_path, **SETTINGS, **first)
    assert again.records[0].history == once.records[0].history


def test_an_identical_model_is_accepted(tmp_path: Path) -> None:
    folder = paused(tmp_path / "run", model=network())
    assert fedflat.resume(folder, model=network()).record.status == "finished"


def test_another_task_is_no_other_version_of_the_data(tmp_path: Path) -> None:
    for seed, task in enumerate(("classification", "mse")):  # a report rejects one seed with two partitions
        fedflat.run("fedavg", out=tmp_path / task, task=task, seed=seed, partition="iid", **SETTINGS)
    records = fedflat.Comparison.load(tmp_path).records
    assert len({recorded_data(record.folder) for record in records}) == 2 and mixed_data(records) == []
    (section,) = report_document(gather([tmp_path]))["sections"]
    assert not any(MIXED_DATA in note["text"] for note in section["notes"])


def test_a_changed_data_file_is_detected(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    inputs, targets = rng.normal(size=(60, 3)), rng.integers(0, 3, 60)
    where = tmp_path / "own.npz"
    np.savez(where, inputs=inputs, targets=targets)
    settings: dict[str, Any] = {"dataset": where, "partition": "iid", "model": "mlp"}
    folder, out = paused(tmp_path / "run", **settings), tmp_path / "compared"
    shutil.copytree(folder, tmp_path / "copy")
    compare = partial(fedflat.compare, ["fedavg"], out=out, jobs=1, **settings, **SETTINGS)
    compare(seeds=1)
    compare(seeds=1)  # unchanged data are accepted, although runs round them to their precision
    where.rename(tmp_path / "away.npz")
    with pytest.warns(UserWarning, match="cannot check whether the data .* does not exist"):
        compare(seeds=1)

    np.savez(where, inputs=np.where(np.arange(60)[:, None] == 59, 0, inputs), targets=targets)  # one test example
    with pytest.raises(UserError, match=r"own.npz\) have changed since the run in .*; restore them .* start again"):
        fedflat.resume(folder)
    with pytest.raises(UserError, match=r"have changed .*choose another --out"):
        compare(seeds=2)
    with pytest.warns(UserWarning, match="have changed .* values refer to the new data"):
        fedflat.load(out / "fedavg" / "seed-0").evaluate(on="test")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # deliberately measured on other data
        other = replace(load(settings["dataset"]), name="other")
        fedflat.load(out / "fedavg" / "seed-0").evaluate(on="test", dataset=other)
    fedflat.run("fedavg", out=out / "fedavg" / "seed-1", seed=1, **settings, **SETTINGS)
    (section,) = report_document(gather([out]))["sections"]
    old, new = section["data_hashes"]
    assert {"kind": "bad", "text": f"{MIXED_DATA} (hashes {old}, {new})."} in section["notes"]
    assert "different versions of their data, so they are not ranked" in verdict(fedflat.Comparison.load(out))
    fedflat.run("fedavg", out=tmp_path / "again", seed=0, **settings, **SETTINGS)
    ((_, reason),) = gather([out, tmp_path / "again"]).left_out
    assert reason.endswith("the same settings and seed; their data differ, so report them separately")
    (tmp_path / "away.npz").replace(where)
    assert fedflat.resume(tmp_path / "copy").record.status == "finished"


@pytest.mark.parametrize("kind", ["vectors", "images"])
def test_models_are_evaluated_with_the_statistics_of_training(kind: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    inputs: Any
    targets: Any
    inputs, targets, options, factor = rng.normal(3, 2, (60, 3)), rng.normal(size=60), ",standardise=true", -2
    if kind == "images":
        inputs, targets, options = rng.integers(0, 100, (60, 1, 8, 8), np.uint8), rng.integers(0, 3, 60), ""
        factor = 1  # keep the class numbers
    test = {"test_inputs": inputs[40:], "test_targets": targets[40:]}
    where = tmp_path / "own.npz"
    np.savez(where, inputs=inputs[:40], targets=targets[:40], **test)
    dataset = f"arrays(path={where}{options})"
    result = fedflat.run("fedavg", dataset=dataset, partition="iid", out=tmp_path / "run", model="mlp", **SETTINGS)
    np.savez(where, inputs=inputs[:40] * 2, targets=targets[:40] * factor, **test)
    evaluate = partial(fedflat.load(tmp_path / "run").evaluate, on="test")
    with pytest.warns(UserWarning, match="have changed .* normalised with the run's statistics"):
        loss = evaluate().parts["test"]["loss"]
    assert loss == pytest.approx(result.history[-1]["test"]["server"]["loss"], rel=1e-5)
    stored = tmp_path / "run" / "partition.json"
    partition = json.loads(stored.read_text())
    stored.write_text(json.dumps({key: value for key, value in partition.items() if key != METADATA_KEY}))
    with pytest.warns(UserWarning, match="have changed .* normalised with its own statistics"):
        evaluate()


def test_fingerprints_depend_on_values_not_identities() -> None:
    def own_loss(output: Tensor, target: Tensor) -> Tensor:
        return output.sum()

    weights = torch.arange(3.0)
    named = fingerprint({"a": [own_loss, partial(own_loss, target=weights)], "b": network})
    assert named == fingerprint({"a": [own_loss, partial(own_loss, target=weights.clone())], "b": network})
    assert named != fingerprint({"a": [own_loss, partial(own_loss, target=weights + 1)], "b": network})
    assert "0x" not in named
    assert fingerprints({"data": None, "model": None, "task": None}) == {}

    class Slotted:
        __slots__ = ()

    assert fingerprint(Slotted()) == fingerprint(Slotted())
    for one, other in ((np.arange(3), np.arange(3) + 1), (np.int64(1), np.int64(2)), (Path("a"), Path("b"))):
        assert fingerprint(one) == fingerprint(deepcopy(one)) != fingerprint(other)
    ascending, descending = frozenset((0, 8, 16)), frozenset((16, 8, 0))  # words differ between processes
    assert list(ascending) != list(descending)
    assert fingerprint(ascending) == fingerprint(descending) != fingerprint({0, 8})


def test_large_datasets_are_identified_by_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = digits().fingerprint()
    assert whole != replace(digits(), mean=(0.5,)).fingerprint(), "normalisation constants count"
    monkeypatch.setattr("fedflat.data.hashing.MAX_HASHED_BYTES", 1000)
    assert whole != digits().fingerprint() == digits().fingerprint() != dimmed().fingerprint()
