"""Clients that never train."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedflat.data.partitioners.partitioner import IntArray, PartitionModifier
from fedflat.errors import UserError
from fedflat.text import param


@dataclass(frozen=True)
class HeldOut(PartitionModifier):
    """A random share of the clients never trains; testing on them measures the participation gap (Yuan et al. 2022)."""

    stream: ClassVar[int] = 0x0B5E
    needs_disjoint: ClassVar[bool] = True
    citation: ClassVar[str] = "Yuan et al. 2022"
    examples: ClassVar[tuple[str, ...]] = ("dirichlet(alpha=0.1)+held-out(share=0.2)",)
    share: float = param(
        0.2, "share of clients that never train; at least one trains and one does not", above=0, high=0.99
    )

    def separate(
        self, clients: tuple[IntArray, ...], rng: np.random.Generator
    ) -> tuple[tuple[IntArray, ...], tuple[IntArray, ...]]:
        total = len(clients)
        if total < 2:
            raise UserError(
                "held-out needs at least 2 clients, but this partition has only one; choose another partition"
            )
        is_unseen = np.zeros(total, dtype=bool)
        is_unseen[rng.permutation(total)[: min(max(round(self.share * total), 1), total - 1)]] = True
        seen, unseen = (tuple(clients[int(i)] for i in np.flatnonzero(chosen)) for chosen in (~is_unseen, is_unseen))
        return seen, unseen
