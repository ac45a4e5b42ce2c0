"""The partitioner of the published federated CIFAR files."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedflat.data import make_partition
from fedflat.data.partitioners.dirichlet import log_dirichlet, softmax


@settings(max_examples=80)
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=12).filter(any),
    st.integers(1, 60),
    st.sampled_from([1e-320, 1e-9, 0.05, 1.0, 100.0, 1e308]),
    st.integers(0, 2**40),
)
def test_it_handles_any_classes_and_clients(counts: list, clients: int, alpha: float, seed: int) -> None:
    targets = np.repeat(np.arange(len(counts)), counts)
    clients = min(clients, len(targets))
    partition = make_partition(f"dirichlet-lda(alpha={alpha!r})", targets, len(counts), clients, seed)
    assert np.array_equal(np.sort(np.concatenate(partition.clients)), np.arange(len(targets)))
    size, larger = divmod(len(targets), clients)
    assert [len(indices) for indices in partition.clients] == [size + 1] * larger + [size] * (clients - larger)


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
