"""SCAFFOLD with a correction that fades over a client's local steps: d_k = g + s (1 - k/K) (c - c_i)."""

from dataclasses import dataclass

from torch import Tensor

from fedflat import Algorithm
from fedflat.algorithms.drift.scaffold import Scaffold
from fedflat.algorithms.slot import Gradient, LocalContext
from fedflat.text import param


@dataclass(frozen=True)
class Damped(Scaffold):
    """SCAFFOLD's correction, at full strength in the first local step and decreasing linearly after it."""

    strength: float = param(1.0, "weight of the correction at the first step", low=0)

    def direction(self, g: Tensor, ctx: LocalContext, gradient: Gradient) -> Tensor:
        return g + self.strength * (1 - ctx.step / ctx.steps) * ctx.local["correction"]


DAMPED_SCAFFOLD = Algorithm(Damped())
