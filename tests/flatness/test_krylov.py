"""The basis that Lanczos grows: orthonormality, projection and residuals, through steps and restarts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedflat.flatness import Operator
from fedflat.flatness.curvature.krylov import Krylov

from .networks import symmetric

MATRIX = symmetric(torch.linspace(-1, 2, 60) ** 3)


def rows(space: Krylov) -> torch.Tensor:
    return space.to_full_space(np.eye(space.size))


def grown(steps: int, room: int = 30) -> Krylov:
    space = Krylov(Operator.of_matrix(MATRIX), room, seed=1)
    for _ in range(steps):
        space.step()
    return space


def check(space: Krylov) -> None:
    """Check that the basis is orthonormal, T = V H V', and residuals are exact."""
    basis = rows(space)
    torch.testing.assert_close(basis @ basis.T, torch.eye(space.size).double(), rtol=0, atol=1e-12)
    np.testing.assert_allclose((basis @ MATRIX @ basis.T).numpy(), space.projection, atol=1e-7)
    ritz = space.ritz()
    vectors = space.to_full_space(ritz.vectors)
    residuals = (vectors @ MATRIX - torch.from_numpy(ritz.values)[:, None] * vectors).norm(dim=1)
    np.testing.assert_allclose(residuals.numpy(), ritz.residuals, rtol=1e-6, atol=1e-7)


@settings(max_examples=15)
@given(first=st.integers(2, 30), keep=st.integers(1, 10), then=st.integers(0, 15))
def test_the_basis_stays_orthonormal_through_restarts(first: int, keep: int, then: int) -> None:
    space = grown(first)
    check(space)
    ritz = space.ritz()
    chosen = np.arange(first)[::-1][: min(keep, first - 1)]
    space.restart(ritz, chosen, from_random=False)
    assert space.size == len(chosen) and space.projection.diagonal() == pytest.approx(ritz.values[chosen])
    for _ in range(min(then, space.room - space.size)):
        space.step()
    if then:
        check(space)


@pytest.mark.parametrize(
    "values",
    [
        torch.logspace(0, -16, 300, dtype=torch.float64),
        torch.cat([torch.tensor([1e12, 1e6], dtype=torch.float64), torch.linspace(0, 1, 298, dtype=torch.float64)]),
        torch.cat(
            [torch.logspace(3, -3, 12, dtype=torch.float64), 1e-13 * torch.linspace(0, 1, 288, dtype=torch.float64)]
        ),
        1 + 1e-10 * torch.linspace(0, 1, 300, dtype=torch.float64),
        torch.arange(10, dtype=torch.float64).repeat_interleave(30),
    ],
    ids=["falling", "outliers", "low rank and noise", "nearly the identity", "repeated"],
)
def test_the_basis_is_orthonormal_however_ill_conditioned_the_matrix(values: torch.Tensor) -> None:
    space = Krylov(Operator(values.mul, 300, torch.float64), 100)
    for _ in range(3):
        while not space.is_full:
            space.step()
        torch.testing.assert_close(rows(space) @ rows(space).T, torch.eye(100).double(), rtol=0, atol=1e-12)
        space.restart(space.ritz(), np.arange(100)[::-1][:20], from_random=False)


def test_a_step_reads_the_basis_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    space = grown(10)
    monkeypatch.setattr(Krylov, "_orthonormalise", lambda self, row: pytest.fail("a third time"))
    space.step()
    check(space)


def test_a_restart_keeps_the_selected_ritz_values() -> None:
    space = grown(30)
    before = space.ritz()
    best = np.argsort(before.residuals)[:4]
    space.restart(before, best, from_random=False)
    space.step()
    after = space.ritz()
    for place in best:
        assert np.abs(after.values - before.values[place]).min() <= before.residuals[place] + 1e-12


def test_a_random_restart_is_orthogonal_and_inherits_residuals() -> None:
    space = grown(20)
    before = space.ritz()
    chosen = np.array([19, 18])
    space.restart(before, chosen, from_random=True)
    kept = rows(space)
    for _ in range(5):
        space.step()
    assert rows(space)[:2].equal(kept) and (kept @ rows(space)[2:].T).abs().max() < 1e-12
    assert (space.ritz().residuals >= space.ritz().reducible).all()
    assert space.ritz().residuals[-1] == pytest.approx(before.residuals[19], rel=0.5, abs=1e-9)


def test_a_complete_basis_is_exact() -> None:
    space = grown(60, room=100)
    assert space.is_complete and space.is_full and space.ritz().residuals.max() == 0
    np.testing.assert_allclose(space.ritz().values, torch.linalg.eigvalsh(MATRIX), atol=1e-12)


def test_the_basis_starts_from_a_given_vector() -> None:
    first = torch.arange(1.0, 61.0).double()
    space = Krylov(Operator.of_matrix(MATRIX), 3, first=first)
    space.step()
    torch.testing.assert_close(rows(space)[0], first / first.norm())
    assert space.projection[0, 0] == pytest.approx(float(first @ MATRIX @ first / first.norm() ** 2))


def test_an_invariant_subspace_is_detected_and_left() -> None:
    values, vectors = torch.linalg.eigh(MATRIX)
    space = Krylov(Operator.of_matrix(MATRIX), 5, first=vectors[:, -1])
    space.step()
    assert (
        space.is_invariant
        and space.ritz().values[0] == pytest.approx(float(values[-1]))
        and space.ritz().residuals[0] == 0
    )
    space.step()
    assert not space.is_invariant and space.size == 2
    check(space)
