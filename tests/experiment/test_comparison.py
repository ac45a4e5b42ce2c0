"""Comparisons: seeds, shared partitions and batches, and divergence."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedflat
from fedflat.cli.shared.several_runs import comparison_document
from fedflat.data import from_arrays
from fedflat.errors import UserError
from fedflat.reporting.page.gather import gather, group_runs

SMALL = {"rounds": 6, "clients": 12, "clients_per_round": 4, "local_steps": 3, "workers": 1, "model": "mlp(hidden=8)"}


def test_a_comparison_continues_after_a_divergence() -> None:
    comparison = fedflat.compare(["fedavg(server_lr=1e30)", "fedavg"], seeds=1, **SMALL)
    first, second = comparison.table()
    assert (first["diverged"], second["diverged"]) == (1, 0) and second["last"].mean > 0.1
    assert {first[name].shown("accuracy") for name in ("last", "mean_last", "best")} == {"–"}
    (row,) = comparison_document(fedflat.Comparison([comparison.records[0]]))["rows"]
    assert not {"last", "mean_last", "best"} & row.keys()


def test_a_comparison_accepts_one_algorithm() -> None:
    comparison = fedflat.compare("fedavg", seeds=1, **(SMALL | {"rounds": 1}))
    assert [row["label"] for row in comparison.table()] == ["fedavg"]
    assert comparison.table(0.05) == comparison.table([0.05]) and "rounds to 0.05" in comparison.table(0.05)[0]


@pytest.mark.parametrize("targets", [["x"], "0.8"])
def test_targets_must_be_numbers(targets: Any) -> None:
    comparison = fedflat.compare("fedavg", seeds=1, **SMALL)
    with pytest.raises(UserError, match=r"the target .* is invalid; expected a finite number"):
        comparison.table(targets=targets)


def test_results_of_single_runs_can_be_compared() -> None:
    results = [fedflat.run(name, **(SMALL | {"rounds": 1})) for name in ("fedavg", "fedprox")]
    assert [row["label"] for row in fedflat.Comparison(results).table()] == ["fedavg", "fedprox"]
    with pytest.warns(UserWarning, match="a run of fedprox with seed 0 repeats another one"):
        assert len(fedflat.Comparison([*results, results[1]])) == 2


@dataclass(frozen=True)
class Weighted(fedflat.Classification):
    """Cross-entropy times a factor."""

    factor: float = 1.0

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.factor * super().loss(output, target)


def user_objects(changed: str = "") -> dict[str, Any]:
    """A user-supplied dataset, model and task; the one called ``changed`` differs from the usual one."""
    rng, layers = np.random.default_rng(0), [nn.Linear(4, 3), nn.Softmax(1)]
    inputs, targets = rng.normal(size=(60, 4)) + (changed == "dataset"), rng.integers(3, size=60)
    return {
        "dataset": from_arrays(inputs, targets, inputs, targets),
        "model": nn.Sequential(*layers[: 2 if changed == "model" else 1]),
        "task": Weighted(factor=2.0 if changed == "task" else 1.0),
    }


@pytest.mark.parametrize("changed", ["dataset", "model", "task"])
def test_runs_of_different_user_objects_have_different_rows(changed: str, tmp_path: Path) -> None:
    settings = {"rounds": 1, "clients": 3, "clients_per_round": 2, "local_steps": 1, "workers": 1}

    def run(name: str, seed: int, out: Path | None = None) -> fedflat.Result:
        return fedflat.run("fedavg", seed=seed, out=out, **user_objects(name), **settings)

    def seeds(comparison: fedflat.Comparison) -> list[list[int]]:
        return [[record.config.seed for record in row.records] for row in comparison.rows()]

    saved = [
        run(name, seed, tmp_path / f"{number}") for number, (name, seed) in enumerate((("", 0), ("", 1), (changed, 0)))
    ]
    loaded, unsaved = fedflat.Comparison.load(tmp_path), [run("", 2), run(changed, 1)]
    mixed = fedflat.Comparison([*loaded, *unsaved])
    assert seeds(loaded) == [[0, 1], [0]] and seeds(mixed) == seeds(fedflat.Comparison(saved + unsaved)) == [
        [0, 1, 2],
        [0, 1],
    ]
    (group,) = group_runs(gather([tmp_path]).records)
    labels = [row.label for row in group.rows]
    assert len(set(labels)) == 2 and all(label.startswith(f"fedavg, {changed}=") for label in labels)
    differing = mixed.differing_settings()
    assert differing == loaded.differing_settings() == [row.settings for row in group.rows]
    ((setting, value),) = differing[0].items()
    frame = mixed.to_pandas()
    assert set(frame[frame[setting] == value]["seed"]) == {0, 1, 2}


@pytest.mark.parametrize("seeds", ["2", [0.5], 2.0, None, 0, -1, [], [-1], ["1"], [0, np.int64(0)]], ids=repr)
def test_invalid_seeds_are_refused_before_anything_is_written(seeds: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="seeds="):
        fedflat.compare("fedavg", seeds=seeds, out=tmp_path / "all", **SMALL)
    assert not (tmp_path / "all").exists()


@pytest.mark.parametrize("seeds", [np.arange(2), torch.arange(2), np.int64(2), range(2)], ids=repr)
def test_seeds_may_be_integers_of_any_type(seeds: Any, tmp_path: Path) -> None:
    comparison = fedflat.compare(
        "fedavg", seeds=seeds, out=tmp_path, jobs=1, **(SMALL | {"rounds": 1, "local_steps": 1})
    )
    assert [record.config.seed for record in comparison.records] == [0, 1]
    assert (tmp_path / "fedavg/seed-1/config.yaml").exists()


def test_a_run_that_another_process_finishes_meanwhile_is_loaded(tmp_path: Path) -> None:
    class Other(fedflat.Callback):
        def ended(self, run: Any, record: Any) -> None:
            if record.config.seed == 0:
                fedflat.run("fedavg", out=tmp_path / "fedavg/seed-1", seed=1, **settings)

    settings = {**SMALL, "rounds": 1, "local_steps": 1}
    comparison = fedflat.compare("fedavg", seeds=2, out=tmp_path, callbacks=[Other()], **settings)
    assert [record.status for record in comparison.records] == ["finished", "finished"]


def test_compared_algorithms_share_initial_model_and_partition(tmp_path: Path) -> None:
    def compared() -> list[list[dict[str, object]]]:
        return [
            record.history for record in fedflat.compare(["fedavg", "scaffold"], seeds=2, out=tmp_path, **SMALL).records
        ]

    histories = compared()
    for fedavg, scaffold in (histories[:2], histories[2:]):
        # Variates are zero in the first round, so SCAFFOLD takes exactly FedAvg's steps if it sees the same batches.
        for key in ("round", "train_loss", "test", "samples"):
            assert [record[key] for record in fedavg[:2]] == [record[key] for record in scaffold[:2]]
        assert fedavg[2]["test"] != scaffold[2]["test"]
    partitions = [json.loads(path.read_text()) for path in tmp_path.glob("*/*/partition.json")]
    assert len(partitions) == 4 and len({partition["hash"] for partition in partitions}) == 2
    assert compared() == histories
