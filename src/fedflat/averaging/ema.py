"""Exponential moving average of server models."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedflat.averaging.base import Average, AverageState, RunInfo
from fedflat.text import param


@dataclass(frozen=True)
class Ema(Average):
    """An exponential moving average of the server models.

        w <- decay w + (1 - decay) x

    - w: average; its first value is the server model after the first round
    - x: server model after a round

    >>> from torch import tensor
    >>> from fedflat.testing import run_info
    >>> state = Ema(decay=0.75).begin(run_info(rounds=2), tensor([0.0, 0.0]))
    >>> for round, x in enumerate([tensor([1.0, 2.0]), tensor([5.0, 6.0])]):
    ...     state.update(round, x)
    >>> state.model(x)  # 0.75 [1, 2] + 0.25 [5, 6]
    tensor([2., 3.])
    """

    decay: float = param(
        0.99, "weight of the previous average w; the new server model has weight 1 - decay", low=0, high=1
    )

    def begin(self, info: RunInfo, x: Tensor) -> AverageState:
        return EmaState(self.decay)


class EmaState(AverageState):
    """The average in double precision, None before the first round."""

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self.mean: Tensor | None = None

    def update(self, round: int, x: Tensor) -> None:
        if self.mean is None:
            self.mean = x.double()
        else:
            self.mean = self.decay * self.mean + (1 - self.decay) * x.double()

    def model(self, x: Tensor) -> Tensor | None:
        return None if self.mean is None else self.mean.to(x.dtype)

    def tensors(self) -> dict[str, Tensor]:
        return {} if self.mean is None else {"mean": self.mean}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        self.mean = tensors.get("mean")
