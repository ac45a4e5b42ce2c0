"""Any number of clients, none of which exists before it is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, overload

import numpy as np

from fedflat.data.partitioners.dirichlet import log_dirichlet, softmax
from fedflat.data.partitioners.partitioner import IntArray, Partitioner, Pool
from fedflat.errors import UserError
from fedflat.text import param, show


@dataclass(frozen=True)
class Virtual(Partitioner):
    """Each client, when asked for, draws q ~ Dir(alpha) and its examples by q from the whole training set, so that clients share them.

    A client is a function of the seed and its number alone: a million of them cost no more than those that are looked at.
    """

    disjoint: ClassVar[bool] = False
    clients: int | None = param(
        None, "how many clients there are; none is as many as are asked for", low=1, high=10**15
    )
    size: int = param(50, "how many examples every client has", low=1)
    alpha: float = param(0.1, "concentration: the smaller, the fewer classes a client has; 0 is one class each", low=0)

    @property
    def fixes_clients(self) -> bool:
        """Where the text has a number of clients, that is it."""
        return self.clients is not None

    def divide(self, pool: Pool, clients: int | None, rng: np.random.Generator) -> VirtualClients:
        """Clients that draw their examples when they are asked for."""
        if self.clients is not None and clients not in (None, self.clients):
            raise UserError(
                f"the partition {show('virtual', {'clients': self.clients})} cannot have {clients} clients; name one number only"
            )
        number = self.clients or clients
        if number is None or number < 1:
            raise UserError(f"this partition needs a number of clients of at least 1, not {number}")
        by_class = np.argsort(pool.targets, kind="stable")
        available = np.bincount(pool.targets, minlength=pool.num_classes)
        available = available[available > 0]
        return VirtualClients(by_class, available, self.size, self.alpha, int(rng.integers(2**63)), range(number))


@dataclass(frozen=True, eq=False)
class VirtualClients(Sequence[IntArray]):
    """A sequence of clients of which only the recipe is kept; memory depends on the training set, not on the number of clients."""

    positions: IntArray
    """The positions of all examples, class by class."""
    available: IntArray
    """How many examples of each class there are; every class has some."""
    size: int
    alpha: float
    root: int
    """What all draws depend on, besides the number of the client."""
    numbers: range

    def __len__(self) -> int:
        return len(self.numbers)

    @overload
    def __getitem__(self, number: int) -> IntArray: ...
    @overload
    def __getitem__(self, number: slice) -> VirtualClients: ...
    def __getitem__(self, number: int | slice) -> IntArray | VirtualClients:
        """The sorted positions of one client, or some of the clients, as lazy as all."""
        return (
            replace(self, numbers=self.numbers[number])
            if isinstance(number, slice)
            else self._draw(self.numbers[number])
        )

    def renumbered(self, positions: IntArray) -> VirtualClients:
        """The same clients, where the example at position p is now at ``positions[p]``."""
        return replace(self, positions=positions[self.positions])

    def _draw(self, client: int) -> IntArray:
        rng = np.random.default_rng(np.random.SeedSequence([self.root, client]))
        asked = self._asked(rng)
        starts = np.cumsum(self.available) - self.available
        drawn = []
        for label in np.flatnonzero(asked):
            often, rest = divmod(int(asked[label]), int(self.available[label]))
            # A class of which more is asked than there is comes whole as often as it fits: the rest is without replacement.
            drawn += [starts[label] + np.arange(self.available[label])] * often
            drawn.append(starts[label] + rng.choice(self.available[label], rest, replace=False, shuffle=False))
        return np.sort(self.positions[np.concatenate(drawn)])

    def _asked(self, rng: np.random.Generator) -> IntArray:
        classes = len(self.available)
        if self.alpha == 0:
            return np.bincount([rng.integers(classes)], [self.size], classes).astype(np.int64)
        return rng.multinomial(self.size, softmax(log_dirichlet(self.alpha, (1, classes), rng))[0])
