"""The local SGD step: gradient clipping, weight decay, heavy-ball momentum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor


@dataclass(frozen=True)
class Descent:
    """Local SGD: y <- y - lr (clip(d) + weight_decay y), with optional heavy-ball momentum reset every round.

    >>> import torch
    >>> y, d, lr = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]), torch.tensor(0.1)
    >>> Descent(clip=1.0).move(y, d, lr, None)[0]  # d has norm 5 and is scaled to norm 1
    tensor([0.9400, 1.9200])
    """

    weight_decay: float = 0.0
    momentum: float = 0.0
    clip: float | None = None
    """Largest l2 norm; None disables clipping."""
    clip_mode: Literal["total", "grad"] = "total"
    """``total`` clips the corrected direction, ``grad`` the raw gradient before the drift correction."""

    def clip_gradient(self, g: Tensor) -> Tensor:
        """The raw gradient of shape (P,), clipped if ``clip_mode`` is ``grad``."""
        return _clipped(g, self.clip) if self.clip is not None and self.clip_mode == "grad" else g

    def move(self, y: Tensor, d: Tensor, lr: Tensor, velocity: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Take one step.

        Args:
            y: iterate, shape (P,).
            d: corrected direction, shape (P,).
            lr: learning rate, shape ().
            velocity: momentum buffer of shape (P,), or None without momentum.

        Returns:
            The next iterate and momentum buffer.
        """
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
