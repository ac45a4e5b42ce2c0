"""The partitioner of the published federated CIFAR files."""

from __future__ import annotations

import numpy as np
import pytest

from fedflat.data import make_partition
from fedflat.data.partitioners.dirichlet import log_dirichlet, softmax


@pytest.mark.parametrize(
    ("classes", "alpha", "published"), [(10, 0.05, 1.32), (100, 0.5, 5.13), (10, 0, 1), (100, 0, 1)]
)
def test_classes_per_client_are_those_of_the_published_files(classes: int, alpha: float, published: float) -> None:
    targets = np.arange(50_000) % classes
    means = [
        make_partition(f"dirichlet-lda(alpha={alpha})", targets, classes, 100, seed).describe(targets, classes)[
            "classes_per_client"
        ]
        for seed in range(6)
    ]
    assert np.mean(means) == pytest.approx(published, rel=0.06)


def test_alpha_is_the_sum_over_classes_in_proportion_to_their_size() -> None:
    shares = softmax(log_dirichlet(2.0 * np.array([0.5, 0.3, 0.2]), (20_000, 3), np.random.default_rng(0)))
    assert shares.mean(0) == pytest.approx(np.array([0.5, 0.3, 0.2]), abs=0.01)
    assert shares.var(0) == pytest.approx(np.array([0.25, 0.21, 0.16]) / 3, rel=0.05)
