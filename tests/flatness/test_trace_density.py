"""Trace and density against full Hessians: values lie in their intervals, and moments are exact."""

from __future__ import annotations

import sys
import weakref
from typing import Any

import numpy as np
import pytest
import torch

from fedflat.errors import UserError
from fedflat.flatness import Ends, Objective, Operator, lanczos, spectrum_of
from fedflat.flatness.curvature.krylov import Krylov
from fedflat.flatness.curvature.trace import estimate_trace, lanczos_quadrature
from fedflat.flatness.estimate import estimate

from .networks import NETWORKS, case, symmetric, true_hessian


@pytest.mark.parametrize("name", NETWORKS)
def test_the_trace_lies_in_its_interval(name: str) -> None:
    truth = float(true_hessian(name).trace())
    found = estimate_trace(Operator.of_matrix(true_hessian(name)), draws=40, seed=1)
    # One of six networks may lie outside a 95 % interval; the coverage is tested below.
    assert found.low - found.half_width <= truth <= found.high + found.half_width
    assert found.draws == 40 and found.half_width < 2 * abs(truth) + 1


def test_the_trace_of_a_network_from_products_only() -> None:
    by_products = estimate_trace(Operator.of_hessian(case("mlp").objective()), draws=10)
    by_matrix = estimate_trace(Operator.of_matrix(true_hessian("mlp")), draws=10)
    assert by_products.value == pytest.approx(by_matrix.value, rel=1e-10)


def test_the_interval_has_its_nominal_coverage() -> None:
    matrix = symmetric(torch.linspace(-1, 4, 60) ** 3)
    truth = float(matrix.trace())
    found = [estimate_trace(Operator.of_matrix(matrix), draws=10, seed=seed) for seed in range(200)]
    covered = sum(one.low <= truth <= one.high for one in found) / len(found)
    assert 0.90 <= covered <= 0.99
    assert np.mean([one.value for one in found]) == pytest.approx(truth, rel=0.02)


def test_known_eigenvectors_narrow_the_interval() -> None:
    matrix = symmetric(torch.cat([torch.tensor([50.0, 30.0, -20.0]), torch.linspace(0, 0.01, 200)]))
    pairs = lanczos(Operator.of_matrix(matrix), Ends(2, 1), tolerance=1e-8)
    plain = estimate_trace(Operator.of_matrix(matrix), draws=20)
    better = estimate_trace(Operator.of_matrix(matrix), draws=20, values=pairs.values, vectors=pairs.vectors)
    truth = float(matrix.trace())
    for one in (plain, better):
        assert abs(one.value - truth) <= 2 * one.half_width
    assert better.half_width < plain.half_width / 100


def test_hutch_plus_plus_needs_fewer_products() -> None:
    matrix = symmetric(torch.cat([torch.linspace(5, 50, 8), torch.linspace(0, 0.01, 192)]))
    operators = Operator.of_matrix(matrix), Operator.of_matrix(matrix)
    plain, better = estimate_trace(operators[0], draws=30), estimate_trace(operators[1], estimator="hutch++", draws=30)
    assert operators[0].products == operators[1].products == 30 and better.draws == 10
    truth = float(matrix.trace())
    assert abs(better.value - truth) <= 2 * better.half_width and better.half_width < plain.half_width / 100
    pairs = lanczos(Operator.of_matrix(matrix), Ends(4), tolerance=1e-8)  # the sketch finds the other four
    known, counts = {"values": pairs.values, "vectors": pairs.vectors}, list[int]()
    both = estimate_trace(operators[1], estimator="hutch++", draws=15, progress=counts.append, **known)
    assert counts == [11, 12, 13, 14, 15]  # the sketch has taken the first ten products
    assert abs(both.value - truth) <= 2 * both.half_width and both.half_width < plain.half_width / 100


def test_hutch_plus_plus_covers_and_is_exact_in_a_small_space() -> None:
    matrix = symmetric(torch.linspace(-1, 4, 60) ** 3)
    truth = float(matrix.trace())
    intervals = [
        estimate_trace(Operator.of_matrix(matrix), estimator="hutch++", draws=30, seed=seed) for seed in range(100)
    ]
    assert 0.88 <= np.mean([interval.low <= truth <= interval.high for interval in intervals]) <= 1
    assert np.mean([interval.value for interval in intervals]) == pytest.approx(truth, rel=0.02)
    small = estimate_trace(Operator.of_matrix(matrix[:3, :3]), estimator="hutch++", draws=12)
    assert small.value == pytest.approx(float(matrix[:3, :3].trace())) and small.half_width < 1e-9


def test_a_diagonal_matrix_needs_one_draw() -> None:
    found = estimate_trace(Operator.of_matrix(torch.diag(torch.arange(5.0))), draws=2)
    assert (found.value, found.low, found.high) == (10, 10, 10)


