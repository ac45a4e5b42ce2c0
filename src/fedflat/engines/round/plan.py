"""Who takes part in a round and which batches each client sees, as functions of seed, round and client only."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, ParamSpec

import numpy as np
import torch

P = ParamSpec("P")
Rounds = Generator[int, None, None]


def generator(seed: int, purpose: str, round: int = 0, client: int = 0) -> np.random.Generator:
    """A numpy generator for one purpose, in one round, for one client.

    >>> bool(generator(1, "batches", 2, 3).random() == generator(1, "batches", 2, 3).random())
    True
    """
    return np.random.default_rng(np.random.SeedSequence([seed, zlib.crc32(purpose.encode()), round, client]))


def seed_torch(seed: int, purpose: str, round: int = 0, client: int = 0) -> None:
    """Seed torch's global generator, from which initial weights and dropout are drawn."""
    number = int(generator(seed, purpose, round, client).integers(2**62))
    # torch.manual_seed would spend half a millisecond recording a stack trace for a GPU that may never be used.
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(number)


class RngStream:
    """A separate stream of torch's global CPU generator, which can be switched to and from."""

    def __init__(self) -> None:
        self._state = torch.get_rng_state()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make torch draw from this stream; the global generator's state is restored afterwards."""
        outer = torch.get_rng_state()
        torch.set_rng_state(self._state)
        try:
            yield
        finally:
            self._state = torch.get_rng_state()
            torch.set_rng_state(outer)


def isolated_rng(rounds: Callable[P, Rounds]) -> Callable[P, Rounds]:
    """Decorate a generator function so that its draws do not affect torch's CPU generator as the caller sees it.

    The GPU's generator is left alone, because captured graphs draw from it.
    """

    @functools.wraps(rounds)
    def isolated(*args: P.args, **kwargs: P.kwargs) -> Rounds:
        stream, running = RngStream(), rounds(*args, **kwargs)
        try:
            while True:
                with stream.active():
                    done = next(running, None)
                if done is None:
                    return
                yield done
        finally:
            with stream.active():
                running.close()

    return isolated


@dataclass(frozen=True)
class Sampler:
    """Samples the cohort of a round.

    Args:
        clients: number of clients in the federation.
        clients_per_round: size of a cohort; its mean for ``bernoulli``.
        kind: ``fixed`` draws exactly that many clients, ``bernoulli`` draws each client independently.
        dropout: probability that a sampled client never answers.
    """

    clients: int
    clients_per_round: int
    kind: Literal["fixed", "bernoulli"] = "fixed"
    dropout: float = 0.0

    def __call__(self, seed: int, round: int) -> list[int]:
        """The clients of a round in ascending order, at least one."""
        rng = generator(seed, "cohort", round)
        # Drawing a binomial number of clients without replacement equals independent draws, at the cohort's cost.
        count = (
            self.clients_per_round
            if self.kind == "fixed"
            else max(1, int(rng.binomial(self.clients, self.clients_per_round / self.clients)))
        )
        sampled = rng.choice(self.clients, count, replace=False)
        clients = [int(client) for client in sorted(sampled)]
        present = [c for c in clients if generator(seed, "dropout", round, c).random() >= self.dropout]
        return present or [int(min(sampled))]


@dataclass(frozen=True)
class Plan:
    """How much a client trains in a round.

    Args:
        batch_size: examples per batch.
        epochs: local epochs; ignored if ``steps`` is given.
        steps: local steps.
        partial: probability that a client does only part of its steps.
    """

    batch_size: int
    epochs: int = 1
    steps: int | None = None
    partial: float = 0.0

    def batches(self, seed: int, round: int, client: int, size: int) -> list[np.ndarray]:
        """A client's batches, as positions in its ``size`` examples.

        Within an epoch examples are drawn without replacement; the last batch may be smaller.
        """
        rng = generator(seed, "batches", round, client)
        per_epoch = -(-size // self.batch_size)
        total = per_epoch * self.epochs if self.steps is None else self.steps
        orders = [rng.permutation(size) for _ in range(-(-total // per_epoch))]
        batches = [
            order[start : start + self.batch_size] for order in orders for start in range(0, size, self.batch_size)
        ]
        return batches[: self._steps_done(total, seed, round, client)]

    def samples(self, size: int) -> int:
        """Examples that a client with ``size`` examples sees in a round if it does all its steps.

        >>> Plan(10, epochs=2).samples(25), Plan(10, steps=4).samples(25), Plan(10, steps=4).samples(5)
        (50, 35, 20)
        """
        if self.steps is None:
            return self.epochs * size
        per_epoch = -(-size // self.batch_size)
        full_epochs, rest = divmod(self.steps, per_epoch)
        return full_epochs * size + rest * min(self.batch_size, size)

    def _steps_done(self, total: int, seed: int, round: int, client: int) -> int:
        if not self.partial:
            return total
        rng = generator(seed, "partial", round, client)
        return total if rng.random() >= self.partial else int(rng.integers(1, total + 1))
