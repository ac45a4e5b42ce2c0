"""The published datasets themselves, where ``FEDFLAT_DATA`` has them."""

from __future__ import annotations

import os

import pytest
import torch

from fedflat.data import DATASETS, data_dir, load, make_partition, verify
from fedflat.data.batches import channel_statistics


def is_here(name: str) -> bool:
    return "FEDFLAT_DATA" in os.environ and not DATASETS[name].missing(data_dir())


@pytest.mark.parametrize(
    ("name", "train"), [("mnist", 60_000), ("fashion_mnist", 60_000), ("cifar10", 50_000), ("cifar100", 50_000)]
)
def test_a_published_dataset_matches_its_declaration(name: str, train: int) -> None:
    if not is_here(name):
        pytest.skip(f"{name} is not in FEDFLAT_DATA")
    dataset = load(name, download=False)
    assert len(dataset.train) == train and len(dataset.test) == 10_000
    for said, computed in zip((dataset.mean, dataset.std), channel_statistics(dataset.train.inputs), strict=True):
        assert said == pytest.approx(computed, abs=6e-5)
    if name != "mnist":
        assert len(set(torch.bincount(dataset.train.targets).tolist())) == 1, "balanced classes"
    if name != "cifar100":
        assert all(report.as_published for report in verify(name))


def test_the_two_dirichlet_partitions_of_cifar10_are_as_measured() -> None:
    if not is_here("cifar10"):
        pytest.skip("cifar10 is not in FEDFLAT_DATA")
    targets = load("cifar10", download=False).train.targets
    reused = make_partition("dirichlet-reuse(alpha=0.1)", targets, 10, 100, 0).describe(targets, 10)
    exact = make_partition("dirichlet(alpha=0.1)", targets, 10, 100, 0).describe(targets, 10)
    assert 0.84 < reused["coverage"] < 0.96 and 4 < reused["classes_per_client"] < 6
    assert exact["coverage"] == 1 and exact["duplicates"] == 0 and exact["sizes"]["min"] == exact["sizes"]["max"] == 500