def test_trace_intervals_follow_the_t_distribution() -> None:
    found = estimate([1.0, 3.0], offset=10)
    assert found.value == 12 and found.half_width == pytest.approx(12.706, abs=1e-3)
    assert estimate([1.0]).high == float("inf")
    with pytest.raises(UserError, match="draws=1"):
        estimate_trace(Operator.of_matrix(torch.eye(2)), draws=1)


def test_a_single_draw_is_refused_before_anything_is_computed() -> None:
    told: list[str] = []
    with pytest.raises(UserError, match="draws=1"):
        spectrum_of(case("mlp").objective(), 2, trace_draws=1, progress=told.append)
    assert not told


@pytest.mark.parametrize("power", [0, 1, 2, 3, 4])
def test_each_draw_has_its_own_moments_exactly(power: int) -> None:
    matrix = symmetric(torch.linspace(-1, 2, 80))
    operator = Operator.of_matrix(matrix)
    found = lanczos_quadrature(operator, draws=3, steps=4, seed=2)
    for number, (nodes, weights) in enumerate(zip(found.nodes, found.weights, strict=True)):
        z = operator.rademacher(2, "density", number) / 80**0.5
        expected = float(z @ torch.linalg.matrix_power(matrix, power) @ z)
        assert float(weights @ nodes**power) == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert found.products == 12


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_have_the_exact_spectrums_first_moments(name: str) -> None:
    matrix = true_hessian(name)
    values = torch.linalg.eigvalsh(matrix).numpy()
    found = lanczos_quadrature(Operator.of_matrix(matrix), draws=30, steps=20, seed=1)
    for power in (1, 2, 3):
        moment = found.moment(power)
        # With 15 intervals of 95 %, one value may lie outside; hence the slack.
        slack = 0.5 * moment.half_width
        assert moment.low - slack <= (values**power).mean() <= moment.high + slack
    assert found.moment(0).value == pytest.approx(1)


def test_enough_steps_resolve_every_eigenvalue() -> None:
    values = torch.tensor([-1.0, 0.0, 2.0, 5.0])
    found = lanczos_quadrature(Operator.of_matrix(symmetric(values)), draws=2, steps=10)
    for nodes in found.nodes:
        np.testing.assert_allclose(nodes, values, atol=1e-10)
    assert found.products == 8


def test_an_invariant_space_ends_a_draw() -> None:
    found = lanczos_quadrature(Operator.of_matrix(3 * torch.eye(50).double()), draws=2, steps=10)
    assert found.products == 2 and found.nodes[0] == pytest.approx([3.0]) and found.moment(1).value == pytest.approx(3)
    assert found.at(np.array([3.0]))[0] > found.at(np.array([2.0]))[0]


def test_only_one_basis_is_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    alive: weakref.WeakSet[Krylov] = weakref.WeakSet()

    def made(*arguments: Any) -> Krylov:
        assert not alive
        space = Krylov(*arguments)
        alive.add(space)
        return space

    monkeypatch.setattr(sys.modules[lanczos_quadrature.__module__], "Krylov", made)
    lanczos_quadrature(Operator.of_matrix(symmetric(torch.linspace(-1, 2, 20))), draws=3, steps=4)


def test_the_density_integrates_to_one() -> None:
    found = lanczos_quadrature(Operator.of_matrix(symmetric(torch.linspace(-3, 4, 100))), draws=4, steps=30)
    grid = found.grid(4000)
    assert np.trapezoid(found.at(grid), grid) == pytest.approx(1, abs=5e-3)
    middle = found.at(np.array([0.5]), width=1.0)[0]
    assert middle == pytest.approx(1 / 7, rel=0.15)  # eigenvalues are spread evenly over [-3, 4]
    document = found.document()
    assert len(document["nodes"]) == 4 and sum(document["weights"][0]) == pytest.approx(1)


def test_impossible_densities() -> None:
    with pytest.raises(UserError, match="draws=0, steps=5"):
        lanczos_quadrature(Operator.of_matrix(torch.eye(2)), draws=0, steps=5)


def test_known_eigenvectors_that_leave_nothing_are_not_counted_again() -> None:
    matrix = torch.diag(torch.tensor([5.0, 0.0, 0.0, 0.0, 0.0, 0.0])).double()
    vectors = torch.eye(6, dtype=torch.float64)[:1]
    found = estimate_trace(
        Operator.of_matrix(matrix), draws=12, values=torch.tensor([5.0]), vectors=vectors, estimator="hutch++"
    )
    assert found.value == pytest.approx(5.0)
    nothing = estimate_trace(Operator.of_matrix(torch.zeros(6, 6, dtype=torch.float64)), draws=12, estimator="hutch++")
    assert nothing.value == 0
    model, data = torch.nn.Linear(2, 1), (torch.randn(4, 2), torch.zeros(4))
    linear = Objective(model, lambda output, target: output.mean(), data)
    assert estimate_trace(Operator.of_hessian(linear), draws=6, estimator="hutch++").value == 0
