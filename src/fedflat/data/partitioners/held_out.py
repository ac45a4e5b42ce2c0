"""Clients that never train."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedflat.data.partitioners.partitioner import IntArray
from fedflat.errors import UserError
from fedflat.text import param


@dataclass(frozen=True)
class HeldOut:
    """A share of the clients, drawn at random, never trains: what the model does on them is the participation gap (Yuan et al. 2022)."""

    share: float = param(
        0.2, "which share of the clients never trains; at least one does, and one does not", above=0, high=0.99
    )

    def separate(
        self, clients: Sequence[IntArray], rng: np.random.Generator
    ) -> tuple[tuple[IntArray, ...], tuple[IntArray, ...]]:
        """The clients that train and those that do not, each in their former order."""
        total = len(clients)
        if total < 2:
            raise UserError(
                "held-out takes some of the clients away, but this partition has only one; choose a partition with at least 2"
            )
        unseen = np.zeros(total, dtype=bool)
        unseen[rng.permutation(total)[: min(max(round(self.share * total), 1), total - 1)]] = True
        seen, kept_apart = (tuple(clients[int(i)] for i in np.flatnonzero(chosen)) for chosen in (~unseen, unseen))
        return seen, kept_apart
