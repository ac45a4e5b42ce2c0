"""Policies of the server: which updates of a round count, or when an asynchronous server updates its model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import ceil
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np

from fedflat.errors import UserError
from fedflat.registry import Registry
from fedflat.text import make, param, parse_one
from fedflat.timing.clock import TOLERANCE, ClientClock, StepLimit
from fedflat.timing.draws import FloatArray, IntArray


class Policy:
    """A policy; a frozen dataclass whose fields are the parameters of its text."""

    is_asynchronous: ClassVar[bool] = False


class CountedUpdates(NamedTuple):
    """The updates of a synchronous round that count."""

    positions: IntArray
    """Positions in the cohort of the clients whose updates count, in ascending order."""
    seconds: float
    """Duration of the round in virtual seconds."""


class Synchronous(Policy, ABC):
    """A policy under which all clients of a round start together, and the round ends before the next one begins."""

    def cohort_size(self, clients_per_round: int, clients: int) -> int:
        """How many of ``clients`` clients to sample."""
        return min(clients_per_round, clients)

    @abstractmethod
    def count(self, clock: ClientClock, cohort: IntArray, steps: IntArray, wanted: int) -> CountedUpdates:
        """Decide whose updates count.

        Args:
            clock: the clients' times.
            cohort: numbers of the sampled clients, in ascending order [n].
            steps: their local steps [n].
            wanted: ``clients_per_round``.
        """

    def step_limit(self, clock: ClientClock) -> StepLimit | None:
        """How many steps clients complete, if the policy ends local training early."""
        return None

    def check(self, clock: ClientClock, clients: int, fewest_steps: int) -> None:
        """Raise a ``UserError`` if no client can ever take part.

        Args:
            clock: the clients' times.
            clients: number of clients.
            fewest_steps: smallest number of local steps of any client.
        """


@dataclass(frozen=True)
class Wait(Synchronous):
    """The server waits for all clients of the round."""

    def count(self, clock: ClientClock, cohort: IntArray, steps: IntArray, wanted: int) -> CountedUpdates:
        return CountedUpdates(np.arange(len(cohort)), _longest(clock.seconds(cohort, steps)))


@dataclass(frozen=True)
class OverSelect(Synchronous):
    """The server samples more clients than it needs, and uses the updates that arrive first.

    It samples ``(1 + extra) clients_per_round`` clients, rounded up. The round ends when ``clients_per_round`` updates
    have arrived. At equal times, the client with the lower number counts.
    """

    extra: float = param(0.3, "additional clients, as a share of clients_per_round", low=0, high=1000)

    def cohort_size(self, clients_per_round: int, clients: int) -> int:
        return min(ceil(round((1 + self.extra) * clients_per_round, 6)), clients)

    def count(self, clock: ClientClock, cohort: IntArray, steps: IntArray, wanted: int) -> CountedUpdates:
        seconds = clock.seconds(cohort, steps)
        fastest = np.sort(np.argsort(seconds, kind="stable")[:wanted])
        return CountedUpdates(fastest, _longest(seconds[fastest]))


@dataclass(frozen=True)
class Deadline(Synchronous):
    """The round ends after a fixed time, or as soon as all updates have arrived.

    With ``late=drop``, updates that are late do not count. With ``late=partial``, a client stops training early enough
    for its update to arrive in time, and sends what it has; it does not count if it cannot complete a single step.
    """

    seconds: float = param(60.0, "longest duration of a round in virtual seconds", above=0, positional=True)
    late: Literal["drop", "partial"] = param("drop", "late clients: ignore their updates, or use their partial work")

    def count(self, clock: ClientClock, cohort: IntArray, steps: IntArray, wanted: int) -> CountedUpdates:
        possible = clock.steps_within(cohort, self.seconds)
        counted = np.flatnonzero(possible >= (steps if self.late == "drop" else 1))
        if (possible >= steps).all():
            return CountedUpdates(counted, _longest(clock.seconds(cohort, steps)))
        return CountedUpdates(counted, self.seconds)

    def step_limit(self, clock: ClientClock) -> StepLimit | None:
        return StepLimit(clock, self.seconds) if self.late == "partial" else None

    def check(self, clock: ClientClock, clients: int, fewest_steps: int) -> None:
        needed = clock.shortest(clients, 1 if self.late == "partial" else fewest_steps)
        if needed > self.seconds * (1 + TOLERANCE):
            raise UserError(
                f"no client can meet the deadline of {self.seconds:g} s: even the fastest one needs {needed:.3g} s; "
                f"use a longer deadline, such as --policy 'deadline(seconds={2 * needed:.2g})', or a faster --clock"
            )


def _longest(seconds: FloatArray) -> float:
    """The largest of several durations; 0 if there are none."""
    return float(seconds.max(initial=0.0))


@dataclass(frozen=True)
class Asynchronous(Policy, ABC):
    """A policy under which clients start and arrive at any time.

    The server keeps ``clients_per_round`` clients in flight and updates its model as soon as ``buffer_size`` updates
    have arrived. The staleness tau of an update is the number of server updates since its client started. Its weight is

        s(tau) = 1                                               (constant)
        s(tau) = (1 + tau)^-a                                    (polynomial)
        s(tau) = 1 if tau <= b, else 1 / (a (tau - b) + 1)       (hinge)
    """

    is_asynchronous = True
    mixes_models: ClassVar[bool] = False
    """Whether the server moves towards clients' models instead of adding their displacements."""
    staleness: Literal["constant", "polynomial", "hinge"] = param(
        "polynomial", "weight of an update as a function of its staleness tau"
    )
    a: float | None = param(None, "parameter of the weight; default: 0.5 for polynomial, 10 for hinge", low=0, high=100)
    b: float = param(4.0, "staleness up to which hinge has weight 1", low=0)

    @property
    @abstractmethod
    def buffer_size(self) -> int:
        """Number of arrivals per update of the server model."""

    def staleness_weight(self, tau: int) -> float:
        """s(tau), with s(0) = 1.

        >>> FedBuff().staleness_weight(3), FedBuff(staleness="hinge", a=1.0, b=1.0).staleness_weight(3)
        (0.5, 0.3333333333333333)
        """
        if self.staleness == "constant":
            return 1.0
        if self.staleness == "polynomial":
            return float((1 + tau) ** -(0.5 if self.a is None else self.a))
        return 1.0 if tau <= self.b else float(1 / ((10 if self.a is None else self.a) * (tau - self.b) + 1))

    def weight(self, tau: int) -> float:
        """Weight, between 0 and 1, of an update with staleness tau against the server's current model."""
        return self.staleness_weight(tau)

    def scale(self, tau: int) -> float:
        """Factor of a displacement with staleness tau, in addition to its client's share of the buffer."""
        return self.weight(tau)


