"""Randomness as a function of (seed, purpose, round, client), never of a stream that someone advanced."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import ParamSpec

import numpy as np
import torch

P = ParamSpec("P")
Steps = Generator[int, None, None]


def generator(seed: int, purpose: str, round: int = 0, client: int = 0) -> np.random.Generator:
    """The random numbers for one purpose, in one round, for one client.

    >>> bool(generator(1, "batches", 2, 3).random() == generator(1, "batches", 2, 3).random())
    True
    """
    return np.random.default_rng(np.random.SeedSequence([seed, zlib.crc32(purpose.encode()), round, client]))


def seed_torch(seed: int, purpose: str, round: int = 0, client: int = 0) -> None:
    """Seed torch's global generator, for what draws from it by itself: initial weights and dropout."""
    number = int(generator(seed, purpose, round, client).integers(2**62))
    # torch.manual_seed takes half a millisecond to note where it was called from, for a GPU that may never be used.
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(number)


class Stream:
    """Draws from torch's global generator on the CPU that go on from one another, and move nobody else's."""

    def __init__(self) -> None:
        self._state = torch.get_rng_state()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Let torch draw from here; afterwards its generator is as it was."""
        others = torch.get_rng_state()
        torch.set_rng_state(self._state)
        try:
            yield
        finally:
            self._state = torch.get_rng_state()
            torch.set_rng_state(others)


def drawn_apart(steps: Callable[P, Steps]) -> Callable[P, Steps]:
    """Let steps draw from a stream of their own, so that whoever asks for them finds torch's generator as it was, between them too.

    A GPU's generator is left alone, since captured graphs draw from it.
    """

    @functools.wraps(steps)
    def apart(*args: P.args, **kwargs: P.kwargs) -> Steps:
        stream, going = Stream(), steps(*args, **kwargs)
        try:
            while True:
                with stream.in_use():
                    done = next(going, None)
                if done is None:
                    return
                yield done
        finally:
            with stream.in_use():
                going.close()

    return apart
