"""Learning-rate schedules of the local steps, within a round and over rounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fedflat.algorithms.slot import Slot
from fedflat.averaging.base import rounds_before
from fedflat.registry import Registry
from fedflat.text import param


class Schedule(NamedTuple):
    """The run's learning-rate settings, from which an ``LrSchedule`` computes the learning rate of each local step."""

    lr: float
    """Base learning rate eta."""
    decay: float = 1.0
    """Factor by which the learning rate is multiplied after every round."""
    rounds: int = 1
    """Number of rounds T of the run."""


@dataclass(frozen=True)
class LrSchedule(Slot):
    """By default, the learning rate is constant within a round.

        eta_k = eta decay^t

    - eta_k: learning rate of local step k
    - eta: base learning rate, ``training.lr``
    - decay: factor by which the learning rate is multiplied after every round, ``training.lr_decay``
    - t: round, counted from 0

    >>> LrSchedule()(Schedule(lr=0.5, decay=0.9), round=torch.tensor(2), step=torch.tensor(0), steps=torch.tensor(4))
    tensor(0.4050)
    """

    def __call__(self, schedule: Schedule, round: Tensor, step: Tensor, steps: Tensor) -> Tensor:
        """Return the learning rate of one local step.

        Args:
            schedule: base learning rate, decay per round and number of rounds.
            round: number of the round t, counted from 0, shape ().
            step: number of the local step k, counted from 0, shape ().
            steps: number of local steps K of the client, shape ().
        """
        return schedule.lr * schedule.decay**round

    @property
    def cycle(self) -> int:
        """Number of rounds after which the schedule repeats."""
        return 1


@dataclass(frozen=True)
class Linear(LrSchedule):
    """The learning rate decays linearly within each round (FedSWA; Liu et al. 2025, eq. 3).

        eta_k = eta_t (1 - k/K) + (k/K) final_lr eta_t

    - eta_k: learning rate of local step k, counted from 0
    - K: number of local steps
    - eta_t: learning rate at the start of round t; eta_t = eta decay^t, where eta is the base learning rate, decay the
      factor per round, and t is counted from 0
    - final_lr: fraction of eta_t that the learning rate approaches at the end of the round

    >>> schedule, round, steps = Schedule(lr=0.5), torch.tensor(0), torch.tensor(2)
    >>> [float(Linear(final_lr=0.2)(schedule, round, torch.tensor(k), steps)) for k in (0, 1)]
    [0.5, 0.30000001192092896]
    """

    final_lr: float = param(
        0.1, "fraction of eta_t that the learning rate approaches within a round (rho in the paper)", low=0, high=1
    )
    early_decay: bool = param(False, "whether the decay per round already applies in round 0, as in the published code")

    def __call__(self, schedule: Schedule, round: Tensor, step: Tensor, steps: Tensor) -> Tensor:
        eta_t = schedule.lr * schedule.decay ** (round + int(self.early_decay))
        return eta_t * (1 - (1 - self.final_lr) * step / steps)


@dataclass(frozen=True)
class Cyclic(LrSchedule):
    """The learning rate falls in cycles of several rounds, as SWA needs (Caldarola et al. 2022, eq. 7).

        eta_t = (1 - p) eta + p low
        p = (t mod c + 1) / c

    - eta_t: learning rate of all local steps of round t, before it is multiplied by decay^t
    - t: round, counted from 0
    - eta: base learning rate
    - low: lowest learning rate of a cycle
    - p: position of the round in its cycle; 1 in the last round
    - c: number of rounds per cycle (``length``)

    Cycles begin after the fraction ``start`` of all rounds; before that, eta_t = eta.

    >>> cyclic = Cyclic(low=0.1, length=2, start=0.5)
    >>> schedule, zero = Schedule(lr=0.5, rounds=4), torch.tensor(0)
    >>> torch.stack([cyclic(schedule, torch.tensor(t), zero, zero + 1) for t in range(4)])
    tensor([0.5000, 0.5000, 0.3000, 0.1000])
    """

    low: float = param(0.0001, "lowest learning rate of a cycle", low=0)
    length: int = param(20, "number of rounds per cycle, c", low=1)
    start: float = param(0.75, "fraction of the rounds after which cycles begin", low=0, high=1)

    def __call__(self, schedule: Schedule, round: Tensor, step: Tensor, steps: Tensor) -> Tensor:
        position = (round % self.length + 1) / self.length  # p, 1 at the end of a cycle
        cyclic_lr = (1 - position) * schedule.lr + position * self.low
        # In cycles of one round, the learning rate would always be the lowest; eta replaces it.
        has_begun = (round >= rounds_before(self.start, schedule.rounds)) & (self.length > 1)
        return torch.where(has_begun, cyclic_lr, torch.full_like(cyclic_lr, schedule.lr)) * schedule.decay**round

    @property
    def cycle(self) -> int:
        return self.length


@dataclass(frozen=True)
class Poly(LrSchedule):
    """The learning rate decays polynomially, over the run or within each round (Yu et al. 2021, with power 0.9).

        eta_k = eta decay^t (1 - (t + k/K) / T)^power

    - eta_k: learning rate of local step k
    - eta: base learning rate
    - decay: factor by which the learning rate is multiplied after every round
    - t, T: round, counted from 0, and number of rounds
    - k, K: local step, counted from 0, and number of local steps

    With ``span=round``, the decay restarts in every round: eta_k = eta decay^t (1 - k/K)^power. Caldarola et al. 2022
    also restart it in every round, but set its length to 10,000 epochs, so that the learning rate is practically
    constant.

    >>> schedule, zero = Schedule(lr=0.5, rounds=2), torch.tensor(0)
    >>> torch.stack([Poly(power=2.0)(schedule, torch.tensor(t), zero, zero + 1) for t in (0, 1)])
    tensor([0.5000, 0.1250])
    """

    power: float = param(0.9, "exponent of the decay; 1 is linear", above=0)
    span: Literal["run", "round"] = param("run", "period of the decay: the whole run (run), or each round anew (round)")

    def __call__(self, schedule: Schedule, round: Tensor, step: Tensor, steps: Tensor) -> Tensor:
        progress = step / steps  # finished fraction of the round
        if self.span == "run":
            progress = (round + progress) / schedule.rounds
        return schedule.lr * schedule.decay**round * (1 - progress).clamp(min=0) ** self.power


LR_SCHEDULES: Registry[type[LrSchedule]] = Registry(
    "learning-rate schedule", see="fedflat algorithms", namespace="algorithm parts"
)
for _name, _schedule in {"linear": Linear, "cyclic": Cyclic, "poly": Poly}.items():
    LR_SCHEDULES.register(_name, _schedule)
