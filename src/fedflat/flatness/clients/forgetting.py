"""What a model forgets between rounds: accuracies per class or per client's distribution, as a matrix [rounds, parts] (ECCV Fig. 3).

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
    """One number for each part."""

    lost: list[float]
    """max over earlier rounds of a_s, less a_T: what had been known and no longer is; below 0 where the last is the best."""
    swing: list[float]
    """The mean of |a_t - a_(t-1)|: how much a part goes up and down from one look to the next."""
    lowest: list[float]
    """The lowest accuracy since the part was first known (at or above half of its best)."""


def forgetting(accuracies: Sequence[Sequence[float]]) -> Forgetting:
    """How much of each part is forgotten, from its accuracies over rounds."""
    values = np.asarray(accuracies, dtype=float)
    if values.ndim != 2 or len(values) < 2:
        raise UserError(
            "forgetting is seen between rounds, and there are accuracies of fewer than two; look more often (flatness.every)"
        )
    lost = values[:-1].max(0) - values[-1]
    swing = np.abs(np.diff(values, axis=0)).mean(0)
    lowest = [float(part[int(np.argmax(part >= part.max() / 2)) :].min()) for part in values.T]
    return Forgetting(lost.tolist(), swing.tolist(), lowest)
