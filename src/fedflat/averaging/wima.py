"""WiMA: the average over a window of global models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedflat.averaging.base import Average, AverageState, RunInfo
from fedflat.text import param


@dataclass(frozen=True)
class Wima(Average):
    """The mean of the last W global models: w = (1/W) sum_{j<W} x^{t+1-j} (Caldarola et al., WiMA, eq. 4).

    Before W rounds are done it is the mean of those there are; the initial model never enters.
    """

    window: int = param(100, "number of models in the window (W)", low=1)
    part: Literal["all", "classifier", "features"] = param("all", "what is averaged; the rest is the server's own")

    def begin(self, scene: RunInfo, x: Tensor) -> AverageState:
        return _RunningWima(self, scene, x)


class _RunningWima(AverageState):
    def __init__(self, spec: Wima, scene: RunInfo, x: Tensor) -> None:
        self.window = spec.window
        self.ring = scene.ring(f"wima-{spec.window}-{spec.part}", spec.window)
        # In double precision, so that adding and removing thousands of models leaves no trace of the ones removed.
        self.sum = torch.zeros_like(x, dtype=torch.float64)
        self.rounds = 0
        self.averaged = {"all": None, "classifier": scene.classifier, "features": ~scene.classifier}[spec.part]

    def after(self, round: int, x: Tensor) -> None:
        position = self.rounds % self.window
        self.sum += x
        if self.rounds >= self.window:
            self.sum -= self.ring[position].to(self.sum.device)
        self.ring[position] = x
        self.rounds += 1

    def model(self, x: Tensor) -> Tensor | None:
        if not self.rounds:
            return None
        mean = (self.sum / min(self.rounds, self.window)).to(x.dtype)
        return mean if self.averaged is None else torch.where(self.averaged, mean, x)

    def tensors(self) -> dict[str, Tensor]:
        return {"sum": self.sum, "rounds": torch.tensor(self.rounds)}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        self.sum, self.rounds = tensors["sum"], int(tensors["rounds"])
