"""Twin runs that differ in one example only: on quadratics, their distance is known."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedflat.data import Dataset, Examples
from fedflat.errors import UserError
from fedflat.experiment.analysis.stability import Twins
from fedflat.experiment.analysis.theory import round_learning_rates
from fedflat.experiment.config import parse_config
from fedflat.experiment.make_config import make_config
from fedflat.flatness.theory import Constants, FederationSize, run_bound

from ..quadratics import Bowl, Value

SIZE, TRAIN, CLIENTS, STEPS, RATE = 3, 12, 4, 5, 0.1
rng = np.random.default_rng(3)
A = np.diag([0.5, 1.0, 2.0])
B, C = rng.normal(size=(TRAIN, SIZE)), rng.normal(size=(6, SIZE))


def quadratics() -> Dataset:
    """Examples (A, b_j) with a common Hessian A, so that full-batch descent is the same linear map for every client."""
    sets = [np.concatenate([np.tile(A.ravel(), (len(b), 1)), b], 1) for b in (B, C)]
    train, test = (Examples(torch.tensor(some), torch.zeros(len(some), dtype=torch.int64)) for some in sets)
    return Dataset("quadratics", train, test, ("value",), kind="vector")


def twins(
    algorithm: str = "fedavg", rounds: int = 4, clients_per_round: int = CLIENTS, count: int = 2, **more
) -> Twins:
    made = parse_config(
        {
            "algorithm": algorithm,
            "model": "custom:Bowl",
            "data": {"dataset": "custom:quadratics", "partition": "iid", "clients": CLIENTS},
            "federation": {"clients_per_round": clients_per_round},
            "training": {"rounds": rounds, "local_steps": STEPS, "batch_size": TRAIN, "lr": RATE},
            "engine": {"precision": "float64", "device": "cpu"},
        }
    )
    return Twins(made, count, data=quadratics(), model=Bowl(np.zeros(SIZE)), task=Value(), **more)


def test_the_stability_recursion_in_closed_form() -> None:
    """x <- M x + (I - M) mean(b) with M = (I - eta A)^K, so that twins are (I - M^t) (b' - b) / (m n) apart after t
    rounds.
    """
    pair = twins()
    M = np.linalg.matrix_power(np.eye(SIZE) - RATE * A, STEPS)
    for look in pair.train():
        power = np.linalg.matrix_power(M, look["round"])
        for swap, distance in zip(pair.swaps, look["distance"], strict=True):
            apart = (np.eye(SIZE) - power) @ (C[swap.by] - B[swap.position]) / TRAIN
            assert distance == pytest.approx(np.linalg.norm(apart), rel=1e-9)


@pytest.mark.parametrize("algorithm", ["fedavg", "fedswa(server_lr=1)"])
def test_twins_stay_within_the_papers_recursion(algorithm: str) -> None:
    """Eq. 31 with the run's own rates bounds the distance of the weights, once L bounds every gradient on the way."""
    pair = twins(algorithm, rounds=6, count=3)
    points, distances = [np.zeros(SIZE)], []
    for look in pair.train():
        points.append(pair.original.moment.model.weights.numpy())
        distances.append(max(look["distance"]))
    every = np.concatenate([B, C])
    # Iterates move from one of these points towards a mean of minima, so that the longest gradient is at an end.
    longest = max(np.linalg.norm(A @ (x - b)) for x in [*points, *every] for b in every)
    constants = Constants(longest, A.max(), 0.0, 0.0)
    for rounds, distance in enumerate(distances, 1):
        setting = FederationSize(CLIENTS, TRAIN / CLIENTS, STEPS, rounds)
        rates = round_learning_rates(pair.config, STEPS)[:rounds]
        bound = run_bound("fedswa", constants, setting, rates, tight=True).value
        assert 0 < distance <= bound / longest


def test_differences_of_losses_in_closed_form() -> None:
    pair = twins(count=1)
    (look,) = pair.train(every=10)
    x, y = (replay.moment.model.weights.numpy() for replay in (pair.original, pair.twins[0]))
    scored = [b for place, b in enumerate(C) if place != pair.swaps[0].by]
    losses = [abs(0.5 * (y - b) @ A @ (y - b) - 0.5 * (x - b) @ A @ (x - b)) for b in scored]
    assert look["mean_loss_difference"] == [pytest.approx(np.mean(losses))]
    assert look["largest_loss_difference"] == [pytest.approx(max(losses))]
    assert look["norm"] == pytest.approx(np.linalg.norm(x))


@pytest.mark.parametrize("algorithm", ["scaffold", "fedmoswa", "fedsam", "feddyn"])
def test_twins_are_equal_until_the_client_participates(algorithm: str) -> None:
    late = next(
        pair
        for client in range(CLIENTS)
        if (pair := twins(algorithm, 6, 1, 1, client=client)).swaps[0].first_round in (2, 3, 4, 5)
    )
    first = late.swaps[0].first_round
    distances = {look["round"]: look["distance"][0] for look in late.train()}
    assert all(distances[before] == 0 for before in range(1, first))
    assert distances[first] > 0


@pytest.mark.parametrize("algorithm", ["fedavg", "fedscam(batches=2)", "fedmo(option=I,option_I_batches=1)"])
def test_twins_are_equal_until_their_example_is_used(algorithm: str) -> None:
    """Pilot gradients and full gradients of limited size use other examples than local steps.

    A full gradient may change only a control variate, and the model a round later.
    """
    settings = {"rounds": 3, "clients": 4, "clients_per_round": 4, "local_steps": 1, "batch_size": 100}
    settings |= {"device": "cpu", "model": "mlp(hidden=4)", "algorithm": algorithm}
    pair = Twins(make_config(settings=settings), twins=6, examples=20)
    first: list[int | None] = [None] * 6
    for measured in pair.train():
        for twin, distance in enumerate(measured["distance"]):
            if distance and first[twin] is None:
                first[twin] = measured["round"]
    used = [swap.first_round for swap in pair.swaps]
    assert len(set(first)) > 1
    if algorithm == "fedavg":
        assert used == first and None in used
    pairs = zip(used, first, strict=True)
    assert all(differs is None or (uses is not None and differs >= uses) for uses, differs in pairs)


def test_twins_are_equal_until_any_client_uses_their_example() -> None:
    """With this partition, several clients share an example."""
    settings = {"rounds": 6, "partition": "dirichlet-reuse(alpha=0.1)", "model": "mlp(hidden=4)", "device": "cpu"}
    pair = Twins(make_config(settings=settings), twins=4, client=0, examples=20)
    first: dict[int, int] = {}
    for measured in pair.train():
        for twin, distance in enumerate(measured["distance"]):
            if distance:
                first.setdefault(twin, measured["round"])
    assert len(first) > 1 and [first.get(twin) for twin in range(4)] == [swap.first_round for swap in pair.swaps]


def test_a_swap_changes_one_example_and_no_label() -> None:
    pair = twins(count=1)
    changed = pair.swaps[0].apply(pair.data)
    assert torch.equal(changed.train.targets, pair.data.train.targets)
    different = (changed.train.inputs != pair.data.train.inputs).any(1).nonzero().flatten().tolist()
    assert different == [pair.swaps[0].position]


def test_the_original_is_the_run_itself() -> None:
    import fedflat

    made = parse_config(
        {
            "algorithm": "fedmoswa",
            "training": {"rounds": 3, "local_steps": 2},
            "engine": {"workers": 1, "device": "cpu"},
        }
    )
    result = fedflat.run(base=made)
    pair = Twins(made, 1)
    for _ in pair.train():
        pass
    assert torch.equal(pair.original.moment.model.weights, result.record.models["server"].weights)
    assert not torch.equal(pair.twins[0].moment.model.weights, result.record.models["server"].weights)
    swap = pair.swaps[0]
    assert pair.data.train.targets[swap.position] == pair.data.test.targets[swap.by]
    assert swap.position in pair.original.partition.clients[swap.client]


def test_invalid_input_raises_a_clear_error() -> None:
    with pytest.raises(UserError, match=r"client 99; .*4 clients"):
        twins(client=99)
    with pytest.raises(UserError, match="twins=0"):
        twins(count=0)
