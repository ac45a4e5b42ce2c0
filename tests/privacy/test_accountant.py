"""Epsilon against known values, and its monotonicity.

Reference values are from dp_accounting 0.6.0 (module ``rdp_privacy_accountant``). Its noise multiplier is relative to
the sensitivity, so it is half of ours. For orders above 256 it computes the bound of Theorem 9 as we do; for orders up
to 256 it uses a strengthened bound (Theorem 27), which ours must not undercut.
"""

from __future__ import annotations

from math import inf, log

import numpy as np
import pytest

from fedflat.privacy import Accountant, accountant, noise_for, privacy_spec


@pytest.mark.parametrize(("noise", "rounds"), [(4.0, 1), (10.0, 100), (50.0, 3)])
def test_full_participation_is_the_gaussian_mechanism(noise: float, rounds: int) -> None:
    """The bound with rho = 2 rounds / noise^2, minimised on a fine grid of orders."""
    a = 1 + np.geomspace(1e-3, 1e4, 200_000)
    rho = 2 * rounds / noise**2
    exact = float(np.min(rho * a + np.log((a - 1) / a) - (log(1e-5) + np.log(a)) / (a - 1)))
    epsilon = Accountant(delta=1e-5, sampling_rate=1.0).epsilon(noise, rounds)
    assert exact <= epsilon <= 1.002 * exact


@pytest.mark.parametrize(("noise", "rounds", "reference"), [(4.0, 1, 2.165716), (10.0, 100, 10.724825)])
def test_full_participation_agrees_with_dp_accounting(noise: float, rounds: int, reference: float) -> None:
    assert Accountant(1e-5, 1.0).epsilon(noise, rounds) == pytest.approx(reference, rel=2e-3)


@pytest.mark.parametrize(
    ("rate", "noise", "order", "reference"),
    [(0.1, 8.0, 300, 2113.042642), (0.02, 20.0, 300, 6.763556939), (0.01, 30.0, 400, 4.454626750)],
)
def test_theorem_9_at_high_orders(
    rate: float, noise: float, order: int, reference: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """(a - 1) e(a) of one round."""
    monkeypatch.setattr(accountant, "MAX_AMPLIFIED_ORDER", order)
    monkeypatch.setattr(accountant, "ORDERS", np.array([float(order)]))
    accountant._log_binomials.cache_clear()
    assert accountant._with_secret_cohorts(noise, rate)[0] == pytest.approx(reference, rel=1e-9)
    accountant._log_binomials.cache_clear()


@pytest.mark.parametrize(
    ("rate", "noise", "rounds", "strengthened", "expected"),
    [
        (0.01, 2.0, 1000, 3.576111482, 3.576111482),
        (0.1, 2.0, 100, 14.05375023, 14.05375023),
        (0.1, 4.0, 100, 5.379009696, 5.8378544),
        (0.1, 8.0, 100, 2.294113991, 3.506144171),
    ],
)
def test_secret_cohorts(rate: float, noise: float, rounds: int, strengthened: float, expected: float) -> None:
    epsilon = Accountant(1e-5, rate).epsilon(noise, rounds)
    assert epsilon == pytest.approx(expected, rel=1e-3) and epsilon >= strengthened * (1 - 1e-3)


def test_known_cohorts_by_hand() -> None:
    """One round at order 2 with sigma = 2: e(2) = 1, and half of the clients."""
    divergences = Accountant(1e-5, 0.5, has_secret_cohorts=False).divergences(2.0)
    assert divergences[accountant.ORDERS == 2.0] == pytest.approx(log(0.5 + 0.5 * np.e))


@pytest.mark.parametrize("is_secret", [True, False])
def test_epsilon_is_monotone(is_secret: bool) -> None:
    """It grows with rounds, sampling rate, 1 / noise and 1 / delta; knowing the cohorts never helps clients."""

    def epsilon(noise: float = 3.0, rounds: int = 50, rate: float = 0.1, delta: float = 1e-5) -> float:
        return Accountant(delta, rate, is_secret).epsilon(noise, rounds)

    assert epsilon(rounds=0) == 0 < epsilon(rounds=1) < epsilon() < epsilon(rounds=51)
    assert epsilon(rate=0.05) < epsilon() < epsilon(rate=0.2) < epsilon(rate=0.99) <= epsilon(rate=1.0)
    assert epsilon(noise=3.1) < epsilon() < epsilon(noise=2.9)
    assert epsilon(delta=1e-4) < epsilon() < epsilon(delta=1e-6)
    assert Accountant(1e-5, 0.1).epsilon(3.0, 50) <= epsilon()
    assert np.isfinite(epsilon(noise=0.01))


@pytest.mark.parametrize("target", [0.5, 8.0, 300.0])
def test_the_chosen_noise_is_the_smallest(target: float) -> None:
    chosen = Accountant(1e-6, 0.05)
    noise = noise_for(chosen, target, rounds=200)
    assert chosen.epsilon(noise, 200) <= target < chosen.epsilon(noise - 2e-4, 200)
    assert noise_for(chosen, 1e-6, 200) == inf


def test_local_privacy_counts_every_round() -> None:
    """A client need not trust the server to choose cohorts at random."""
    central, local = (
        privacy_spec(f"{name}(noise=5)").mechanism(0.1, 100, keeps_state=False, is_secure=False)
        for name in ("dp", "local-dp")
    )
    assert local.epsilon(100) == Accountant(1e-5, 1.0).epsilon(5.0, 100) > central.epsilon(100)
