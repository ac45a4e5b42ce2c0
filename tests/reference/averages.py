"""Averages of server models over rounds; entry t of every list is the model after round t."""

from collections.abc import Sequence
from math import floor
from typing import Literal

import numpy as np

from .trace import Vector


def swa(
    models: Sequence[Vector],
    *,
    start: float = 0.75,
    cycle: int = 1,
    weighting: Literal["mean", "literal"] = "mean",
    capture_phase: Literal["released", "cycle_end"] = "released",
) -> list[Vector]:
    """Caldarola et al. 2022; `models` is x^0..x^T."""
    T = len(models) - 1
    t0 = floor(start * T)
    evaluated, average, n = [], models[0], 0.0
    for i in range(T):
        if i == t0:
            average, n = models[i], 0.0
        if weighting == "literal":
            n = i / cycle
        if capture_phase == "cycle_end":
            capture = i >= t0 and (i % cycle) + 1 == cycle
        elif weighting == "literal":
            capture = i >= t0 and i % cycle == 0
        else:
            capture = i > t0 and (i - t0) % cycle == 0
        if capture:
            average = (average * n + models[i + 1]) / (n + 1)
            n += 1
        evaluated.append(average if i >= t0 else models[i + 1])
    return evaluated


def cyclic_rates(rounds: int, *, high: float, low: float, cycle: int, start: float = 0.75) -> list[float]:
    """The learning rates that go with `swa`: constant before the start, then decreasing to low in every cycle."""
    t0 = floor(start * rounds)
    fractions = [((i % cycle) + 1) / cycle if i >= t0 and cycle > 1 else 0.0 for i in range(rounds)]
    return [(1 - q) * high + q * low for q in fractions]


def wima(models: Sequence[Vector], *, window: int) -> list[Vector]:
    """Mean of the last `window` of x^1..x^T, or of all if there are fewer."""
    return [np.mean(models[max(0, t + 1 - window) : t + 1], 0) for t in range(len(models))]


def wima_closed_form(models: Sequence[Vector], *, window: int) -> list[Vector]:
    """WiMA paper, eq. 6, on x^0..x^T, for the rounds t = W-1..T-1 with a full window."""
    evaluated = []
    for t in range(window - 1, len(models) - 1):
        first = t + 1 - window
        moves = [(first + window - tau) / window * (models[tau] - models[tau + 1]) for tau in range(first, t + 1)]
        evaluated.append(models[first] - np.sum(moves, 0))
    return evaluated


def ema(models: Sequence[Vector], *, decay: float) -> list[Vector]:
    """w <- d w + (1 - d) x over x^1..x^T, started at x^1."""
    evaluated = [models[0]]
    for x in models[1:]:
        evaluated.append(decay * evaluated[-1] + (1 - decay) * x)
    return evaluated
