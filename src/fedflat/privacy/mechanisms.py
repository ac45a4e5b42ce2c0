"""The mechanisms of differential privacy that ``federation.privacy`` can name."""

from __future__ import annotations

from dataclasses import dataclass
from math import isinf
from typing import Any, ClassVar

from fedflat.display import counted
from fedflat.errors import UserError
from fedflat.privacy.accountant import Accountant, noise_for
from fedflat.registry import Registry
from fedflat.text import make, param, parse_one


@dataclass(frozen=True)
class GaussianMechanism:
    """Clipping and noise of a run.

    Args:
        clip: largest l2 norm of a client's message, over all of its vectors.
        noise_multiplier: standard deviation of the noise, divided by ``clip``.
        is_local: whether each client adds the noise to its message, instead of the server to the mean of m messages,
            whose noise has a standard deviation of noise_multiplier * clip / m.
        is_secure: whether a cryptographically secure generator draws the noise, instead of the run's seed.
        accountant: computes epsilon.
        budget: epsilon that the run must not exceed, if any.
    """

    clip: float
    noise_multiplier: float
    is_local: bool
    is_secure: bool
    accountant: Accountant
    budget: float | None = None

    def epsilon(self, rounds: int) -> float:
        """Epsilon after a number of rounds."""
        return self.accountant.epsilon(self.noise_multiplier, rounds)

    def exceeds_budget(self, rounds: int) -> bool:
        """Whether a number of rounds costs more than the budget."""
        return self.budget is not None and self.epsilon(rounds) > self.budget

    def describe(self, rounds: int) -> str:
        """Describe the guarantee after a number of rounds, or up to the budget, in one line."""
        place = "local" if self.is_local else "central"
        cost = f"epsilon {self.epsilon(rounds):.3g} after {counted(rounds, 'round')}"
        if self.exceeds_budget(rounds):
            cost = f"stops before epsilon {self.budget:g}"
        return (
            f"{place}, {cost} (delta {self.accountant.delta:g}), "
            f"noise multiplier {self.noise_multiplier:.4g}, clipping norm {self.clip:g}"
        )


@dataclass(frozen=True)
class DifferentialPrivacy:
    """Clients are protected by clipping what they send to the norm ``clip``, and by Gaussian noise.

    With ``epsilon``, the noise is the smallest with which all rounds of the run cost at most epsilon. With ``noise``,
    epsilon is what the rounds cost. With both, the run stops before a round that would exceed epsilon.
    """

    is_local: ClassVar[bool] = False
    epsilon: float | None = param(
        None, "largest epsilon of the run; chooses the noise unless it is given", above=0, high=1e6
    )
    noise: float | None = param(
        None, "noise multiplier: standard deviation of the noise, divided by clip", low=1e-9, high=1e6
    )
    clip: float = param(1.0, "clipping norm: largest l2 norm of what a client sends in a round", low=1e-9, high=1e9)
    delta: float = param(1e-5, "delta of (epsilon, delta)-differential privacy", above=0, high=0.5)

    def mechanism(self, sampling_rate: float, rounds: int, keeps_state: bool, is_secure: bool) -> GaussianMechanism:
        """The mechanism of a run.

        Args:
            sampling_rate: cohort size divided by the number of clients.
            rounds: number of rounds.
            keeps_state: whether clients keep state between rounds.
            is_secure: whether a cryptographically secure generator draws the noise.
        """
        # An untrusted server may choose the same client in every round.
        accountant = Accountant(self.delta, 1.0 if self.is_local else sampling_rate, not keeps_state)
        noise = self.noise
        if noise is None:
            assert self.epsilon is not None
            noise = noise_for(accountant, self.epsilon, rounds)
            if isinf(noise):
                raise UserError(
                    f"no noise gives epsilon={self.epsilon:g} with delta={self.delta:g} over "
                    f"{counted(rounds, 'round')}; use a larger epsilon or fewer rounds"
                )
        return GaussianMechanism(self.clip, noise, self.is_local, is_secure, accountant, self.epsilon)


@dataclass(frozen=True)
class CentralPrivacy(DifferentialPrivacy):
    """The server adds the noise to the mean of the clipped messages, so clients must trust it with their messages."""


@dataclass(frozen=True)
class LocalPrivacy(DifferentialPrivacy):
    """Each client adds the noise to its own clipped message, so it need not trust the server.

    Epsilon is that of a client that takes part in every round.
    """

    is_local = True


MECHANISMS: Registry[type[Any]] = Registry("privacy mechanism", see="fedflat settings")
"""Mechanisms by name."""
MECHANISMS.register("dp", CentralPrivacy)
MECHANISMS.register("local-dp", LocalPrivacy)


def privacy_spec(text: str) -> DifferentialPrivacy:
    """Parse the text of a mechanism.

    >>> privacy_spec("dp(epsilon=8,clip=0.5)")
    CentralPrivacy(epsilon=8.0, noise=None, clip=0.5, delta=1e-05)
    """
    call = parse_one(text)
    spec: DifferentialPrivacy = make(MECHANISMS.find(call.name), call, "privacy mechanism")
    if spec.epsilon is None and spec.noise is None:
        raise UserError(f"{text} has no noise; give a budget, as in {call.name}(epsilon=8), or {call.name}(noise=1)")
    return spec
