"""Broken and malicious updates are refused with the reason, and the model is unharmed."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from fedflat.deploy.trust.inspection import ArraySpec, ExpectedUpdates, Update, inspect_updates

SIZE, CLIENTS = 6, 5
REAL = np.dtype(np.float32)
EXPECTED = ExpectedUpdates(
    arrays={
        "displacement": ArraySpec((SIZE,), REAL),
        "drift.c": ArraySpec((SIZE,), REAL),
        "integers/n": ArraySpec((), np.dtype(np.int64)),
    },
    examples={client: 100 + client for client in range(CLIENTS)},
    steps=dict.fromkeys(range(CLIENTS), 10),
    lr_sums=dict.fromkeys(range(CLIENTS), 1.0),
    bound=30.0,
)


def honest(client: int) -> Update:
    rng = np.random.default_rng(client)
    arrays = {name: rng.normal(size=SIZE).astype(REAL) for name in ("displacement", "drift.c")} | {
        "integers/n": np.array(10)
    }
    numbers = {
        "lr_sum": 1.0,
        "loss": 12.0,
        "steps": 10,
        "backward_passes": 10,
        "samples": 100,
        "examples": 100 + client,
    }
    return Update(client, arrays, numbers)


def array(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Update], Update]:
    return lambda update: update._replace(arrays={**update.arrays, name: change(update.arrays[name])})


def number(name: str, value: float) -> Callable[[Update], Update]:
    return lambda update: update._replace(numbers={**update.numbers, name: value})


def without(name: str) -> Callable[[Update], Update]:
    return lambda update: update._replace(arrays={key: value for key, value in update.arrays.items() if key != name})


def poisoned(value: float) -> Callable[[np.ndarray], np.ndarray]:
    return lambda vector: np.where(np.arange(SIZE) == 3, value, vector).astype(REAL)


BAD: dict[str, tuple[Callable[[Update], Update], str]] = {
    "one NaN": (array("displacement", poisoned(math.nan)), "displacement.*NaN"),
    "one infinity": (array("drift.c", poisoned(-math.inf)), "drift.c.*infinite"),
    "another shape": (array("displacement", lambda vector: vector[:-1]), r"displacement has shape \(5,\), not \(6,\)"),
    "as a matrix": (array("displacement", lambda vector: vector.reshape(2, 3)), r"displacement has shape \(2, 3\)"),
    "another type": (
        array("displacement", lambda vector: vector.astype(np.float64)),
        "displacement is float64, not float32",
    ),
    "without a vector": (without("drift.c"), "drift.c"),
    "with one more": (lambda u: u._replace(arrays={**u.arrays, "hook": np.zeros(3)}), "unknown hook"),
    "scaled up": (
        array("displacement", lambda vector: vector * 1000),
        "norm of displacement.* 30 times",
    ),
    "so large that squares overflow": (array("drift.c", lambda vector: vector * 1e30), "norm of drift.c"),
    "more examples than it has": (number("examples", 1e9), "1e[+]09 examples.* 102"),
    "more steps than planned": (number("steps", 1000), "1000 steps.* 10"),
    "tiny rates": (number("lr_sum", 1e-12), "learning rates.*1e-12.* 1"),
    "a loss that is not a number": (number("loss", math.nan), "its loss is nan"),
    "without numbers": (lambda u: u._replace(numbers={}), "lr_sum"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_update_is_refused_and_the_others_are_accepted(name: str) -> None:
    spoil, why = BAD[name]
    updates = [spoil(honest(client)) if client == 2 else honest(client) for client in range(CLIENTS)]
    accepted, refused = inspect_updates(updates, EXPECTED)
    assert [update.client for update in accepted] == [0, 1, 3, 4]
    assert list(refused) == [2]
    assert re.search(why, refused[2]), refused[2]
    mean = np.mean([update.arrays["displacement"] for update in accepted], axis=0)
    assert np.allclose(mean, np.mean([honest(client).arrays["displacement"] for client in (0, 1, 3, 4)], axis=0))


def test_all_honest_updates_are_accepted_in_order() -> None:
    updates = [honest(client) for client in (3, 0, 4, 1)]
    assert inspect_updates(updates, EXPECTED) == (updates, {})


def test_a_bad_update_does_not_shift_the_median() -> None:
    """The median is taken over sound updates only."""
    spoil = BAD["one infinity"][0]
    updates = [spoil(honest(client)) if client < 2 else honest(client) for client in range(CLIENTS)]
    assert list(inspect_updates(updates, EXPECTED)[1]) == [0, 1]


def test_two_updates_are_not_compared() -> None:
    large = BAD["scaled up"][0](honest(1))
    assert inspect_updates([honest(0), large], EXPECTED)[1] == {}


def test_scalars_are_checked_by_their_meaning() -> None:
    """A cosine has no common scale, but FedExP's squared norm must be that of the displacement."""
    scalars = {"perturbation.c": ArraySpec((), REAL), "server.square": ArraySpec((), REAL)}
    expected = replace(EXPECTED, arrays={**EXPECTED.arrays, **scalars})
    updates = []
    for client in range(CLIENTS):
        update = honest(client)
        square = np.square(update.arrays["displacement"]).sum(dtype=REAL)
        cosine = np.array(0.9 if client == 2 else 1e-3, REAL)
        updates.append(update._replace(arrays={**update.arrays, "perturbation.c": cosine, "server.square": square}))
    assert inspect_updates(updates, expected) == (updates, {})
    updates[1] = array("server.square", lambda square: square * 4)(updates[1])
    assert "squared norm" in inspect_updates(updates, expected)[1][1]
