"""Pachinko allocation: equal sizes, disjoint clients, few coarse labels, and their fine labels evenly."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedflat.data import make_partition
from fedflat.errors import UserError

FINE = np.arange(50_000) % 100
COARSE = FINE // 5


def test_it_reproduces_the_published_500_clients_of_100() -> None:
    partition = make_partition("pachinko", FINE, 100, 500, 0, coarse=COARSE)
    assert np.array_equal(np.sort(np.concatenate(partition.clients)), np.arange(50_000))
    assert {len(indices) for indices in partition.clients} == {100}
    by_coarse = partition.histogram(FINE, 100).reshape(500, 20, 5)
    assert 5 < np.count_nonzero(by_coarse.sum(2), axis=1).mean() < 9, "few coarse labels each (alpha = 0.1)"
    large = by_coarse[by_coarse.sum(2) >= 50]
    assert np.count_nonzero(large, axis=1).mean() > 4.8, "and of those nearly all the fine ones (beta = 10)"


def test_shares_have_the_moments_of_the_two_distributions() -> None:
    plenty = np.arange(100_000) % 6
    partition = make_partition("pachinko(alpha=0.5,beta=2)", plenty, 6, 5000, 0, coarse=plenty // 3)
    shares = partition.histogram(plenty, 6).reshape(5000, 2, 3) / 20
    early = shares.sum(2)[:, 0]
    assert early.mean() == pytest.approx(0.5, abs=0.02)
    dirichlet = 0.25 / (2 * 0.5 + 1)
    assert early.var() == pytest.approx(dirichlet + (0.25 - dirichlet) / 20, rel=0.1), (
        "a Dirichlet-multinomial of 20 draws"
    )


@settings(max_examples=60)
@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=12).filter(any),
    st.integers(1, 40),
    st.integers(1, 5),
    st.sampled_from([1e-320, 1e-9, 0.1, 10.0, 1e308]),
    st.sampled_from([1e-320, 1e-9, 0.1, 10.0, 1e308]),
    st.integers(0, 2**40),
)
def test_it_handles_any_classes_and_clients(
    counts: list, clients: int, parents: int, alpha: float, beta: float, seed: int
) -> None:
    targets = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(counts)), counts))
    clients = min(clients, len(targets))
    partition = make_partition(
        f"pachinko(alpha={alpha!r},beta={beta!r})", targets, len(counts), clients, seed, coarse=targets % parents
    )
    assert np.array_equal(np.sort(np.concatenate(partition.clients)), np.arange(len(targets)))
    sizes = [len(indices) for indices in partition.clients]
    assert len(sizes) == clients and max(sizes) - min(sizes) <= 1


def test_an_exhausted_fine_label_is_replaced_by_its_siblings() -> None:
    # Class 0 is rare, its coarse label is not: clients of that label get class 1 instead, not the other coarse label.
    targets = np.repeat([0, 1, 2, 3], [5, 1995, 500, 500])
    histogram = make_partition("pachinko(alpha=1e-9)", targets, 4, 20, 3, coarse=targets // 2).histogram(targets, 4)
    content = histogram[histogram[:, 2:].sum(1) == 0]
    assert 5 <= len(content) <= 13 and content[:, 1].min() >= 145


def test_the_names_and_the_type_of_coarse_labels_do_not_matter() -> None:
    digests = {
        make_partition("pachinko", FINE, 100, 50, 2, coarse=coarse).digest()
        for coarse in (COARSE, 7 * COARSE - 3, torch.from_numpy(COARSE))
    }
    assert len(digests) == 1


def test_invalid_requests_raise_a_clear_error() -> None:
    with pytest.raises(UserError, match="pachinko needs coarse labels"):
        make_partition("pachinko", FINE, 100, 500, 0)
    with pytest.raises(UserError, match="class 0 has examples of two coarse labels"):
        make_partition("pachinko", FINE, 100, 500, 0, coarse=np.arange(50_000) // 100)
    with pytest.raises(UserError, match="50001 clients"):
        make_partition("pachinko", FINE, 100, 50_001, 0, coarse=COARSE)
