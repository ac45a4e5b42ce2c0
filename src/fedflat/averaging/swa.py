"""Server-side stochastic weight averaging."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedflat.averaging.base import Average, AverageState, RunInfo, rounds_before
from fedflat.text import param


@dataclass(frozen=True)
class Swa(Average):
    """The mean of models captured once per cycle after ``start``: x_swa <- (n x_swa + x) / (n + 1) (Caldarola et al. 2022, Algorithm 1).

    The cycle is that of the local rate (``cyclic``), or ``every``. From the start until the first capture it is the model of that moment.
    """

    start: float = param(0.75, "share of the rounds after which averaging begins", low=0, high=1)
    every: int | None = param(None, "rounds between captures; none is the cycle of the local rate", low=1)
    weighting: Literal["mean", "literal"] = param(
        "mean", "plain mean of the captured models (released), or n = t / c as printed"
    )
    capture_phase: Literal["released", "cycle_end"] = param(
        "released", "capture when t - start is a multiple of c, or at the lowest rate"
    )

    def begin(self, scene: RunInfo, x: Tensor) -> AverageState:
        return self._running(scene)

    def averages_nothing(self, scene: RunInfo) -> str:
        running = self._running(scene)
        if any(running.captures(round) for round in range(running.start, scene.rounds)):
            return ""
        return (
            f"SWA averages nothing in these {scene.rounds} rounds: it begins after {running.start} of them and captures a model every "
            f"{running.cycle} from then on; use more rounds, a shorter cycle, an earlier start, or captures apart from the cycle (every=1)"
        )

    def _running(self, scene: RunInfo) -> _RunningSwa:
        return _RunningSwa(self, max(rounds_before(self.start, scene.rounds), scene.first), self.every or scene.cycle)


class _RunningSwa(AverageState):
    def __init__(self, spec: Swa, start: int, cycle: int) -> None:
        self.spec, self.start, self.cycle = spec, start, cycle
        self.mean: Tensor | None = None
        self.captured = 0

    def before(self, round: int, x: Tensor) -> None:
        if round == self.start:
            self.mean = x.double()

    def after(self, round: int, x: Tensor) -> None:
        if self.mean is None or not self.captures(round):
            return
        n = self.captured if self.spec.weighting == "mean" else round / self.cycle
        self.mean = (self.mean * n + x.double()) / (n + 1)
        self.captured += 1

    def captures(self, round: int) -> bool:
        """Whether the model after a round is one of those averaged."""
        if self.spec.capture_phase == "cycle_end":
            return round >= self.start and (round + 1) % self.cycle == 0
        first = self.start if self.spec.weighting == "literal" else self.start + 1
        return round >= first and (round - self.start) % self.cycle == 0

    def model(self, x: Tensor) -> Tensor | None:
        return None if self.mean is None else self.mean.to(x.dtype)

    def tensors(self) -> dict[str, Tensor]:
        return {} if self.mean is None else {"mean": self.mean, "captured": torch.tensor(self.captured)}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        if tensors:
            self.mean, self.captured = tensors["mean"], int(tensors["captured"])
