"""The clients that the data come from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedflat.data.dialects.dialect import Dialect, IntArray, Pool
from fedflat.errors import UserError


@dataclass(frozen=True)
class Natural(Dialect):
    """Every writer, character or domain of the data set is a client."""

    by_label: ClassVar[bool] = False

    @property
    def fixes_clients(self) -> bool:
        """There is one client for each group."""
        return True

    def divide(self, pool: Pool, clients: int | None, rng: np.random.Generator) -> list[IntArray]:
        """The examples of each group."""
        if pool.groups is None:
            raise UserError("this data set does not say whose examples are whose, so that it has no natural split; choose another split")
        if clients not in (None, pool.num_groups):
            raise UserError(f"the natural split of this data set has {pool.num_groups} clients, but {clients} were asked for")
        sizes = np.bincount(pool.groups, minlength=pool.num_groups)
        if not sizes.all():
            raise UserError(
                f"natural client {sizes.argmin()} has all its examples in the validation set or beyond the long tail; "
                "take a smaller share or factor"
            )
        return np.split(np.argsort(pool.groups, kind="stable"), np.cumsum(sizes)[:-1])
