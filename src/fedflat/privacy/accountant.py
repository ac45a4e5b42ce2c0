"""The privacy accountant: epsilon of the Gaussian mechanism over the rounds of a run, by Renyi differential privacy.

Adjacency: two federations are neighbours if they differ in all data of one client; the number N of clients is equal.
Sensitivity: every client's message is clipped to norm C. Replacing one of the m clients of a cohort therefore moves
their mean by at most 2 C / m. The noise of the mean has standard deviation sigma C / m, where sigma is the noise
multiplier. With local privacy, the same holds for a single message and m = 1.

One round without sampling has Renyi divergence

    e(a) = a (2 C)^2 / (2 sigma^2 C^2) = 2 a / sigma^2

at order a. A cohort of m clients that is drawn uniformly without replacement has the sampling rate q = m / N. Two
bounds hold for it. The first also covers observers who know every cohort, and clients that keep state:

    (a - 1) e_1(a) = log(1 - q + q exp((a - 1) e(a)))

The second needs cohorts that stay secret and clients without state, because it bounds a mixture over the cohorts
(Wang, Balle and Kasiviswanathan 2019, Theorem 9, for integer orders a; Corollary 10 interpolates between them):

    (a - 1) e_2(a) = log(1 + q^2 binom(a, 2) min(4 (exp(e(2)) - 1), 2 exp(e(2)))
                           + 2 sum_{j=3}^a q^j binom(a, j) exp((j - 1) e(j)))

Divergences add up over rounds. Epsilon is the minimum over the orders a of (Canonne, Kamath and Steinke 2020)

    e(a) + log((a - 1) / a) - (log(delta) + log(a)) / (a - 1)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil, expm1, inf, log, sqrt

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
MAX_AMPLIFIED_ORDER = 256
"""Largest order at which amplification by secret cohorts is computed."""
ORDERS = np.unique(
    np.concatenate([1 + np.geomspace(0.01, 15, 150), np.arange(2, MAX_AMPLIFIED_ORDER + 1), 2.0 ** np.arange(9, 15)])
)
"""Orders of the Renyi divergence over which epsilon is minimised, between 1.01 and 16384."""
SMALLEST_NOISE, LARGEST_NOISE = 1e-2, 1e5
"""Noise multipliers between which ``noise_for`` searches."""
NOISE_STEPS = 10_000
"""``noise_for`` rounds up to multiples of 1 / NOISE_STEPS, so that every machine finds the same number."""


@dataclass(frozen=True)
class Accountant:
    """Computes epsilon after any number of rounds.

    Args:
        delta: additive slack of (epsilon, delta)-differential privacy.
        sampling_rate: cohort size divided by the number of clients; 1 if every client may take part in every round.
        has_secret_cohorts: whether observers do not know the cohorts, and clients keep no state between rounds.

    >>> round(Accountant(delta=1e-5, sampling_rate=0.1).epsilon(noise_multiplier=4.0, rounds=100), 2)
    5.84
    """

    delta: float
    sampling_rate: float
    has_secret_cohorts: bool = True

    def epsilon(self, noise_multiplier: float, rounds: int) -> float:
        """Epsilon after a number of rounds, for a standard deviation of the noise in units of the clipping norm."""
        if rounds == 0:
            return 0.0
        divergence = rounds * self.divergences(noise_multiplier)
        bounds = divergence + np.log1p(-1 / ORDERS) - (log(self.delta) + np.log(ORDERS)) / (ORDERS - 1)
        return max(0.0, float(bounds.min()))

    def divergences(self, noise_multiplier: float) -> FloatArray:
        """Renyi divergence of one round at every order in ``ORDERS``."""
        q, scaled = self.sampling_rate, (ORDERS - 1) * ORDERS * 2 / noise_multiplier**2
        if q < 1:
            known = np.logaddexp(log(1 - q), log(q) + scaled)
            scaled = np.minimum(known, _with_secret_cohorts(noise_multiplier, q)) if self.has_secret_cohorts else known
        divergences: FloatArray = scaled / (ORDERS - 1)
        return divergences


def noise_for(accountant: Accountant, epsilon: float, rounds: int) -> float:
    """The smallest noise multiplier, up to rounding, with which ``rounds`` rounds cost at most ``epsilon``.

    Returns infinity if no multiplier below ``LARGEST_NOISE`` suffices.

    >>> accountant = Accountant(delta=1e-5, sampling_rate=0.1)
    >>> noise = noise_for(accountant, epsilon=8.0, rounds=100)
    >>> accountant.epsilon(noise, 100) <= 8.0 < accountant.epsilon(noise - 0.001, 100)
    True
    """
    low, high = SMALLEST_NOISE, LARGEST_NOISE
    if accountant.epsilon(high, rounds) > epsilon:
        return inf
    while high - low > 0.5 / NOISE_STEPS:
        middle = (low + high) / 2 if high < 2 * low else sqrt(low * high)
        low, high = (low, middle) if accountant.epsilon(middle, rounds) <= epsilon else (middle, high)
    return ceil(high * NOISE_STEPS) / NOISE_STEPS


def _with_secret_cohorts(noise_multiplier: float, q: float) -> FloatArray:
    """(a - 1) e_2(a) at every order in ``ORDERS``; infinite above ``MAX_AMPLIFIED_ORDER``."""
    j = np.arange(2, MAX_AMPLIFIED_ORDER + 1)
    # Logarithms of the factors of q^j binom(a, j), which do not depend on a.
    factors = log(2) + (j - 1) * j * 2 / noise_multiplier**2
    second = 2 * 2 / noise_multiplier**2  # e(2)
    factors[0] = min(log(4) + second + log(-expm1(-second)), factors[0])
    terms = _log_binomials() + j * log(q) + factors  # [a, j]
    bounds = np.logaddexp(0.0, np.logaddexp.reduce(terms, axis=1))
    # (a - 1) e(a) is convex in a and 0 at a = 1, so that linear interpolation is an upper bound.
    interpolated: FloatArray = np.interp(ORDERS, np.arange(1, MAX_AMPLIFIED_ORDER + 1), [0.0, *bounds], right=inf)
    return interpolated


@lru_cache(maxsize=1)
def _log_binomials() -> FloatArray:
    """log binom(a, j) for a and j from 2 to ``MAX_AMPLIFIED_ORDER`` [a, j]; -inf for j > a."""
    log_factorial = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, MAX_AMPLIFIED_ORDER + 1)))])
    a, j = np.meshgrid(*[np.arange(2, MAX_AMPLIFIED_ORDER + 1)] * 2, indexing="ij")
    binomials = log_factorial[a] - log_factorial[j] - log_factorial[np.maximum(a - j, 0)]
    table: FloatArray = np.where(j <= a, binomials, -inf)
    return table
