"""How a cohort is divided among workers."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from fedflat.engines.ray import scheduling
from fedflat.engines.ray.scheduling import ClientCosts, Transfer, aggregation_blocks, assign_shares, split_share
from fedflat.engines.ray.work_queue import WorkerHandle, WorkItem, WorkQueue
from fedflat.engines.round.plan import Plan

from .federations import engine_of, same, small, walk

SECONDS = st.lists(st.floats(0.001, 10), min_size=1, max_size=60)


@given(SECONDS, st.integers(1, 8))
def test_shares_hold_every_client_once_and_are_even(costs: list[float], workers: int) -> None:
    """No share exceeds a fair one by more than one client."""
    shares = assign_shares(costs, [Transfer(0.0, {})] * len(costs), workers)
    assert sorted(row for share in shares for row in share) == list(range(len(costs)))
    assert max(sum(costs[row] for row in share) for share in shares) <= sum(costs) / workers + max(costs) + 1e-6


@given(SECONDS, st.integers(2, 5), st.integers(1, 5), st.floats(0.01, 5.0), st.randoms())
def test_state_is_moved_only_where_the_round_ends_earlier(
    costs: list[float], workers: int, homes_used: int, price: float, random: object
) -> None:
    homes = [random.randrange(min(homes_used, workers)) for _ in costs]  # type: ignore[attr-defined]
    transfers = [Transfer(price, {home: 0.0}) for home in homes]
    shares = assign_shares(costs, transfers, workers)
    assert sorted(row for share in shares for row in share) == list(range(len(costs)))
    ends = [sum(costs[row] + transfers[row].seconds(worker) for row in share) for worker, share in enumerate(shares)]
    at_home = [
        sum(cost for cost, home in zip(costs, homes, strict=True) if home == worker) for worker in range(workers)
    ]
    assert max(ends) <= max(at_home) + 1e-6
    moved = [row for worker, share in enumerate(shares) for row in share if homes[row] != worker]
    assert not moved or sorted(ends, reverse=True) < sorted(at_home, reverse=True)
    last, first = ends.index(max(ends)), ends.index(min(ends))
    for row in shares[last]:
        seconds = costs[row] + price
        after_move = max(ends[last] - costs[row] - transfers[row].seconds(last), ends[first] + seconds)
        assert after_move >= ends[last] * (1 - 1e-5), "moving another client would have ended the round earlier"


def test_many_clients_whose_states_are_on_one_worker() -> None:
    """The others need a quarter of a second more per client: 195 * 1.25 s = 243.75 s, and 196 would be 245 s."""
    shares = assign_shares([1.0] * 2000, [Transfer(0.25, {0: 0.0})] * 2000, 10)
    assert [len(share) for share in shares] == [245, *[195] * 9]


@given(SECONDS, st.integers(1, 8))
def test_pieces_are_the_share_in_its_order(costs: list[float], pieces: int) -> None:
    share = sorted(range(len(costs)), key=lambda row: -costs[row])
    result = split_share(share, costs, pieces)
    assert [row for piece in result for row in piece] == share
    assert len(result) <= (1 if pieces == 1 else 2 + (pieces >= 3) + (pieces >= 5))


def test_the_first_piece_is_half_of_the_share_and_the_last_an_eighth() -> None:
    assert [len(piece) for piece in split_share(range(32), [1.0] * 32)] == [16, 8, 4, 4]
    assert [len(piece) for piece in split_share(range(100), [1e-5] * 100)] == [100]


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


def work_item(worker: WorkerHandle | None, seconds: float, transfer_seconds: float = 0.0) -> WorkItem:
    item = WorkItem("train", lambda worker, with_state: (), planned_worker=worker)
    item.seconds, item.transfer_seconds = seconds, transfer_seconds
    return item


def test_an_idle_worker_takes_over_the_last_item_of_the_slowest() -> None:
    idle, slow, slower = (WorkerHandle(None, None) for _ in range(3))
    items = [work_item(slow, 2.0), work_item(slow, 2.0), work_item(slower, 4.0), work_item(slower, 1.0, 9.0)]
    queue = WorkQueue(items, workers=3)
    assert queue.take(idle, in_advance=True) is None
    assert queue.take(idle, in_advance=False) is None, "moving the state would take longer than waiting"
    items[3].transfer_seconds = 3.0
    assert queue.take(idle, in_advance=False) is items[3]
    assert queue.take(slower, in_advance=True) is None, "its only item is left for others"
    assert queue.take(slower, in_advance=False) is items[2]
    assert queue.take(idle, in_advance=False) is items[1]
    queue.put_back(items[2])
    assert len(queue) == 2 and queue.take(idle, in_advance=False) is items[2]
    assert queue.take(slow, in_advance=False) is items[0]
    assert not queue and queue.take(idle, in_advance=False) is None
    twins = [work_item(worker, 1.0) for worker in (slow, slower)]
    queue = WorkQueue(twins, workers=2)
    for item in [queue.take(slow, in_advance=False), queue.take(slower, in_advance=False)]:
        assert item is not None and item.planned_worker is not None
        queue.put_back(item)  # at equal seconds and lengths, workers must not be compared
        assert queue.take(item.planned_worker, in_advance=False) is item
    assert not queue
    queue = WorkQueue(items[:2], workers=2)
    assert [queue.take(worker, in_advance=False) for worker in (slow, idle)] == items[:2]


def test_any_worker_runs_the_items_of_a_lost_one() -> None:
    lost, other = WorkerHandle(None, None), WorkerHandle(None, None)
    items = [work_item(lost, 1.0, 9.0), work_item(None, 1.0), work_item(lost, 1.0, 9.0)]
    queue = WorkQueue(items, workers=2)
    first = queue.take(lost, in_advance=False)
    lost.is_lost = True
    assert first is items[0]
    queue.put_back(first)
    queue.release_lost()
    assert queue.take(other, in_advance=True) is items[0], "more items than workers"
    assert queue.take(other, in_advance=True) is None
    assert [queue.take(other, in_advance=False) for _ in range(2)] == items[1:] and not queue


def test_four_workers_get_the_results_of_one(ray: Any) -> None:
    """Here, because the tests of sweeps before have stopped the two workers of other tests.

    Without state, with control variates, the gradient of the whole cohort, scalars, and a perturbation with state.
    """
    engine = engine_of(small(), 4)
    assert len(set(engine.pool.process_ids)) == 4
    for algorithm in ("fedavg", "scaffold", "mime", "fedwmsam", "fedsmoo"):
        config = small(algorithm=algorithm)
        assert same(walk(config, engine, 3), walk(config, rounds=3)), algorithm
