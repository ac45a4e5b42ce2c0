"""Eigenvalues against the full Hessian, scipy and closed forms; repeated and negative ones, and invalid requests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedflat.errors import UserError
from fedflat.flatness import Ends, Largest, Objective, Operator, Spectrum, lanczos, power, spectrum_of

from .networks import NETWORKS, Quadratic, case, symmetric, true_hessian


def descending(matrix: torch.Tensor) -> torch.Tensor:
    return torch.linalg.eigvalsh(matrix).flip(0)


def by_magnitude(values: torch.Tensor) -> torch.Tensor:
    return values[values.abs().argsort(descending=True)]


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_to_six_digits(name: str) -> None:
    truth = descending(true_hessian(name))
    found = lanczos(Operator.of_matrix(true_hessian(name)), Ends(10, 2), tolerance=1e-6)
    expected = torch.cat([truth[:10], truth[-2:]])
    assert found.converged and (found.values - expected).abs().max() < 1e-6 * truth[0]
    torch.testing.assert_close(found.values, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", ["mlp", "batch norm"])
def test_networks_by_magnitude_against_scipy(name: str) -> None:
    from scipy.sparse.linalg import LinearOperator, eigsh

    objective = case(name).objective(24)

    def product(v: np.ndarray) -> np.ndarray:
        return objective.hessian_product(None, torch.from_numpy(v.ravel())).numpy()

    oracle = eigsh(
        LinearOperator((objective.size,) * 2, matvec=product, dtype=np.float64),
        k=6,
        which="LM",
        return_eigenvectors=False,
    )
    found = lanczos(Operator.of_hessian(objective), Largest(6), tolerance=1e-8)
    torch.testing.assert_close(found.values, by_magnitude(torch.from_numpy(oracle)), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_eigenvectors_and_residuals_are_consistent(dtype: torch.dtype) -> None:
    matrix = symmetric(torch.linspace(-1, 1, 300) ** 3 * 5).to(dtype)
    found = lanczos(Operator.of_matrix(matrix), Ends(8, 3), tolerance=1e-4)
    overlaps = found.vectors @ found.vectors.T
    torch.testing.assert_close(overlaps, torch.eye(11, dtype=dtype), rtol=0, atol=1e-5)
    residuals = (found.vectors @ matrix - found.values[:, None].to(dtype) * found.vectors).norm(dim=1).double()
    assert (residuals <= 2 * found.residuals + 1e-5).all() and (residuals <= 2e-4 * found.values.abs() + 1e-5).all()


@pytest.mark.parametrize("size", [1, 2, 5, 12])
def test_all_eigenvalues_of_a_small_matrix(size: int) -> None:
    matrix = symmetric(torch.linspace(-2, 3, size), seed=size)
    for wanted in (Ends(size), Largest(size)):
        found = lanczos(Operator.of_matrix(matrix), wanted)
        order = descending(matrix) if isinstance(wanted, Ends) else by_magnitude(descending(matrix))
        torch.testing.assert_close(found.values, order, rtol=1e-10, atol=1e-12)
        assert found.converged and found.products == size and found.residuals.max() < 1e-9


def test_a_small_basis_restarts_and_finds_the_same_values() -> None:
    values = torch.cat([torch.linspace(1, 2, 20), 0.9 * torch.rand(380, generator=torch.Generator().manual_seed(0))])
    matrix = symmetric(values)
    wide, narrow = (lanczos(Operator.of_matrix(matrix), Ends(5), tolerance=1e-8, room=room) for room in (400, 14))
    torch.testing.assert_close(wide.values, narrow.values, rtol=1e-9, atol=0)
    assert narrow.converged and narrow.products > wide.products


def test_too_few_products_are_reported_as_not_converged() -> None:
    matrix = symmetric(torch.linspace(0, 1, 200))
    found = lanczos(Operator.of_matrix(matrix), Ends(5), tolerance=1e-10, max_products=20)
    assert not found.converged and found.products == 20
    assert (found.values <= 1 + 1e-12).all() and found.residuals.max() > 1e-6


def test_the_seed_does_not_change_the_result() -> None:
    matrix, seen = symmetric(torch.linspace(-1, 2, 150) ** 3), []
    one, again, other = (lanczos(Operator.of_matrix(matrix), Ends(3), tolerance=1e-9, seed=seed) for seed in (0, 0, 5))
    assert one.values.equal(again.values) and one.vectors.equal(again.vectors)
    assert not one.vectors.equal(other.vectors)
    torch.testing.assert_close(one.values, other.values)
    lanczos(Operator.of_matrix(matrix), Ends(3), progress=lambda products, found: seen.append((products, found)))
    assert seen[-1][1] == 3 and [products for products, _ in seen] == sorted({products for products, _ in seen})


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_threefold_eigenvalue_is_found_three_times(dtype: torch.dtype) -> None:
    bulk = 0.2 * torch.rand(300, generator=torch.Generator().manual_seed(1))
    values = torch.cat([torch.tensor([9.0, 6.0, 6.0, 6.0, 4.0, 2.0, 2.0, 1.0]), bulk])
    found = lanczos(Operator.of_matrix(symmetric(values).to(dtype)), Ends(8))
    torch.testing.assert_close(found.values, values[:8].double(), rtol=1e-5, atol=0)
    assert found.converged


def test_one_starting_vector_finds_a_repeated_eigenvalue_once() -> None:
    from fedflat.flatness.curvature.krylov import Krylov

    values = torch.tensor([9.0, 6.0, 6.0, 6.0, 4.0, 1.0] + 100 * [0.0])
    space = Krylov(Operator.of_matrix(symmetric(values)), 20)
    for _ in range(5):  # as many as there are different eigenvalues
        space.step()
    assert (abs(space.ritz().values - 6) < 1e-9).sum() == 1


@pytest.mark.parametrize(("tolerance", "seeds"), [(1e-2, (6, 7, 27, 28, 33)), (1e-3, (4, 6, 27, 47, 51))])
def test_no_eigenvalue_of_multiplicity_five_is_missed(tolerance: float, seeds: tuple[int, ...]) -> None:
    for seed in seeds:
        drawn = torch.randn(40, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        values = drawn.sort(descending=True).values.repeat_interleave(5)
        found = lanczos(Operator(values.mul, 200, torch.float64), Ends(7), tolerance=tolerance, seed=seed)
        assert found.converged
        torch.testing.assert_close(found.values, values[:7], rtol=tolerance, atol=0)


def test_checking_for_repeated_eigenvalues_is_cheap_on_a_dense_spectrum() -> None:
    values = torch.cat(
        [
            torch.logspace(1, 0.3, 30),
            2 - 0.005 * torch.arange(1, 400),
            0.01 * torch.randn(3571, generator=torch.Generator().manual_seed(0)),
        ]
    ).double()
    found = lanczos(Operator(values.mul, 4000, torch.float64), Ends(50, 1))
    assert found.converged and found.products <= 390
    torch.testing.assert_close(found.values[:50], values[:50].sort(descending=True).values, rtol=1e-3, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_matrix_of_low_rank_ends_the_search_in_any_precision(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    data = (torch.randn(4, 60, dtype=dtype), torch.tensor([0, 1, 2, 0]))
    objective = Objective(torch.nn.Linear(60, 3).to(dtype), torch.nn.functional.cross_entropy, data)
    found = lanczos(Operator.of_hessian(objective), Ends(10))
    assert found.converged and found.products == 20 and found.values[8:].abs().max() < 1e-6 * found.values[0]


@settings(max_examples=25)
@given(
    distinct=st.lists(st.integers(2, 40), min_size=1, max_size=4, unique=True),
    copies=st.lists(st.integers(1, 4), min_size=4, max_size=4),
    negative=st.integers(0, 3),
    seed=st.integers(0, 99),
)
def test_any_multiplicities(distinct: list[int], copies: list[int], negative: int, seed: int) -> None:
    top = [float(value) for value, times in zip(distinct, copies, strict=False) for _ in range(times)]
    bulk = torch.rand(60, generator=torch.Generator().manual_seed(seed)) - 0.5
    values = torch.cat([torch.tensor(top + negative * [-30.0]), bulk])
    matrix = symmetric(values, seed)
    truth = descending(matrix)
    found = lanczos(Operator.of_matrix(matrix), Ends(len(top), negative + 1), tolerance=1e-6, seed=seed)
    expected = torch.cat([truth[: len(top)], truth[-negative - 1 :]])
    torch.testing.assert_close(found.values, expected, rtol=1e-6, atol=1e-6)


def test_the_identity_repeats_its_eigenvalue_as_often_as_requested() -> None:
    found = lanczos(Operator.of_matrix(2 * torch.eye(40).double()), Ends(6, 1))
    torch.testing.assert_close(found.values, torch.full((7,), 2.0).double())


def test_zero_has_no_curvature() -> None:
    found = lanczos(Operator.of_matrix(torch.zeros(30, 30)), Ends(4, 1))
    assert found.converged and found.values.abs().max() == 0


def test_negative_curvature_is_reported_as_such() -> None:
    values = torch.cat([torch.tensor([5.0, 3.0, -8.0, -4.0]), torch.linspace(0, 0.1, 100)])
    matrix = symmetric(values)
    ends = lanczos(Operator.of_matrix(matrix), Ends(2, 2), tolerance=1e-8).values
    magnitude = lanczos(Operator.of_matrix(matrix), Largest(4), tolerance=1e-8).values
    torch.testing.assert_close(ends, torch.tensor([5.0, 3.0, -4.0, -8.0]).double())
    torch.testing.assert_close(magnitude, torch.tensor([-8.0, 5.0, -4.0, 3.0]).double())


def test_power_iteration_with_separated_eigenvalues() -> None:
    values = torch.cat([torch.tensor([100.0, -50.0, 20.0, 8.0]), torch.linspace(0, 0.1, 60)])
    found = power(Operator.of_matrix(symmetric(values)), 4, iterations=60, change=1e-12)
    torch.testing.assert_close(found.values, torch.tensor([100.0, -50.0, 20.0, 8.0]).double(), rtol=1e-6, atol=0)
    assert found.converged and found.products <= 240


def test_twenty_iterations_rarely_converge_and_report_it() -> None:
    matrix = symmetric(torch.linspace(0, 1, 200))
    found = power(Operator.of_matrix(matrix), 5)
    residuals = (found.vectors @ matrix - found.values[:, None] * found.vectors).norm(dim=1)
    torch.testing.assert_close(residuals[0], found.residuals[0], rtol=1e-6, atol=1e-9)
    assert found.products <= 100 and not found.converged
    assert (found.values <= 1).all() and found.residuals.max() > 1e-3


def test_residuals_of_power_iteration_do_not_cancel_in_float32() -> None:
    matrix = torch.diag(torch.tensor([1.0, 0.3, 0.2]))
    found = power(Operator.of_matrix(matrix), 1, iterations=10, change=0.0)
    vector = found.vectors[0].double()
    true = (matrix.double() @ vector - (vector @ matrix.double() @ vector) * vector).norm()
    torch.testing.assert_close(found.residuals[0], true, rtol=0.05, atol=0)


def test_power_iteration_of_zero() -> None:
    found = power(Operator.of_matrix(torch.zeros(5, 5)), 2)
    assert found.values.tolist() == [0, 0] and found.products == 2


@pytest.mark.parametrize(
    ("wanted", "options", "sentence"),
    [
        (Ends(4), {}, "4 eigenvalues .* 3 parameters"),
        (Ends(0), {}, "at least 1"),
        (Ends(1), {"tolerance": 0.0}, "tolerance=0"),
    ],
)
def test_impossible_requests(wanted: Ends, options: dict, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        lanczos(Operator.of_matrix(torch.eye(3)), wanted, **options)


def test_too_small_bases_and_non_finite_products_are_rejected() -> None:
    with pytest.raises(UserError, match=r"room=5 .* at least 8"):
        lanczos(Operator.of_matrix(torch.eye(30)), Ends(4), room=5)
    with pytest.raises(UserError, match="not finite"):
        lanczos(Operator.of_matrix(torch.full((3, 3), float("inf"))), Ends(1))
    with pytest.raises(UserError, match="iterations=0"):
        power(Operator.of_matrix(torch.eye(3)), 1, iterations=0)
    with pytest.raises(UserError, match=r"4 eigenvalues .* 3 parameters"):
        power(Operator.of_matrix(torch.eye(3)), 4)


def diagonal(values: torch.Tensor, dtype: torch.dtype = torch.float64) -> Operator:
    return Operator.of_matrix(symmetric(values).to(dtype))


def test_a_smallest_eigenvalue_near_zero_does_not_delay_convergence() -> None:
    """Its tolerance is relative to lambda_max; relative to itself it would need hundreds of products."""
    values = torch.cat([torch.tensor([10.0]), torch.linspace(1e-7, 0.1, 299)])
    found = lanczos(diagonal(values), Ends(1, 1))
    assert found.converged and found.products <= 25
    assert found.values.tolist() == pytest.approx([10.0, 0.0], abs=10 * 1e-3)
    assert (found.values - torch.tensor([10.0, 1e-7])).abs().le(found.residuals + 1e-14).all()


def test_eigenvalues_below_the_rounding_error_of_an_outlier_have_not_converged() -> None:
    values = torch.cat([torch.tensor([1e6, 5.0, 3.0]), torch.linspace(-1, 1, 297)])
    single, double = (lanczos(diagonal(values, dtype), Ends(3)) for dtype in (torch.float32, torch.float64))
    assert not single.converged and double.converged
    assert double.values.tolist() == pytest.approx([1e6, 5, 3], rel=1e-3)
    assert (single.values[:2] - double.values[:2]).abs().le(single.residuals[:2]).all()
    assert lanczos(diagonal(values, torch.float32), Ends(1)).converged  # the outlier itself is accurate


def spectrum_on(values: torch.Tensor, count: int, dtype: torch.dtype = torch.float64, **options: Any) -> Spectrum:
    matrix, zeros = symmetric(values).to(dtype), torch.zeros(len(values), dtype=dtype)
    return spectrum_of(Quadratic(matrix, zeros, zeros).objective(), count, trace_draws=0, **options)


@pytest.mark.parametrize("method", ["lanczos", "power"])
@pytest.mark.parametrize(("by", "values"), [("value", [3.0, 1.0, -8.0]), ("magnitude", [-8.0, 3.0, 1.0])])
def test_eigenvalues_are_ordered_by_value_or_by_magnitude(method: str, by: str, values: list[float]) -> None:
    found = spectrum_on(torch.tensor(values), 3, method=method, by=by, iterations=200)
    assert found.eigenvalues == pytest.approx(values, abs=1e-3)


def test_lambda_min_can_be_skipped() -> None:
    values = torch.cat([torch.tensor([10.0]), torch.linspace(-1, 1, 99)])
    with_smallest, without = (spectrum_on(values, 1, lambda_min=wanted) for wanted in (True, False))
    assert without.lambda_min is None and without.lambda_min_residual is None and without.converged
    assert with_smallest.lambda_min == pytest.approx(-1, rel=1e-3) and with_smallest.negative == 1
    assert without.products < with_smallest.products and without.lambda_max == pytest.approx(10)


def test_a_negative_eigenvalue_is_not_lambda_max() -> None:
    """By magnitude, -9 is first, and nothing is known about the largest eigenvalue until a positive one appears."""
    values = torch.cat([torch.tensor([-9.0, 4.0, -3.0]), torch.linspace(-0.1, 1, 47)])
    for method in ("lanczos", "power"):
        one, two = (spectrum_on(values, count, by="magnitude", method=method, iterations=200) for count in (1, 2))
        assert (
            one.eigenvalues[0] == pytest.approx(-9, rel=1e-3)
            and one.lambda_max is None
            and "lambda_max" not in repr(one)
        )
        assert two.lambda_max == pytest.approx(4, rel=1e-3)
    five = spectrum_on(values, 5, by="magnitude")
    assert five.ratio is None  # -9 and -3 are among the five
    assert "unknown" in one.plot().legends[0].get_texts()[0].get_text()
    assert spectrum_on(torch.tensor([-1.0, -2.0]), 2, by="magnitude").lambda_max == pytest.approx(-1)


def test_the_message_names_the_eigenvalue_that_has_not_converged() -> None:
    values = torch.cat([torch.tensor([1e6, 5.0]), torch.linspace(0, 1e-3, 98)])
    found = spectrum_on(values, 2, torch.float32)
    assert not found.converged and found.unconverged.startswith("lambda_2 = ")
    assert replace(found, lambda_min=-1e-3).negative == 0  # within its residual of 0.1
    assert replace(found, lambda_min=-1.0).negative == 1
    assert "converged=no: lambda_2" in repr(found) and spectrum_on(values, 1).unconverged == ""
