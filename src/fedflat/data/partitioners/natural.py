"""The clients that the data come from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedflat.data.partitioners.partitioner import IntArray, Partitioner, Pool
from fedflat.errors import UserError
from fedflat.text import param


@dataclass(frozen=True)
class Natural(Partitioner):
    """Every writer, character, city or domain of the dataset is a client, or several where it has more than ``largest`` examples."""

    by_label: ClassVar[bool] = False
    largest: int | None = param(
        None, "cut natural clients with more examples than this into several of nearly equal size", low=1
    )

    @property
    def fixes_clients(self) -> bool:
        """There is one client for each group, or as many as its size asks for."""
        return True

    def divide(self, pool: Pool, clients: int | None, rng: np.random.Generator) -> list[IntArray]:
        """The examples of each group."""
        if pool.groups is None:
            raise UserError(
                "this dataset does not say whose examples are whose, so that it has no natural partition; choose another partition"
            )
        sizes = np.bincount(pool.groups, minlength=pool.num_groups)
        pieces = np.ones_like(sizes) if self.largest is None else -(-sizes // self.largest)
        if clients not in (None, int(pieces.sum())):
            raise UserError(
                f"the natural partition of this dataset has {pieces.sum()} clients, but {clients} were asked for"
            )
        if not sizes.all():
            raise UserError(
                f"natural client {sizes.argmin()} has all its examples in the validation set or beyond the long tail; "
                "take a smaller share or factor"
            )
        whole = np.split(np.argsort(pool.groups, kind="stable"), np.cumsum(sizes)[:-1])
        if self.largest is None:
            return whole
        return [
            np.sort(piece)
            for some, count in zip(whole, pieces, strict=True)
            for piece in np.array_split(rng.permutation(some), count)
        ]
