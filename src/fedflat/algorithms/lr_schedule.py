"""The local learning rate, within a round and over rounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fedflat.averaging.base import rounds_before
from fedflat.text import param


class Schedule(NamedTuple):
    """The experiment's own part of the learning rate: its value, its decay per round, and the number of rounds."""

    lr: float
    decay: float = 1.0
    rounds: int = 1


@dataclass(frozen=True)
class LrSchedule:
    """Constant within a round: eta_t = eta decay^t."""

    def __call__(self, schedule: Schedule, round: Tensor, step: Tensor, steps: Tensor) -> Tensor:
        """The rate of a step."""
        return schedule.lr * schedule.decay**round

    @property
    def cycle(self) -> int:
        """After how many rounds the rate repeats."""
        return 1


@dataclass(frozen=True)
class Linear(LrSchedule):
    """Falls within a round: eta_k = eta_t (1 - k/K) + (k/K) final_lr eta_t (FedSWA; Liu et al. 2025, eq. 3)."""

    final_lr: float = param(0.1, "share of the rate towards which a round falls (the paper's rho)", low=0, high=1)
    early_decay: bool = param(False, "whether the decay already applies to round 0, as in the released code")

    def __call__(self, schedule: Schedule, round: Tensor, step: Tensor, steps: Tensor) -> Tensor:
        first = schedule.lr * schedule.decay ** (round + int(self.early_decay))
        return first * (1 - (1 - self.final_lr) * step / steps)


@dataclass(frozen=True)
class Cyclic(LrSchedule):
    """Falls over cycles of rounds, from ``start`` on: eta_t = (1 - q) eta + q low, q = (t mod c + 1) / c (Caldarola et al. 2022, eq. 7)."""

    low: float = param(0.0001, "the lowest rate of a cycle", low=0)
    length: int = param(20, "rounds in a cycle (c)", low=1)
    start: float = param(0.75, "share of the rounds after which cycling begins", low=0, high=1)

    def __call__(self, schedule: Schedule, round: Tensor, step: Tensor, steps: Tensor) -> Tensor:
        q = (round % self.length + 1) / self.length
        cyclic = (1 - q) * schedule.lr + q * self.low
        cycling = (round >= rounds_before(self.start, schedule.rounds)) & (self.length > 1)
        return torch.where(cycling, cyclic, torch.full_like(cyclic, schedule.lr)) * schedule.decay**round

    @property
    def cycle(self) -> int:
        return self.length


@dataclass(frozen=True)
class Poly(LrSchedule):
    """Falls as a power over the whole run, step by step: eta_k = eta decay^t (1 - (t + k/K) / T)^power.

    With ``span=round`` it falls anew in every round: eta_k = eta decay^t (1 - k/K)^power. Segmentation networks are trained so (Yu et al.
    2021, power 0.9). Caldarola et al. 2022 apply it within a round, but with a horizon of 10,000 epochs, which leaves the rate as it is.
    """

    power: float = param(0.9, "the power; 1 is a straight line", above=0)
    span: Literal["run", "round"] = param("run", "whether the rate falls over the whole run, or anew in every round")

    def __call__(self, schedule: Schedule, round: Tensor, step: Tensor, steps: Tensor) -> Tensor:
        done = step / steps
        if self.span == "run":
            done = (round + done) / schedule.rounds
        return schedule.lr * schedule.decay**round * (1 - done).clamp(min=0) ** self.power


LR_SCHEDULES: dict[str, type[LrSchedule]] = {"linear": Linear, "cyclic": Cyclic, "poly": Poly}
