"""Settings of a local step: weight decay, heavy-ball momentum and clipping."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor


@dataclass(frozen=True)
class Descent:
    """Local SGD: y <- y - lr (clip(d) + weight_decay y), with optional heavy-ball momentum reset every round.

    y is the client's model and d the direction of a step after the drift correction. With ``clip_mode=grad``, the
    gradient is clipped before the drift correction, and d is not.

    >>> import torch
    >>> y, d, lr = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]), torch.tensor(0.1)
    >>> descent = Descent(clip=1.0)
    >>> descent.move(y, descent.clip_direction(d), lr, None)[0]  # d has norm 5 and is scaled to norm 1
    tensor([0.9400, 1.9200])
    """

    weight_decay: float = 0.0
    momentum: float = 0.0
    clip: float | None = None
    """Largest l2 norm; None disables clipping."""
    clip_mode: Literal["total", "grad"] = "total"
    """``total`` clips the corrected direction, ``grad`` the raw gradient before the drift correction."""

    def clip_gradient(self, g: Tensor) -> Tensor:
        """Return the uncorrected gradient ``g`` of shape (P,), clipped if ``clip_mode`` is ``grad``."""
        return _clipped(g, self.clip) if self.clip is not None and self.clip_mode == "grad" else g

    def clip_direction(self, d: Tensor) -> Tensor:
        """Return the drift-corrected direction ``d`` of shape (P,), clipped if ``clip_mode`` is ``total``."""
        return _clipped(d, self.clip) if self.clip is not None and self.clip_mode == "total" else d

    def move(self, y: Tensor, d: Tensor, lr: Tensor, velocity: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Take one step along a direction that the caller has clipped.

        Args:
            y: the client's model, shape (P,).
            d: direction after the drift correction and clipping, shape (P,).
            lr: learning rate, shape ().
            velocity: momentum buffer of shape (P,), or None without momentum.

        Returns:
            The next model and momentum buffer.
        """
        if self.weight_decay:
            d = (self.weight_decay * y).add_(d)
        return self.descend(y, d, lr, velocity)

    def descend(self, y: Tensor, d: Tensor, lr: Tensor, velocity: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Take one step like ``move``, without weight decay."""
        if velocity is not None:
            velocity = (self.momentum * velocity).add_(d)
            d = velocity
        return (-lr * d).add_(y), velocity  # y - lr d, with one new vector instead of two


def _clipped(v: Tensor, max_norm: float) -> Tensor:
    """Return the vector ``v``, scaled down to the l2 norm ``max_norm`` if its norm is larger."""
    scale: Tensor = max_norm / (v.norm() + 1e-12)  # finite for v = 0
    return v * scale.clamp(max=1)
