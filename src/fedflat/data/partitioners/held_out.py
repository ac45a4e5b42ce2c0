"""Clients that never train."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedflat.data.partitioners.partitioner import Clients, PartitionModifier
from fedflat.errors import UserError
from fedflat.text import param


@dataclass(frozen=True)
class HeldOut(PartitionModifier):
    """A random share of the clients never trains; testing on them measures the participation gap (Yuan et al. 2022)."""

    stream = 0x0B5E
    needs_disjoint = True
    citation = "Yuan et al. 2022"
    examples = ("dirichlet(alpha=0.1)+held-out(share=0.2)",)
    share: float = param(
        0.2, "share of clients that never train; at least one trains and one does not", above=0, high=0.99
    )

    def hold_out_clients(self, clients: Clients, rng: np.random.Generator) -> tuple[Clients, Clients]:
        """Draw the clients that never train.

        Args:
            clients: positions of each client's examples.
            rng: source of randomness.

        Returns:
            The clients that train and those that never do, both in their original order; at least one of each.
        """
        total = len(clients)
        if total < 2:
            raise UserError(
                "held-out needs at least 2 clients, but this partition has only one; choose another partition"
            )
        count = min(max(round(self.share * total), 1), total - 1)
        unseen = set(rng.permutation(total)[:count].tolist())
        return (
            tuple(positions for client, positions in enumerate(clients) if client not in unseen),
            tuple(positions for client, positions in enumerate(clients) if client in unseen),
        )
