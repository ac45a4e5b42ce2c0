"""The exponential moving average of global models."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedflat.averaging.base import Average, AverageState, RunInfo
from fedflat.text import param


@dataclass(frozen=True)
class Ema(Average):
    """w <- decay w + (1 - decay) x^{t+1}, starting at x^1."""

    decay: float = param(0.99, "how much of the average stays in a round", low=0, high=1)

    def begin(self, scene: RunInfo, x: Tensor) -> AverageState:
        return _RunningEma(self.decay)


class _RunningEma(AverageState):
    def __init__(self, decay: float) -> None:
        self.decay = decay
        self.mean: Tensor | None = None

    def after(self, round: int, x: Tensor) -> None:
        self.mean = x.double() if self.mean is None else self.decay * self.mean + (1 - self.decay) * x.double()

    def model(self, x: Tensor) -> Tensor | None:
        return None if self.mean is None else self.mean.to(x.dtype)

    def tensors(self) -> dict[str, Tensor]:
        return {} if self.mean is None else {"mean": self.mean}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        self.mean = tensors.get("mean")
