"""Random numbers as a function of (seed, purpose, round, client), so that no draw depends on earlier ones."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import ParamSpec

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
