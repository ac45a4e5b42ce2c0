"""Forgetting between rounds, from accuracies [rounds, parts] per class or client distribution (ECCV Fig. 3).

>>> forgetting([[0.2, 0.9], [0.8, 0.1], [0.5, 0.6]]).lost
[0.30000000000000004, 0.30000000000000004]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedflat.errors import UserError


@dataclass(frozen=True)
class Forgetting:
    """One value per part (class or client)."""

    lost: list[float]
    """max over s < T of a_s, minus a_T; negative if the last accuracy is the best."""
    swing: list[float]
    """The mean of |a_t - a_(t-1)| over consecutive measurements."""
    lowest: list[float]
    """The lowest accuracy after the part first reached half of its best."""


def forgetting(accuracies: Sequence[Sequence[float]]) -> Forgetting:
    """Measure the forgetting of each part, where a part is a class or a client.

    Args:
        accuracies: ``accuracies[round][part]``, of at least two rounds, in order.
    """
    values = np.asarray(accuracies, dtype=float)
    if values.ndim != 2 or len(values) < 2:
        raise UserError("forgetting needs accuracies of at least two rounds; measure more often (flatness.every)")
    lost = values[:-1].max(0) - values[-1]  # best earlier accuracy minus the last one
    swing = np.abs(np.diff(values, axis=0)).mean(0)  # mean change between consecutive rounds
    lowest = []  # lowest accuracy after a part first reached half of its best
    for accuracy in values.T:
        first_at_half = int(np.argmax(accuracy >= accuracy.max() / 2))  # argmax finds the first True
        lowest.append(float(accuracy[first_at_half:].min()))
    return Forgetting(lost.tolist(), swing.tolist(), lowest)
