"""Stochastic weight averaging on the server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedflat.averaging.base import Average, AverageState, RunInfo, rounds_before
from fedflat.text import param


@dataclass(frozen=True)
class Swa(Average):
    """The mean of server models captured once per cycle (SWA; Caldarola et al. 2022, Algorithm 1).

        w <- (n w + x) / (n + 1)

    - w: average
    - x: captured server model
    - n: number of models captured before x

    Averaging begins after the fraction ``start`` of all rounds. Until the first capture, w is the server model at the
    beginning of averaging. Captures are c rounds apart: c is ``every`` or, if that is not set, the cycle length of the
    learning-rate schedule.

    >>> from torch import tensor
    >>> from fedflat.testing import run_info
    >>> state = Swa(start=0.0, every=1).begin(run_info(rounds=3), tensor([9.0, 9.0]))
    >>> models = [tensor([7.0, 7.0]), tensor([1.0, 2.0]), tensor([3.0, 6.0])]
    >>> for round, x in enumerate(models):
    ...     state.before_round(round, x)
    ...     state.update(round, x)
    >>> state.model(x)  # the released rule captures from the second round on
    tensor([2., 4.])
    """

    start: float = param(0.75, "fraction of the rounds after which averaging begins", low=0, high=1, positional=True)
    every: int | None = param(
        None, "number of rounds c between captures; if not set, the cycle length of the learning-rate schedule", low=1
    )
    weighting: Literal["mean", "literal"] = param(
        "mean",
        "how captured models are averaged: mean is their plain mean, as in the released code; literal is the running "
        "average with n = t / c after round t, as printed in the paper",
    )
    capture_phase: Literal["released", "cycle_end"] = param(
        "released",
        "rounds t whose model is captured: with released, those for which t minus the first averaging round is a "
        "multiple of c (with weighting=literal, those for which t is); with cycle_end, those in which the learning "
        "rate is lowest",
    )

    def begin(self, info: RunInfo, x: Tensor) -> AverageState:
        return self._state(info)

    def warning(self, info: RunInfo) -> str | None:
        """Return why the run captures no model and what to change, or None if it captures at least one."""
        state = self._state(info)
        if any(state.captures(round) for round in range(state.start, info.rounds)):
            return None
        return (
            f"SWA captures no model in {info.rounds} rounds: it starts after round {state.start} and captures every "
            f"{state.cycle} rounds; use more rounds, a shorter cycle, an earlier start, or every=1"
        )

    def _state(self, info: RunInfo) -> SwaState:
        """The initial state; averaging begins after the fraction ``self.start`` of the rounds."""
        # A run that continues another one cannot average the rounds of that run.
        start = max(rounds_before(self.start, info.rounds), info.first)
        return SwaState(self, start, self.every or info.cycle)


class SwaState(AverageState):
    """The mean in double precision and the number of captured models.

    Args:
        spec: the average's parameters.
        start: averaging begins with the server model at the start of this round (counted from 0).
        cycle: rounds between captures (c).
    """

    def __init__(self, spec: Swa, start: int, cycle: int) -> None:
        self.spec, self.start, self.cycle = spec, start, cycle
        self.mean: Tensor | None = None
        self.captured = 0

    def before_round(self, round: int, x: Tensor) -> None:
        """Set the mean to the server model ``x`` if averaging begins with this round (counted from 0)."""
        if round == self.start:
            self.mean = x.double()

    def update(self, round: int, x: Tensor) -> None:
        """Capture the server model x that ``round`` produced: w <- (n w + x) / (n + 1), with w the mean of n models.

        Nothing changes before averaging has begun (w is None) and in rounds that are not captured. With
        ``weighting=literal``, n is the number of cycles since round 0, as printed in the paper.
        """
        if self.mean is None or not self.captures(round):
            return
        n = self.captured if self.spec.weighting == "mean" else round / self.cycle
        self.mean = (self.mean * n + x.double()) / (n + 1)
        self.captured += 1

    def captures(self, round: int) -> bool:
        """Whether the model that ``round`` (counted from 0) produces enters the mean.

        ``capture_phase=cycle_end`` captures in the last round of each cycle, where the learning rate is lowest. With
        ``released``, captures are ``cycle`` rounds apart, counted from ``start``, which is not captured itself. With
        the paper's ``weighting=literal``, they are counted from round 0: mod(t, c) = 0.
        """
        if self.spec.capture_phase == "cycle_end":
            return round >= self.start and (round + 1) % self.cycle == 0
        if self.spec.weighting == "literal":
            return round >= self.start and round % self.cycle == 0
        return round > self.start and (round - self.start) % self.cycle == 0

    def model(self, x: Tensor) -> Tensor | None:
        return None if self.mean is None else self.mean.to(x.dtype)

    def tensors(self) -> dict[str, Tensor]:
        return {} if self.mean is None else {"mean": self.mean, "captured": torch.tensor(self.captured)}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        if tensors:  # empty if the checkpoint was written before averaging began
            self.mean, self.captured = tensors["mean"], int(tensors["captured"])