@dataclass(frozen=True)
class FedBuff(Asynchronous):
    """The server adds the mean of a full buffer of displacements (FedBuff; Nguyen et al. 2022).

        x <- x + server_lr sum_i p_i s(tau_i) D_i

    The sum is over the updates in the buffer, which holds ``buffer`` of them. p_i is the share of client i in the
    buffer: 1 / buffer with federation.weighting=uniform, as in the paper, or proportional to its samples. D_i is its
    displacement from the model that it started from, and s(tau_i) its staleness weight. Any server optimiser may take
    the step. ``sum`` and ``reference`` reproduce FLSim, which adds up the buffer with uniform weighting and divides the
    weights by that of a reference staleness.
    """

    buffer: int = param(10, "updates per server step", low=1, high=10_000, positional=True)
    sum: bool = param(False, "whether to add up the buffer instead of averaging it")
    reference: int = param(0, "staleness whose weight is scaled to 1", low=0)

    def __post_init__(self) -> None:
        """Reject a reference whose weight is so small that dividing by it would overflow."""
        if self.staleness_weight(self.reference) < 1e-30:
            raise UserError(
                f"fedbuff: the staleness weight of reference={self.reference} is zero up to rounding; "
                "choose a smaller reference or a smaller a"
            )

    @property
    def buffer_size(self) -> int:
        return self.buffer

    def scale(self, tau: int) -> float:
        """s(tau) / s(reference), times the size of the buffer if it is added up."""
        return self.staleness_weight(tau) / self.staleness_weight(self.reference) * (self.buffer if self.sum else 1)


@dataclass(frozen=True)
class FedAsync(Asynchronous):
    """The server mixes each arriving model into its own (FedAsync; Xie et al. 2019).

        x <- x + alpha s(tau) (y - x)

    y is the arriving client's model and s(tau) its staleness weight. The server optimiser takes the step. The paper
    adds a proximal term to local training, which the algorithm ``fedprox(mu=0.005)`` does.
    """

    mixes_models = True
    alpha: float = param(0.6, "weight of a client's model without staleness", above=0, high=1, positional=True)

    @property
    def buffer_size(self) -> int:
        return 1

    def weight(self, tau: int) -> float:
        """alpha s(tau)."""
        return self.alpha * self.staleness_weight(tau)


POLICIES: Registry[type[Any]] = Registry("policy", see="fedflat settings")
"""Policies by name."""
POLICIES.register("wait", Wait)
POLICIES.register("over-select", OverSelect)
POLICIES.register("deadline", Deadline)
POLICIES.register("fedbuff", FedBuff)
POLICIES.register("fedasync", FedAsync)


def policy_spec(text: str) -> Policy:
    """Parse the text of a policy.

    >>> policy_spec("deadline(30)")
    Deadline(seconds=30.0, late='drop')
    """
    call = parse_one(text)
    policy: Policy = make(POLICIES.find(call.name), call, "policy")
    return policy
