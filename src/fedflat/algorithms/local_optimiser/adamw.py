"""AdamW on clients."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fedflat.algorithms.descent import Descent
from fedflat.algorithms.local_optimiser.base import LocalOptimiser
from fedflat.algorithms.slot import LocalContext
from fedflat.algorithms.state import State
from fedflat.text import param


@dataclass(frozen=True)
class AdamW(LocalOptimiser):
    """Clients take AdamW steps, with new moments in every round (Local AdamW; Loshchilov and Hutter 2019).

        m <- beta1 m + (1 - beta1) d_k
        v <- beta2 v + (1 - beta2) d_k^2
        m_hat = m / (1 - beta1^(k+1))
        v_hat = v / (1 - beta2^(k+1))
        y_{k+1} = (1 - eta_k weight_decay) y_k - eta_k m_hat / (sqrt(v_hat) + eps)

    - d_k: direction of local step k, after the drift correction and clipping
    - m, v: moments, which are zero at the start of every round
    - k: local step, counted from 0
    - y_k: the client's model after k local steps
    - eta_k: learning rate of local step k

    All operations are elementwise. Weight decay (``training.weight_decay``) is decoupled: it does not enter the
    moments. A step changes each weight by about eta_k, so learning rates are far smaller than those of SGD.

    >>> from torch import tensor
    >>> from fedflat.testing import local_context
    >>> adamw, ctx = AdamW(), local_context(y=[1.0, 2.0], z=[1.0, 2.0])
    >>> ctx = ctx._replace(local=adamw.begin(ctx, Descent()))
    >>> adamw.move(tensor([4.0, -0.01]), tensor(0.1), ctx, Descent(weight_decay=0.5))[0]  # y - 0.1 (sign(d) + 0.5 y)
    tensor([0.8500, 2.0000])
    """

    beta1: float = param(0.9, "decay of the first moment m", low=0, high=0.9999)
    beta2: float = param(0.999, "decay of the second moment v", low=0, high=0.999999)
    eps: float = param(1e-8, "constant added to sqrt(v), which keeps the step finite", above=0)

    def begin(self, ctx: LocalContext, descent: Descent) -> State:
        return {"m": torch.zeros_like(ctx.z), "v": torch.zeros_like(ctx.z)}

    def averaged_steps(self, ctx: LocalContext) -> tuple[Tensor, Tensor]:
        """Return the numbers of steps that m and v average, by which they are corrected for their initial value 0."""
        return ctx.step + 1, ctx.step + 1

    def move(self, d: Tensor, lr: Tensor, ctx: LocalContext, descent: Descent) -> tuple[Tensor, State]:
        step, moments = self.step(d, ctx)
        if descent.weight_decay:
            step = step + descent.weight_decay * ctx.y
        return ctx.y - lr * step, moments

    def step(self, d: Tensor, ctx: LocalContext) -> tuple[Tensor, State]:
        """Return Adam's step for learning rate 1, without weight decay, shape (P,), and the new moments."""
        m = moving_average(ctx.local["m"], d, self.beta1)
        v = moving_average(ctx.local["v"], d**2, self.beta2)
        m_steps, v_steps = self.averaged_steps(ctx)
        m_hat, v_hat = m / bias_correction(self.beta1, m_steps), v / bias_correction(self.beta2, v_steps)
        return m_hat / (v_hat.sqrt() + self.eps), {"m": m, "v": v}

    def divergence_hint(self) -> str | None:
        return "Adam changes each weight by about training.lr in every step; use 0.001 or less"


def moving_average(old: Tensor, new: Tensor, beta: float) -> Tensor:
    """Return beta old + (1 - beta) new."""
    return beta * old + (1 - beta) * new


def bias_correction(beta: float, steps: Tensor) -> Tensor | float:
    """Return 1 - beta^steps, the sum of the weights in an exponential moving average of ``steps`` values.

    >>> bias_correction(0.5, torch.tensor(2.0))
    tensor(0.7500)
    """
    # In float32, expm1 keeps the digits that 1 - 0.999^steps would lose.
    return -torch.expm1(steps * math.log(beta)) if beta else 1.0
