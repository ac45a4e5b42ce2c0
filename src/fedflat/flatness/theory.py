"""Theorem 5.1 of Liu et al. 2025 (FedSWA, FedMoSWA) and Theorem I.3 (FedSAM), evaluated on measured constants.

The generalisation error of T rounds of K local steps on m clients with n examples each is at most

    (2 L / (m n beta)) e^(1 + 1/T) (c L + c sigma_g + c sigma)      FedSAM with c = c-bar, FedSWA with c = c-tilde
    (2 L / (m n beta)) e^(1 + 1/T) (c L +   sigma_g + c sigma)      FedMoSWA with c = c-tilde

with c = 1 + (2 + 1/(K T))^(K-1) / T, provided that every client participates in every round, alpha = 1, option I, and
learning rates of at most 1 / (beta K T). The paper states c-bar > c-tilde because FedSWA's learning rate decays
within a round. At the largest allowed learning rate, however, both equal the c above. FedSAM and FedSWA therefore
differ only in ``run_bound``, which uses the learning rates of a run. With mu-strong convexity (Theorems E.3 and F.3),
e^(1 + 1/T) becomes e^(1 - mu / ((beta + mu) T)) and c becomes b = 1 + (mu / ((beta + mu) K))^(K-1) / T.

The factor (2 + 1/(K T))^(K-1) comes from a step of the proof (Lemma E.4) that bounds products of (1 + beta eta) <= c
by powers of 1 + c. Powers of c suffice, which gives c = 1 + (1 + 1/(K T))^(K-1) / T <= 1 + e^(1/T) / T. The option
``tight`` uses this smaller c. It is our improvement, not the paper's, and needs the same conditions.

The proof of Theorem I.3 (FedSAM, eqs. 103 and 107) takes gradient steps at the unperturbed model, i.e. those of
FedAvg. Its bound does not depend on rho.

Bounds can exceed the largest float, so everything is computed in logarithms.

The theorems use suprema over all models and examples as constants. The L here is a maximum over the measured models
and examples, hence a lower bound. sigma and sigma_g are estimated from samples of examples and clients, so they can be
too small or too large. beta is that of the mean loss, which is at most the theorem's beta, that of the loss of every
single example, and often far smaller. The largest allowed learning rate 1 / (beta K T) is therefore too large.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fedflat.errors import UserError

ALGORITHMS = ("fedsam", "fedswa", "fedmoswa")
"""Algorithms with a stated bound."""


@dataclass(frozen=True)
class Constants:
    """L, beta, sigma and sigma_g of Liu et al. 2025, Assumptions 2 to 5, and mu of Assumption 1 (strong convexity)."""

    lipschitz: float
    """L: the largest ||grad l(theta; z)|| of a single example."""
    smoothness: float
    """beta: the largest eigenvalue of the Hessian of the mean loss; at most that of the loss of a single example."""
    noise: float
    """sigma: the largest (E_z ||grad l(theta; z) - grad F_i(theta)||^2)^(1/2) of a client, estimated on a sample."""
    heterogeneity: float
    """sigma_g: 1/m sum_i ||grad F_i(theta) - grad F(theta)||, estimated on a sample of clients."""
    convexity: float | None = None
    """mu, if known to be positive."""

    def known(self) -> dict[str, float]:
        """Return the known constants, by name."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def largest_constants(of_models: Sequence[Constants]) -> Constants:
    """Return the constants of a run from those of its models: the largest of each, and the smallest convexity mu.

    These are the worst cases. mu is known for all models or for none.
    """
    if not of_models:
        raise ValueError("no constants given")
    known_mu = [constants.convexity for constants in of_models if constants.convexity is not None]
    return Constants(
        lipschitz=max(constants.lipschitz for constants in of_models),
        smoothness=max(constants.smoothness for constants in of_models),
        noise=max(constants.noise for constants in of_models),
        heterogeneity=max(constants.heterogeneity for constants in of_models),
        convexity=None if of_models[0].convexity is None else min(known_mu),
    )


