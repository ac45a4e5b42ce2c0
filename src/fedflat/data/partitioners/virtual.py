"""Any number of clients, each generated on access."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import overload

import numpy as np

from fedflat.data.partitioners.dirichlet import ALPHA_HELP, log_dirichlet, softmax
from fedflat.data.partitioners.partitioner import IntArray, LabelledExamples, Partitioner, check_clients
from fedflat.errors import UserError
from fedflat.text import param


@dataclass(frozen=True)
class Virtual(Partitioner):
    """Each client draws class probabilities q ~ Dir(alpha), then ``size`` training examples according to q.

    If examples do not have one class each (regression, multi-label, masks), a client draws uniformly from all of them.
    Clients may share examples. The examples of a client depend only on the seed and the client's number, and are drawn
    when the client is first used. Memory and time therefore depend on how many clients participate, not on how many
    there are.
    """

    by_label = False
    disjoint = False
    citation = "for studies of scale"
    examples = ("virtual(size=100,alpha=0.1)",)
    clients: int | None = param(None, "number of clients; if not set, the setting data.clients", low=1, high=10**15)
    size: int = param(50, "number of examples per client", low=1, high=10**7)
    alpha: float = param(0.1, ALPHA_HELP, low=0)

    @property
    def fixes_clients(self) -> bool:
        return self.clients is not None

    def divide(self, data: LabelledExamples, clients: int | None, rng: np.random.Generator) -> VirtualClients:
        """Return a sequence of clients whose examples are drawn on access.

        Args:
            data: the examples to draw from.
            clients: number of clients; None if the parameter ``clients`` of the partition gives it.
            rng: draws only the seed from which the clients are generated.
        """
        if self.clients is not None and clients not in (None, self.clients):
            raise UserError(
                f"the partition virtual(clients={self.clients}) conflicts with clients={clients}; give only one of them"
            )
        number = check_clients(self.clients or clients)
        sorted_by_class = np.argsort(data.targets, kind="stable")
        counts = data.class_counts
        seed = int(rng.integers(2**63))
        return VirtualClients(sorted_by_class, counts[counts > 0], self.size, self.alpha, seed, range(number))


@dataclass(frozen=True, eq=False)
class VirtualClients(Sequence[IntArray]):
    """A sequence of clients, drawn on access; its memory depends on the training set, not on the number of clients.

    Attributes:
        positions: positions of all examples, sorted by class [n].
        examples_per_class: number of examples of each class that occurs.
        size: examples per client.
        alpha: concentration of the Dirichlet distribution of a client's classes; 0 gives each client one class.
        seed: seed of all draws, together with the client's number.
        numbers: numbers of the clients in this sequence.
    """

    positions: IntArray
    examples_per_class: IntArray
    size: int
    alpha: float
    seed: int
    numbers: range

    def __len__(self) -> int:
        return len(self.numbers)

    @overload
    def __getitem__(self, number: int) -> IntArray: ...
    @overload
    def __getitem__(self, number: slice) -> VirtualClients: ...
    def __getitem__(self, number: int | slice) -> IntArray | VirtualClients:
        """Return the sorted positions of one client's examples or, for a slice, the selected clients, not yet drawn."""
        if isinstance(number, slice):
            return replace(self, numbers=self.numbers[number])
        return self._draw(self.numbers[number])

    def renumbered(self, positions: IntArray) -> VirtualClients:
        """Return the same clients, with position p replaced by ``positions[p]``."""
        return replace(self, positions=positions[self.positions])

    def _draw(self, client: int) -> IntArray:
        """Draw the sorted positions of the examples of the client with this number."""
        rng = np.random.default_rng(np.random.SeedSequence([self.seed, client]))
        counts = self._draw_class_counts(rng)
        class_starts = np.cumsum(self.examples_per_class) - self.examples_per_class
        drawn = []
        for label in np.flatnonzero(counts):
            repeats, rest = divmod(int(counts[label]), int(self.examples_per_class[label]))
            # If more examples are wanted than exist, the whole class repeats; the rest is drawn without replacement.
            drawn += [class_starts[label] + np.arange(self.examples_per_class[label])] * repeats
            partial_class = rng.choice(self.examples_per_class[label], rest, replace=False, shuffle=False)
            drawn.append(class_starts[label] + partial_class)
        return np.sort(self.positions[np.concatenate(drawn)])

    def _draw_class_counts(self, rng: np.random.Generator) -> IntArray:
        """Draw how many examples of each class one client has, [classes]; with alpha = 0, all are of one class."""
        classes = len(self.examples_per_class)
        if self.alpha > 0:
            return rng.multinomial(self.size, softmax(log_dirichlet(self.alpha, (1, classes), rng))[0])
        counts = np.zeros(classes, dtype=np.int64)
        counts[rng.integers(classes)] = self.size
        return counts
