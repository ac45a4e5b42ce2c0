"""Clients of unequal size, on top of the partitioners that otherwise make them equal."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedflat.data import make_partition
from fedflat.data.partitioners.partitioner import client_sizes, equal_sizes
from fedflat.errors import UserError

CIFAR_LIKE = np.arange(50_000) % 10


@settings(max_examples=150)
@given(st.integers(1, 300), st.integers(0, 3000), st.floats(0, 10), st.integers(0, 2**40))
def test_sizes_add_up_and_no_client_is_empty(parts: int, more: int, sigma: float, seed: int) -> None:
    sizes = client_sizes(parts + more, parts, sigma, np.random.default_rng(seed))
    assert len(sizes) == parts and sizes.sum() == parts + more and sizes.min() >= 1 and sizes.dtype == np.int64
    if sigma == 0:
        assert np.array_equal(sizes, equal_sizes(parts + more, parts))


def test_sizes_are_lognormal() -> None:
    for sigma in (0.3, 1.0):
        logs = np.log(client_sizes(10**9, 20_000, sigma, np.random.default_rng(0)))
        assert logs.std() == pytest.approx(sigma, rel=0.02)
        assert np.median(logs) == pytest.approx(logs.mean(), abs=0.03 * sigma), "symmetric in the logarithm"


@pytest.mark.parametrize("text", ["iid", "dirichlet", "dirichlet(alpha=0)", "dirichlet-reuse"])
def test_sigma_combines_with_the_partitioner(text: str) -> None:
    inside = text.removesuffix(")") + ("," if "(" in text else "(")
    partition = make_partition(f"{inside}sigma=0.5)", CIFAR_LIKE, 10, 100, 0)
    plain = make_partition(text, CIFAR_LIKE, 10, 100, 0).describe(CIFAR_LIKE, 10)
    described = partition.describe(CIFAR_LIKE, 10)
    sizes = np.array([len(indices) for indices in partition.clients])
    assert sizes.sum() == 50_000 and 0.4 < np.log(sizes).std() < 0.6
    assert described["heterogeneity"] == pytest.approx(plain["heterogeneity"], abs=0.05), (
        "sizes leave the class mixtures alone"
    )
    if text != "dirichlet-reuse":
        assert described["coverage"] == 1 and described["duplicates"] == 0
    if text == "dirichlet(alpha=0)":
        assert described["classes_per_client"] == 1


def test_sigma_zero_changes_nothing() -> None:
    for text, other in (("iid", "iid(sigma=0)"), ("dirichlet(alpha=0.3)", "dirichlet(alpha=0.3,sigma=0.0)")):
        first, second = (make_partition(each, CIFAR_LIKE, 10, 30, 1) for each in (text, other))
        assert first.digest() == second.digest() and first.text == second.text


def test_sizes_out_of_range_are_rejected() -> None:
    with pytest.raises(UserError, match=r"sigma=11 .*at least 0 and at most 10"):
        make_partition("iid(sigma=11)", CIFAR_LIKE, 10, 10, 0)