class GradientSpread:
    """Running statistics of per-example gradients: largest norm, and mean squared distance from a centre."""

    def __init__(self, centre: Tensor) -> None:
        """Start without gradients; distances are measured from ``centre`` [P]."""
        self.centre = centre
        self.count = 0
        self._squared_distances = torch.zeros((), dtype=torch.float64, device=centre.device)
        self._largest_norm = torch.zeros((), dtype=torch.float64, device=centre.device)

    def add(self, gradient: Tensor) -> None:
        """Add the gradient of one example, [P]."""
        self.count += 1
        self._squared_distances += torch.dist(gradient, self.centre).double() ** 2
        self._largest_norm = torch.maximum(self._largest_norm, gradient.norm().double())

    @property
    def noise(self) -> float:
        """(mean ||g_z - centre||^2)^(1/2); the client's sigma if the centre is its full gradient."""
        return float((self._squared_distances / max(self.count, 1)).sqrt())

    @property
    def largest_norm(self) -> float:
        """The largest ||g_z||."""
        return float(self._largest_norm)


def heterogeneity(rows: Tensor) -> float:
    """Return sigma_g = 1/m sum_i ||grad F_i - grad F||, with F the unweighted mean over clients (Assumption 5).

    ``rows`` [clients, P] holds the gradients of the clients' losses F_i.

    >>> heterogeneity(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]))
    1.0
    """
    mean = rows.mean(0)
    return float(torch.stack([torch.dist(row, mean) for row in rows]).mean())


@dataclass(frozen=True)
class FederationSize:
    """m clients with n examples each, K local steps, T rounds."""

    clients: int
    examples: float
    steps: float
    rounds: int

    def __post_init__(self) -> None:
        if self.clients < 1 or self.examples <= 0 or self.steps < 1 or self.rounds < 1:
            raise UserError(f"{self} is invalid; expected at least one client, example, step and round")


class GeneralisationBound(NamedTuple):
    """A bound on the generalisation error, as a logarithm."""

    log10: float
    """log10 of the bound."""
    factor: float
    """log10 of the factor c (or b) in front of L and sigma."""

    @property
    def value(self) -> float:
        """The bound itself; infinite if it exceeds 1e300."""
        return 10.0**self.log10 if self.log10 < 300 else math.inf

    def is_vacuous(self, trivial: float) -> bool:
        """Whether the bound is at least ``trivial``, e.g. the loss of random guessing."""
        return self.log10 >= math.log10(trivial)


class RoundLearningRates(NamedTuple):
    """The local learning rates of one round."""

    total: float
    """Sum over the local steps."""
    highest: float
    """The largest learning rate of a local step."""


def largest_lr(constants: Constants, setting: FederationSize) -> float:
    """Return 1 / (beta K T), the largest local learning rate that the theorem allows.

    beta is the smoothness, K the number of local steps and T the number of rounds.
    """
    return 1 / (constants.smoothness * setting.steps * setting.rounds)


def theorem_bound(
    algorithm: str, constants: Constants, setting: FederationSize, tight: bool = False
) -> GeneralisationBound:
    """Return the bound of Liu et al. 2025 on the generalisation error, at the learning rates that the theorem assumes.

    The bound is the strongly convex one if the convexity mu is known, else the non-convex one. It is
    (2 L / (m n beta)) e^exponent (c L + c sigma_g + c sigma) with c = 1 + base^(K-1) / T; for FedMoSWA, sigma_g has no
    factor c.

    Args:
        algorithm: one of ``ALGORITHMS``.
        constants: Lipschitz constant L, smoothness beta, gradient noise sigma, heterogeneity sigma_g, convexity mu.
        setting: m clients with n examples each, K local steps, T rounds.
        tight: whether to use the base 1 + 1/(K T), which is all that the paper's proof requires, instead of the
            published 2 + 1/(K T) (non-convex only).
    """
    _check(algorithm, constants)
    K, T, mu, beta = setting.steps, setting.rounds, constants.convexity, constants.smoothness
    if mu:
        base, exponent = mu / ((beta + mu) * K), 1 - mu / ((beta + mu) * T)
    else:
        base, exponent = (1 if tight else 2) + 1 / (K * T), 1 + 1 / T
    log_factor = _log_one_plus((K - 1) * math.log(base) - math.log(T))
    log_scale = exponent - math.log(beta)  # log(e^exponent / beta)
    return _bound(algorithm, constants, setting, log_factor, log_scale)


