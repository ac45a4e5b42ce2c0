"""Cohorts and batches are functions of (seed, purpose, round, client) only."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fedflat.engines.round.plan import Plan, Sampler
from fedflat.randomness import generator

seeds, few = st.integers(0, 2**32), st.integers(0, 1000)


@given(seed=seeds, round=st.integers(0, 10**6), clients=st.integers(1, 300), share=st.floats(0.01, 1))
def test_a_fixed_cohort_has_distinct_clients(seed: int, round: int, clients: int, share: float) -> None:
    wanted = max(1, int(share * clients))
    cohort = Sampler(clients, wanted)(seed, round)
    assert len(cohort) == len(set(cohort)) == wanted
    assert cohort == sorted(cohort) and cohort[0] >= 0 and cohort[-1] < clients
    assert cohort == Sampler(clients, wanted)(seed, round)


def test_bernoulli_cohorts_vary_around_their_mean() -> None:
    sizes = [len(Sampler(100, 10, "bernoulli")(0, round)) for round in range(400)]
    assert min(sizes) >= 1 and len(set(sizes)) > 5
    assert abs(np.mean(sizes) - 10) < 4 * 3 / np.sqrt(400)
    taken = np.bincount(np.concatenate([Sampler(20, 5, "bernoulli")(1, round) for round in range(2000)]), minlength=20)
    assert abs(taken / 2000 - 0.25).max() < 0.05


def test_dropout_removes_clients_and_keeps_the_others() -> None:
    full = [Sampler(50, 10)(3, round) for round in range(200)]
    remaining = [Sampler(50, 10, dropout=0.3)(3, round) for round in range(200)]
    assert all(set(some) <= set(all_) for some, all_ in zip(remaining, full, strict=True))
    assert abs(np.mean([len(some) for some in remaining]) - 7) < 0.4
    assert all(Sampler(5, 2, dropout=0.999)(0, round) for round in range(50))


@given(
    seed=seeds,
    round=st.integers(0, 1000),
    client=st.integers(0, 1000),
    size=st.integers(1, 60),
    batch=st.integers(1, 20),
    epochs=st.integers(1, 4),
)
def test_every_epoch_sees_every_example_once(
    seed: int, round: int, client: int, size: int, batch: int, epochs: int
) -> None:
    batches = Plan(batch, epochs).batches(seed, round, client, size)
    per_epoch = -(-size // batch)
    assert len(batches) == epochs * per_epoch
    for epoch in range(epochs):
        part = batches[epoch * per_epoch : (epoch + 1) * per_epoch]
        assert sorted(np.concatenate(part)) == list(range(size))
        assert all(len(b) == batch for b in part[:-1])


@given(size=st.integers(1, 30), batch=st.integers(1, 10), steps=st.integers(1, 40))
def test_steps_wrap_around_epochs(size: int, batch: int, steps: int) -> None:
    batches = Plan(batch, steps=steps).batches(0, 0, 0, size)
    assert len(batches) == steps
    full = Plan(batch, epochs=-(-steps // -(-size // batch))).batches(0, 0, 0, size)
    assert all(np.array_equal(a, b) for a, b in zip(batches, full, strict=False))


def test_partial_work_is_a_prefix_of_full_work() -> None:
    full, part = Plan(5, 2), Plan(5, 2, partial=0.5)
    lengths = []
    for client in range(200):
        all_, some = full.batches(0, 1, client, 40), part.batches(0, 1, client, 40)
        assert 1 <= len(some) <= len(all_)
        assert all(np.array_equal(a, b) for a, b in zip(some, all_, strict=False))
        lengths.append(len(some))
    assert 60 < sum(length < 16 for length in lengths) < 130


def test_every_purpose_round_and_client_has_its_own_random_stream() -> None:
    """A different seed, purpose, round or client gives different numbers; the same gives the same."""
    keys = [
        (s, p, r, c) for s in (0, 1) for p in ("batches", "augment", "cohort") for r in (0, 1, 7) for c in (0, 1, 7)
    ]
    draws = {key: tuple(generator(*key).integers(2**60, size=3)) for key in keys}
    assert len(set(draws.values())) == len(keys)
    assert all(tuple(generator(*key).integers(2**60, size=3)) == drawn for key, drawn in draws.items())


def test_batches_differ_between_rounds_clients_and_seeds() -> None:
    def order(seed: int, round: int, client: int) -> tuple[int, ...]:
        return tuple(np.concatenate(Plan(10).batches(seed, round, client, 40)))

    assert len({order(s, r, c) for s in (0, 1) for r in (0, 1) for c in (0, 1)}) == 8
