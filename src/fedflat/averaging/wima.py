"""WiMA: average over a window of server models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedflat.averaging.base import Average, AverageState, RunInfo
from fedflat.text import param


@dataclass(frozen=True)
class Wima(Average):
    """The mean of the last W server models (WiMA; Caldarola et al. 2023, eq. 4).

        w = (1 / W) sum_{j<W} x^{t+1-j}

    - w: average after round t, counted from 0
    - W: number of models in the window (``window``)
    - x^t: server model after t rounds

    During the first W rounds, w is the mean of all server models so far, except the initial model x^0.

    >>> from torch import tensor
    >>> from fedflat.testing import run_info
    >>> state = Wima(window=2).begin(run_info(rounds=3), tensor([9.0, 9.0]))
    >>> for round, x in enumerate([tensor([7.0, 7.0]), tensor([1.0, 2.0]), tensor([3.0, 6.0])]):
    ...     state.update(round, x)
    >>> state.model(x)  # ([1, 2] + [3, 6]) / 2
    tensor([2., 4.])
    """

    window: int = param(100, "number W of most recent server models to average", low=1, positional=True)
    part: Literal["all", "classifier", "features"] = param(
        "all", "parameters to average; all other parameters are those of the current server model"
    )

    def begin(self, info: RunInfo, x: Tensor) -> AverageState:
        return WimaState(self, info, x)


class WimaState(AverageState):
    """The sum of the last W server models, and a ring buffer that holds these models."""

    def __init__(self, spec: Wima, info: RunInfo, x: Tensor) -> None:
        """Start with an empty window.

        Args:
            spec: the average's parameters.
            info: creates the ring buffer for the window, and marks the entries of the classifier.
            x: the initial server model, shape (P,); only its shape and device matter.
        """
        self.window = spec.window
        self.ring = info.ring(f"wima-{spec.window}-{spec.part}", spec.window)
        # In double precision, because rounding errors of adding and removing models accumulate.
        self.sum = torch.zeros_like(x, dtype=torch.float64)
        self.rounds = 0
        # Mask of the averaged entries; None averages all.
        self.mask = {"all": None, "classifier": info.classifier, "features": ~info.classifier}[spec.part]

    def update(self, round: int, x: Tensor) -> None:
        """Add the server model ``x`` of shape (P,) to the window, in place of the one from W rounds ago."""
        position = self.rounds % self.window
        self.sum += x
        if self.rounds >= self.window:
            self.sum -= self.ring[position].to(self.sum.device)
        self.ring[position] = x
        self.rounds += 1

    def model(self, x: Tensor) -> Tensor | None:
        """The mean of the window in the averaged entries, the server model ``x`` in the others."""
        if not self.rounds:
            return None
        mean = (self.sum / min(self.rounds, self.window)).to(x.dtype)
        return mean if self.mask is None else torch.where(self.mask, mean, x)

    def tensors(self) -> dict[str, Tensor]:
        return {"sum": self.sum, "rounds": torch.tensor(self.rounds)}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        self.sum, self.rounds = tensors["sum"], int(tensors["rounds"])  # the ring buffer is stored separately