def run_bound(
    algorithm: str,
    constants: Constants,
    setting: FederationSize,
    rounds: Sequence[RoundLearningRates],
    tight: bool = False,
) -> GeneralisationBound:
    """Return the bound of Liu et al. 2025 with a run's learning rates instead of the theorem's (eqs. 31 and 54).

    The generalisation error is at most

        (2 L / (m n)) sum_t exp(beta sum_(l>t) h_l) h_t e^(beta h_t) (c_t L + c_t sigma_g + c_t sigma),

    where h_t is the sum of the learning rates of round t and eta_t the largest one, c_t = 1 + (1 + c)^(K-1) beta h_t
    and c = 1 + beta eta_t; for FedMoSWA, sigma_g has no factor c_t. The ``factor`` of the bound is the largest c_t.
    All computations are in logarithms, because the terms can exceed the largest float.

    Args:
        algorithm: one of ``ALGORITHMS``.
        constants: Lipschitz constant L, smoothness beta, gradient noise sigma, heterogeneity sigma_g.
        setting: m clients with n examples each, K local steps, T rounds.
        rounds: the learning rates of every round, in order.
        tight: whether to use powers of c instead of 1 + c, which tightens a step of the paper's proof.
    """
    _check(algorithm, constants)
    beta = constants.smoothness
    log_terms, largest_log_factor = [], 0.0  # of the sum over t, and log of the largest c_t
    exponent = 0.0  # beta (h_t + the sum of all later h_l)
    for rates in reversed(rounds):  # backwards, because the exponent of a round sums over later rounds
        h, eta = rates.total, rates.highest
        if not h:  # no client moved, so the round's term is 0
            continue
        c = 1 + beta * eta
        log_power = (setting.steps - 1) * math.log(c if tight else 1 + c)
        log_factor = _log_one_plus(log_power + math.log(beta * h))  # log c_t
        largest_log_factor = max(largest_log_factor, log_factor)
        exponent += beta * h
        term = _bound(algorithm, constants, setting, log_factor, exponent + math.log(h))
        log_terms.append(term.log10 * math.log(10))
    log_total = _log_sum(log_terms) if log_terms else -math.inf
    return GeneralisationBound(log_total / math.log(10), largest_log_factor / math.log(10))


def _bound(
    algorithm: str, constants: Constants, setting: FederationSize, log_factor: float, log_scale: float
) -> GeneralisationBound:
    """Return (2 L / (m n)) e^log_scale (c L + c sigma_g + c sigma); FedMoSWA has sigma_g without the factor c.

    Everything is computed in logarithms, because bounds can exceed the largest float.

    Args:
        algorithm: one of ``ALGORITHMS``.
        constants: Lipschitz constant L, gradient noise sigma, heterogeneity sigma_g.
        setting: m clients with n examples each.
        log_factor: log c.
        log_scale: logarithm of all remaining factors.
    """
    L, sigma, sigma_g = constants.lipschitz, constants.noise, constants.heterogeneity
    if algorithm == "fedmoswa":
        log_bracket_terms = [log_factor + math.log(L + sigma)]
        if sigma_g > 0:  # log 0 is undefined, and the term is then 0
            log_bracket_terms.append(math.log(sigma_g))
    else:
        log_bracket_terms = [log_factor + math.log(L + sigma + sigma_g)]
    log_bound = math.log(2 * L / (setting.clients * setting.examples)) + log_scale + _log_sum(log_bracket_terms)
    return GeneralisationBound(log_bound / math.log(10), log_factor / math.log(10))


def _check(algorithm: str, constants: Constants) -> None:
    """Raise a ``UserError`` for an algorithm without a bound or constants that make it undefined."""
    if algorithm not in ALGORITHMS:
        raise UserError(f"no bound is known for {algorithm}; expected one of {', '.join(ALGORITHMS)}")
    if not constants.lipschitz > 0 or not constants.smoothness > 0:
        raise UserError(
            f"the bounds need L > 0 and beta > 0, got L={constants.lipschitz:g}, beta={constants.smoothness:g}; "
            "use a model with a non-zero gradient"
        )


def _log_one_plus(log: float) -> float:
    """Return log(1 + e^log) without overflow."""
    return log + math.log1p(math.exp(-log)) if log > 0 else math.log1p(math.exp(log))


def _log_sum(logs: Sequence[float]) -> float:
    """Return log(sum(exp(logs))) without overflow."""
    largest = max(logs)
    return largest + math.log(sum(math.exp(log - largest) for log in logs))
