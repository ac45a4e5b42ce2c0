"""The local descent step: clipping, weight decay, heavy-ball momentum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor


@dataclass(frozen=True)
class Descent:
    """y <- y - eta (clip(d) + weight_decay y), with an optional heavy-ball buffer that is new in every round."""

    weight_decay: float = 0.0
    momentum: float = 0.0
    clip: float | None = None
    clip_mode: Literal["total", "grad"] = "total"
    """total: the corrected direction is clipped; grad: the raw gradient, before the correction."""

    def clip_gradient(self, g: Tensor) -> Tensor:
        """The gradient, clipped in mode grad."""
        return _clipped(g, self.clip) if self.clip is not None and self.clip_mode == "grad" else g

    def move(self, y: Tensor, d: Tensor, lr: Tensor, velocity: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The next iterate and momentum buffer."""
        if self.clip is not None and self.clip_mode == "total":
            d = _clipped(d, self.clip)
        if self.weight_decay:
            d = d + self.weight_decay * y
        if velocity is not None:
            velocity = d = self.momentum * velocity + d
        return y - lr * d, velocity


def _clipped(v: Tensor, norm: float) -> Tensor:
    scale: Tensor = norm / (v.norm() + 1e-12)
    return v * scale.clamp(max=1)
