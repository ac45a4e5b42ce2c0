"""Comparisons: seeds, shared partitions and batches, and divergence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedflat
from fedflat.errors import UserError

SMALL = {"rounds": 6, "clients": 12, "clients_per_round": 4, "local_steps": 3, "workers": 1, "model": "mlp(hidden=8)"}


def test_a_comparison_continues_after_a_divergence() -> None:
    comparison = fedflat.compare(["fedavg(server_lr=1e30)", "fedavg"], seeds=1, **SMALL)
    first, second = comparison.table()
    assert (first["diverged"], second["diverged"]) == (1, 0) and "mean_last" not in first and second["last"].mean > 0.1


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
