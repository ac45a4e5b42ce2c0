"""Moments of directions, which Adam and Muon keep."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def moving_average(old: Tensor, new: Tensor, beta: float) -> Tensor:
    """Return beta old + (1 - beta) new."""
    return beta * old + (1 - beta) * new


def adam_step(m: Tensor, v: Tensor, m_mass: Tensor | float, v_mass: Tensor | float, eps: float) -> Tensor:
    """Return Adam's step for learning rate 1, from the moments m and v.

    Args:
        m, v: moving averages of the directions and of their squares, shape (P,), which started at 0.
        m_mass, v_mass: sums of the weights in these averages (see ``mass``), which correct for the start at 0.
        eps: constant that keeps the step finite.
    """
    return (m / m_mass) / ((v / v_mass).sqrt() + eps)


def mass(beta: float, steps: Tensor) -> Tensor | float:
    """Return 1 - beta^steps, the sum of the weights in an exponential moving average of ``steps`` values.

    >>> mass(0.5, torch.tensor(2.0))
    tensor(0.7500)
    """
    # In float32, expm1 keeps the digits that 1 - 0.999^steps would lose.
    return -torch.expm1(steps * math.log(beta)) if beta else 1.0
