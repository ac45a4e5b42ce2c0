"""How work is divided."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fedflat.engines import ray_work
from fedflat.engines.ray_work import Costs, blocks_of, units_of

SECONDS = st.lists(st.floats(0.001, 10), min_size=1, max_size=60)


@given(SECONDS, st.integers(1, 8), st.integers(1, 8))
def test_units_hold_every_client_once_and_get_smaller(costs: list[float], workers: int, pieces: int) -> None:
    units = units_of(costs, workers, pieces)
    assert sorted(row for unit in units for row in unit) == list(range(len(costs)))
    loads = [sum(costs[row] for row in unit) for unit in units]
    assert loads == sorted(loads, reverse=True)
    assert len(units) <= workers * (1 if pieces == 1 else 2 + (pieces >= 4) + (pieces >= 8))


@given(SECONDS, st.integers(1, 8))
def test_workers_end_within_a_client_or_a_smallest_piece_of_each_other(costs: list[float], workers: int) -> None:
    """Whoever is free takes the next unit; no one ends later than a fair share, a client and a smallest piece after the begin."""
    ends = [0.0] * workers
    for unit in units_of(costs, workers, least=1e-6):
        ends[ends.index(min(ends))] += sum(costs[row] for row in unit)
    share = sum(costs) / workers
    assert max(ends) <= share + share / 8 + max(costs)


@given(SECONDS)
def test_blocks_are_those_of_the_aggregation(costs: list[float]) -> None:
    blocks = blocks_of(costs)
    assert sorted(blocks) == [list(range(i, min(i + 8, len(costs)))) for i in range(0, len(costs), 8)]


def test_little_work_travels_in_few_messages() -> None:
    assert len(units_of([1e-5] * 100, workers=2)) == 2
    assert [len(unit) for unit in units_of([1.0] * 64, workers=2)] == [16, 16, 8, 8, 4, 4, 4, 4]


def test_costs_are_the_last_measured_or_by_samples() -> None:
    costs = Costs()
    assert not costs.known and costs.expected(7, 30) == 30
    costs.measured([1, 2], [10, 30], 4.0)
    assert costs.known and costs.expected(1, 10) == 1.0 and costs.expected(2, 30) == 3.0
    assert costs.expected(9, 50) == 5.0
    costs.measured([1], [10], 2.0)
    assert costs.expected(1, 10) == 2.0


def test_costs_of_millions_of_clients_stay_small() -> None:
    costs = Costs()
    for client in range(ray_work.REMEMBERED + 10):
        costs.measured([client], [1], 1.0)
    assert len(costs._seconds) == ray_work.REMEMBERED and 0 not in costs._seconds
