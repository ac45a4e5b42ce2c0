"""How a cohort is divided among workers."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from fedflat.engines.ray import scheduling
from fedflat.engines.ray.scheduling import ClientCosts, WorkItem, WorkQueue, aggregation_blocks
from fedflat.engines.round.plan import Plan

SECONDS = st.lists(st.floats(0.001, 10), min_size=1, max_size=60)


def queue_of(costs: list[float], workers: int, **options: Any) -> WorkQueue:
    return WorkQueue(costs, lambda groups: WorkItem("train", lambda worker: (), groups), workers, **options)


@given(SECONDS, st.integers(1, 8))
def test_items_hold_every_client_once_and_workers_finish_together(costs: list[float], workers: int) -> None:
    """Each worker takes an item when it has finished its last one. None ends later than a client after a fair share."""
    queue, ends, rows = queue_of(costs, workers), [0.0] * workers, []
    while queue:
        worker = ends.index(min(ends))
        item = queue.take("node", Counter(node=workers))
        assert item is not None
        rows += item.rows
        ends[worker] += sum(costs[row] for row in item.rows)
    assert sorted(rows) == list(range(len(costs)))
    assert max(ends) <= sum(costs) / workers + 2 * max(costs) + 1e-6


def test_items_become_smaller_but_not_too_small() -> None:
    sizes = {seconds: [] for seconds in (1.0, 1e-5)}
    for seconds, found in sizes.items():
        queue = queue_of([seconds] * 32, 1, min_seconds=0.02)
        while item := queue.take("node", Counter()):
            found.append(len(item.rows))
    assert sizes == {1.0: [16, 8, 4, 2, 1, 1], 1e-5: [32]}


def test_a_worker_first_takes_the_clients_whose_states_its_node_has() -> None:
    """Then those that no node has, and then the cheapest of the node with most work, unless that node is faster."""
    costs, homes = [2.0, 1.0, 3.0, 1.0, 9.0], ["here", "there", "", "there", "gone"]
    queue = queue_of(costs, 1, homes=homes, transfer_seconds=2.5, item_groups=1)
    workers = Counter(here=1, there=1)
    taken = [queue.take("here", workers) for _ in range(4)]
    assert [item and item.rows for item in taken] == [[0], [2], [4], None], "there, 2 s of work are left"
    assert len(queue) == 2 and queue.take("here", Counter(here=1)).rows == [3]  # type: ignore[union-attr]
    assert queue.take("there", workers).rows == [1] and not queue  # type: ignore[union-attr]


@given(st.integers(1, 60))
def test_blocks_are_those_of_the_aggregation(count: int) -> None:
    assert aggregation_blocks(count) == [list(range(i, min(i + 8, count))) for i in range(0, count, 8)]


def test_costs_are_by_samples_unless_a_client_differs() -> None:
    costs = ClientCosts()
    assert not costs.is_measured and costs.expected_seconds(7, 30) == 30
    costs.record([1, 2], [10, 30], 4.0)
    assert costs.is_measured and costs.expected_seconds(1, 10) == 1.0 and costs.expected_seconds(9, 50) == 5.0
    for _ in range(20):
        costs.record([2], [10], 1.05)  # noise
        costs.record([3], [10], 4.0)
        costs.record([4], [10], 1.0)
    second, third, unknown = (costs.expected_seconds(client, 10) for client in (2, 3, 9))
    assert second == unknown or second < third / 3
    assert 3.5 < costs.expected_seconds(3, 10) < 4.5


@given(st.integers(1, 20), st.integers(1, 30), st.integers(1, 3), st.one_of(st.none(), st.integers(1, 12)))
def test_samples_of_a_round_are_those_of_its_batches(batch: int, size: int, epochs: int, steps: int | None) -> None:
    plan = Plan(batch, epochs, steps)
    seen = sum(len(positions) for positions in plan.batches(0, 0, 0, size))
    assert seen <= plan.samples(size) <= seen + batch


def test_costs_of_millions_of_clients_stay_small() -> None:
    costs = ClientCosts()
    for client in range(scheduling.MAX_REMEMBERED_CLIENTS + 10):
        costs.record([client], [1], 1.0)
    assert len(costs._ratios) == scheduling.MAX_REMEMBERED_CLIENTS and 0 not in costs._ratios
