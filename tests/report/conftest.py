"""Run folders to report on: one real run, and generated ones with known metrics."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

import fedflat
from fedflat.algorithms import algorithm as build_algorithm
from fedflat.averaging import average_name
from fedflat.data import canonical_partition

Clone = Callable[..., Path]


@pytest.fixture(scope="session")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a real, tiny run with flatness measurements."""
    folder = tmp_path_factory.mktemp("real") / "run"
    fedflat.run("fedavg", rounds=2, local_steps=1, workers=1, device="cpu", flatness="every=1", out=folder)
    return folder


def write_run(source: Path, folder: Path, values: Sequence[float], algorithm: str, seed: int, **more: Any) -> Path:
    """A run folder as a run leaves it, with these test accuracies, one for each round from 0 on."""
    config = yaml.safe_load((source / "config.yaml").read_text())
    config |= {"algorithm": algorithm, "seed": seed}
    config["training"] |= {"rounds": len(values) - 1, **more.get("training", {})}
    config["data"] |= more.get("data", {})
    config["flatness"]["every"] = None
    partition = json.loads((source / "partition.json").read_text()) | {
        "partitioner": canonical_partition(config["data"]["partition"]),
        "seed": seed,
        "hash": more.get("hash", f"{seed:064x}"),
    }
    status = {"status": more.get("status", "finished"), "rounds": len(values) - 1, "reason": more.get("reason", "")}
    status["averages"] = [average_name(average) for average in build_algorithm(algorithm).averages]
    lines = [
        {
            **{"round": rounds, "train_loss": 1 - value, "test": {"server": {"loss": 1 - value, "accuracy": value}}},
            **{
                "backward_passes": 10 * rounds,
                "samples": 100 * rounds,
                "bytes_up": 1000 * rounds,
                "bytes_down": 2000 * rounds,
            },
        }
        for rounds, value in enumerate(values)
    ]
    for line, value in zip(lines, more.get("validation", ()), strict=False):
        line["validation"] = {"server": {"loss": 1 - value, "accuracy": value}}
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "partition.json").write_text(json.dumps(partition))
    (folder / "status.json").write_text(json.dumps(status))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "timing.jsonl").write_text(
        "".join(json.dumps({"round": n, "seconds": 0.5 * n}) + "\n" for n in range(len(values)))
    )
    return folder


def cloner(real: Path, runs: Path) -> Clone:
    """Return a function that makes run folders below a folder."""

    def make(algorithm: str, seed: int, values: Sequence[float], name: str = "", **more: Any) -> Path:
        return write_run(real, runs / (name or algorithm) / f"seed-{seed}", values, algorithm, seed, **more)

    return make


@pytest.fixture
def clone(real: Path, tmp_path: Path) -> Clone:
    """Makes run folders below ``tmp_path / "runs"``."""
    return cloner(real, tmp_path / "runs")


@pytest.fixture
def compared(clone: Clone, tmp_path: Path) -> Path:
    """Nine runs, as ``write_comparison`` makes them."""
    return write_comparison(clone, tmp_path / "runs")


def write_comparison(clone: Clone, runs: Path) -> Path:
    """Three algorithms at three seeds: fedsam is 1, 2 and 3 points above fedavg, and fedmoswa diverges at seed 2."""
    for seed in range(3):
        clone("fedavg", seed, [0.1, 0.5, 0.80, 0.80])
        clone("fedsam", seed, [0.1, 0.6, 0.85, 0.81 + 0.01 * seed])
        ending = (
            {"status": "diverged", "reason": "the loss is not finite", "training": {"rounds": 3}} if seed == 2 else {}
        )
        clone("fedmoswa", seed, [0.1, 0.2] if seed == 2 else [0.1, 0.7, 0.9, 0.9], **ending)
    return runs
