"""Random draws as functions of seed, round and client only: the cohort of a round, and each client's batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from typing import Literal

import numpy as np

from fedflat.randomness import generator


@dataclass(frozen=True)
class Sampler:
    """Samples the cohort of a round.

    Args:
        clients: number of clients in the federation.
        clients_per_round: size of a cohort; with ``bernoulli``, the mean size.
        kind: ``fixed`` draws exactly ``clients_per_round`` clients, ``bernoulli`` draws each client independently.
        dropout: probability that a sampled client never answers.
    """

    clients: int
    clients_per_round: int
    kind: Literal["fixed", "bernoulli"] = "fixed"
    dropout: float = 0.0

    def __call__(self, seed: int, round: int) -> list[int]:
        """The numbers of the clients that participate in a round, in ascending order; at least one.

        If no sampled client answers, the first one participates anyway, since a round without clients is undefined.
        """
        rng = generator(seed, "cohort", round)
        count = self.clients_per_round
        if self.kind == "bernoulli":
            # Drawing the cohort's size first is equivalent to one draw per client, but faster with many clients.
            count = max(1, int(rng.binomial(self.clients, self.clients_per_round / self.clients)))
        sampled = [int(client) for client in sorted(rng.choice(self.clients, count, replace=False))]
        answering = [client for client in sampled if generator(seed, "dropout", round, client).random() >= self.dropout]
        return answering or sampled[:1]


@dataclass(frozen=True)
class Plan:
    """How much a client trains in a round.

    Args:
        batch_size: examples per batch.
        epochs: local epochs; ignored if ``steps`` is given.
        steps: local steps.
        partial: probability that a client completes only part of its steps.
        limit: how many of its steps a client completes before a deadline, given its number and these steps; pickled
            for workers, so it must be small.
    """

    batch_size: int
    epochs: int = 1
    steps: int | None = None
    partial: float = 0.0
    limit: Callable[[int, int], int] | None = None

    def batches(self, seed: int, round: int, client: int, size: int) -> list[np.ndarray]:
        """A client's batches in a round, as positions in its own examples; the last batch of an epoch may be smaller.

        Args:
            seed: seed of the run.
            round: number of the round, from 0.
            client: the client's number.
            size: number of the client's examples, drawn without replacement within an epoch.
        """
        rng = generator(seed, "batches", round, client)
        steps = self.planned_steps(size)
        batches = []
        for _ in range(ceil(steps / ceil(size / self.batch_size))):
            order = rng.permutation(size)
            batches += [order[start : start + self.batch_size] for start in range(0, size, self.batch_size)]
        completed = self.unlimited_steps(seed, round, client, size)
        return batches[: completed if self.limit is None else self.limit(client, completed)]

    def planned_steps(self, size: int) -> int:
        """Local steps of a client with ``size`` examples that completes all of them.

        >>> Plan(10, epochs=2).planned_steps(25), Plan(10, steps=4).planned_steps(25)
        (6, 4)
        """
        return ceil(size / self.batch_size) * self.epochs if self.steps is None else self.steps

    def samples(self, size: int) -> int:
        """Examples that a client with ``size`` examples sees in a round if it completes all its steps.

        >>> Plan(10, epochs=2).samples(25), Plan(10, steps=4).samples(25), Plan(10, steps=4).samples(5)
        (50, 35, 20)
        """
        if self.steps is None:
            return self.epochs * size
        full_epochs, remaining_steps = divmod(self.steps, ceil(size / self.batch_size))
        return full_epochs * size + remaining_steps * min(self.batch_size, size)

    def unlimited_steps(self, seed: int, round: int, client: int, size: int) -> int:
        """Steps that a client completes without a deadline: all, or with probability ``partial`` a random number.

        The arguments are those of ``batches``.
        """
        steps = self.planned_steps(size)
        if not self.partial:
            return steps
        rng = generator(seed, "partial", round, client)
        return steps if rng.random() >= self.partial else int(rng.integers(1, steps + 1))
