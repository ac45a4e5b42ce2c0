"""Interpolation between two models, and the barrier between them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedflat.errors import UserError
from fedflat.flatness.landscapes.grid import Mark, Model
from fedflat.flatness.landscapes.path import Barrier, barrier, path_landscape

EMPTY = torch.zeros(0, dtype=torch.float64)
A, B = torch.tensor([1.0, 0.0]).double(), torch.tensor([-1.0, 2.0]).double()
ENDS = {"a": Model(A, EMPTY), "b": Model(B, EMPTY)}


def test_on_a_quadratic_every_value_is_the_closed_form() -> None:
    found = path_landscape(ENDS, lambda m: {"train_loss": (m.weights**2).sum()}, points=11)
    t = np.array(found.axes[0])
    np.testing.assert_allclose(found.values["train_loss"], (1 - 2 * t) ** 2 + (2 * t) ** 2)
    assert found.marks == (Mark("a", (0.0,), values={"train_loss": 1.0}), Mark("b", (1.0,), values={"train_loss": 5.0}))
    assert found.metadata["distance"] == pytest.approx(8**0.5)


def test_only_a_concave_loss_has_a_barrier() -> None:
    """For k t (1 - t) above the line between the ends, the barrier is k / 4 at t = 1/2; a convex loss has none."""
    found = path_landscape(
        ENDS, lambda m: {"convex": (m.weights**2).sum(), "concave": -(m.weights**2).sum()}, points=21
    )
    assert barrier(found.axes[0], found.values["convex"]).height == pytest.approx(0, abs=1e-12)
    # ||w(t)||^2 = (1-t)||a||^2 + t||b||^2 - t(1-t)||a-b||^2, and ||a-b||^2 = 8
    found_barrier = barrier(found.axes[0], found.values["concave"])
    assert found_barrier.height == pytest.approx(8 / 4)
    assert found_barrier.at == pytest.approx(0.5)


def test_the_barrier_between_two_wells() -> None:
    """From one minimum of (x^2 - 1)^2 to the other, the barrier is 1, in the middle."""
    ends = {"left": Model(torch.tensor([-1.0]).double(), EMPTY), "right": Model(torch.tensor([1.0]).double(), EMPTY)}
    found = path_landscape(ends, lambda m: {"train_loss": ((m.weights**2 - 1) ** 2).sum()}, points=41)
    assert barrier(found.axes[0], found.values["train_loss"]) == Barrier(1.0, 0.5)


def test_the_ends_are_exactly_the_models_in_single_precision() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(1000, generator=generator) for _ in range(2))
    seen = []
    path_landscape(
        {"a": Model(a, a[:2]), "b": Model(b, b[:2])}, lambda m: (seen.append(m), {"x": m.weights.sum()})[1], points=3
    )
    assert torch.equal(seen[0].weights, a)
    assert torch.equal(seen[2].weights, b)
    assert torch.equal(seen[2].buffers, b[:2])
    torch.testing.assert_close(seen[1].buffers, (a[:2] + b[:2]) / 2)


def test_the_barrier_ignores_points_beyond_the_ends() -> None:
    found = path_landscape(ENDS, lambda m: {"train_loss": (m.weights**2).sum()}, points=41, beyond=0.5)
    assert found.axes[0][0] == -0.5
    assert found.axes[0][-1] == 1.5
    assert barrier(found.axes[0], found.values["train_loss"]).height == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize(("points", "beyond"), [(11, 0.3), (6, 1.0)])
def test_both_ends_are_always_on_the_path(points: int, beyond: float) -> None:
    plain, wider = (
        path_landscape(ENDS, lambda m: {"train_loss": (m.weights**4).sum()}, points=n, beyond=far)
        for n, far in ((41, 0), (points, beyond))
    )
    assert {0.0, 1.0} <= set(wider.axes[0])
    ends = [float(landscape.values["train_loss"][list(landscape.axes[0]).index(1.0)]) for landscape in (plain, wider)]
    assert ends[0] == pytest.approx(ends[1], rel=1e-12)
    assert list(wider.axes[0]) == sorted(wider.axes[0])


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=30), st.floats(-10, 10), st.floats(-10, 10))
def test_a_barrier_is_never_negative_and_ignores_a_tilt(values: list[float], offset: float, slope: float) -> None:
    t = np.linspace(0, 1, len(values))
    straight = barrier(tuple(t), np.array(values))
    assert straight.height >= 0
    assert barrier(tuple(t), np.array(values) + offset + slope * t).height == pytest.approx(straight.height, abs=1e-9)


def test_a_non_finite_value_is_an_infinite_barrier() -> None:
    found = barrier((0.0, 0.5, 1.0), np.array([1.0, math.nan, 1.0]))
    assert found == Barrier(math.inf, 0.5)


def test_invalid_requests_are_rejected() -> None:
    with pytest.raises(UserError, match="got 1"):
        path_landscape({"a": ENDS["a"]}, lambda m: {"x": m.weights.sum()})
    with pytest.raises(UserError, match="at least 2 points"):
        path_landscape(ENDS, lambda m: {"x": m.weights.sum()}, points=1)
    with pytest.raises(UserError, match="beyond=nan"):
        path_landscape(ENDS, lambda m: {"x": m.weights.sum()}, beyond=math.nan)


def test_a_value_beyond_an_end_does_not_affect_the_barrier() -> None:
    """Of 13 positions from -0.1 to 1.1, one is 0 up to rounding."""
    found = path_landscape(
        ENDS, lambda m: {"x": torch.tensor(math.inf if m.weights[0] > 1.05 else 1.0)}, points=13, beyond=0.1
    )
    assert {0.0, 1.0} < set(found.axes[0]) and len(found.axes[0]) == 13
    assert found.values["x"][0] == math.inf and barrier(found.axes[0], found.values["x"]).height == 0
