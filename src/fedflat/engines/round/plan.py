"""Who takes part in a round, and which batches each client sees: functions of the seed, the round and the client alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from fedflat.engines.round.randomness import generator


@dataclass(frozen=True)
class Sampler:
    """Draws the cohort of a round."""

    clients: int
    clients_per_round: int
    kind: Literal["fixed", "bernoulli"] = "fixed"
    dropout: float = 0.0
    """The probability that a sampled client never answers."""

    def __call__(self, seed: int, round: int) -> list[int]:
        """The clients of a round, in ascending order; never none."""
        rng = generator(seed, "cohort", round)
        # A binomial number of clients drawn without replacement is each client on its own with the same probability, at the cohort's cost.
        count = (
            self.clients_per_round
            if self.kind == "fixed"
            else max(1, int(rng.binomial(self.clients, self.clients_per_round / self.clients)))
        )
        chosen = rng.choice(self.clients, count, replace=False)
        answers = [int(i) for i in sorted(chosen) if generator(seed, "dropout", round, int(i)).random() >= self.dropout]
        return answers or [int(min(chosen))]


@dataclass(frozen=True)
class Plan:
    """How much a client works in a round: E epochs, or K steps, in batches of B."""

    batch: int
    epochs: int = 1
    steps: int | None = None
    partial: float = 0.0
    """The probability that a client does only part of its work."""

    def batches(self, seed: int, round: int, client: int, size: int) -> list[np.ndarray]:
        """Positions in the client's data, batch by batch: without replacement within an epoch, the last short batch kept."""
        rng = generator(seed, "batches", round, client)
        per_epoch = -(-size // self.batch)
        total = per_epoch * self.epochs if self.steps is None else self.steps
        order = [rng.permutation(size) for _ in range(-(-total // per_epoch))]
        batches = [epoch[start : start + self.batch] for epoch in order for start in range(0, size, self.batch)]
        return batches[: self._done(total, seed, round, client)]

    def samples(self, size: int) -> int:
        """How many examples a client that has ``size`` of them sees in a round, all its steps done.

        >>> Plan(10, epochs=2).samples(25), Plan(10, steps=4).samples(25), Plan(10, steps=4).samples(5)
        (50, 35, 20)
        """
        if self.steps is None:
            return self.epochs * size
        per_epoch = -(-size // self.batch)
        whole, rest = divmod(self.steps, per_epoch)
        return whole * size + rest * min(self.batch, size)

    def _done(self, total: int, seed: int, round: int, client: int) -> int:
        if not self.partial:
            return total
        rng = generator(seed, "partial", round, client)
        return total if rng.random() >= self.partial else int(rng.integers(1, total + 1))
