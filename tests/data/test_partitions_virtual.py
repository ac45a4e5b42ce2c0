"""Virtual clients: any number of them, drawn on access, at a cost independent of their number."""

from __future__ import annotations

import pickle
import time
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedflat.data import make_partition
from fedflat.errors import UserError

CIFAR_LIKE = np.arange(50_000) % 10


@settings(max_examples=50)
@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=12).filter(any),
    st.integers(1, 10**15),
    st.integers(1, 200),
    st.sampled_from([0.0, 1e-320, 1e-9, 0.1, 1.0, 1e308]),
    st.integers(0, 2**40),
    st.data(),
)
def test_every_client_has_its_size(
    counts: list, clients: int, size: int, alpha: float, seed: int, data: st.DataObject
) -> None:
    targets = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(counts)), counts))
    partition = make_partition(
        f"virtual(clients={clients},size={size},alpha={alpha!r})", targets, len(counts), None, seed
    )
    assert len(partition.clients) == clients
    number = data.draw(st.integers(0, clients - 1))
    indices = partition.clients[number]
    assert indices.dtype == np.int64 and len(indices) == size and (np.diff(indices) >= 0).all()
    assert indices[0] >= 0 and indices[-1] < len(targets)
    assert np.array_equal(indices, partition.clients[number - clients]), (
        "also counted from the end, and the same each time"
    )
    held = np.bincount(targets[indices], minlength=len(counts))
    uses = np.bincount(indices, minlength=len(targets))
    for label in np.flatnonzero(held):
        of_class = uses[targets == label]
        assert of_class.max() - of_class.min() <= 1, "no example twice while another of its class is unused"
    if alpha == 0:
        assert np.count_nonzero(held) == 1


def test_a_client_depends_on_the_seed_and_its_number_alone() -> None:
    def of(seed: int, clients: int = 1000) -> np.ndarray:
        return make_partition("virtual", CIFAR_LIKE, 10, clients, seed).clients[123]

    assert np.array_equal(of(3), of(3)) and np.array_equal(of(3), of(3, 10**12)) and not np.array_equal(of(3), of(4))
    partition = make_partition("virtual", CIFAR_LIKE, 10, 1000, 3)
    assert not np.array_equal(partition.clients[1], partition.clients[2])


def test_it_is_a_sequence() -> None:
    clients = make_partition("virtual(size=5)", CIFAR_LIKE, 10, 10, 0).clients
    assert len(list(clients)) == 10 and np.array_equal(clients[2:4][1], clients[3]) and len(clients[2:]) == 8
    with pytest.raises(IndexError):
        clients[10]


def test_a_billion_clients_cost_what_ten_cost() -> None:
    def cost(clients: int) -> tuple[float, int, int]:
        tracemalloc.start()
        start = time.process_time()
        partition = make_partition("virtual", CIFAR_LIKE, 10, clients, 0)
        for number in range(0, clients, max(1, clients // 10)):
            partition.clients[number]
        seconds, memory = time.process_time() - start, tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return seconds, memory, len(pickle.dumps(partition))

    ten, billion = cost(10), cost(10**9)
    assert billion[0] < ten[0] + 0.5 and billion[1] < 1.1 * ten[1] and billion[2] < ten[2] + 50


def test_classes_are_drawn_by_the_dirichlet_distribution() -> None:
    histogram = make_partition("virtual(size=100,alpha=0.5)", CIFAR_LIKE, 10, 10**6, 0).histogram(CIFAR_LIKE, 10)
    assert histogram.shape == (1000, 10)
    variance = 0.1 * 0.9 / (10 * 0.5 + 1)
    assert (histogram / 100).var(0).mean() == pytest.approx(variance + (0.09 - variance) / 100, rel=0.05)
    assert histogram.mean(0) == pytest.approx(np.full(10, 10), abs=1.5)


def test_hash_and_description_cover_a_stated_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedflat.data.partition.MAX_SUMMARISED", 100)
    partition = make_partition("virtual(size=50)", CIFAR_LIKE, 10, 10**6, 0)
    described = partition.describe(CIFAR_LIKE, 10)
    assert (described["clients"], described["described_clients"], len(described["histogram"])) == (10**6, 100, 100)
    assert described["duplicates"] == 5000 - round(described["coverage"] * 50_000)
    assert partition.digest() == make_partition("virtual", CIFAR_LIKE, 10, 10**6, 0).digest()
    assert partition.digest() != make_partition("virtual", CIFAR_LIKE, 10, 10**6 + 1, 0).digest()
    assert make_partition("iid", CIFAR_LIKE, 10, 200, 0).describe(CIFAR_LIKE, 10)["described_clients"] == 200


def test_validation_examples_are_never_drawn() -> None:
    partition = make_partition("virtual", CIFAR_LIKE, 10, 10**6, 0, validation=0.2)
    assert len(partition.validation) == 10_000
    assert not np.intersect1d(np.concatenate(list(partition.clients[:500])), partition.validation).size


def test_conflicting_numbers_of_clients_are_rejected() -> None:
    assert len(make_partition("virtual(clients=7)", CIFAR_LIKE, 10, 7, 0).clients) == 7
    with pytest.raises(UserError, match=r"virtual\(clients=7\) .*clients=8"):
        make_partition("virtual(clients=7)", CIFAR_LIKE, 10, 8, 0)
    with pytest.raises(UserError, match="needs a number of clients"):
        make_partition("virtual", CIFAR_LIKE, 10, None, 0)
