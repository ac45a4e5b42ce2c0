"""Random generators that are determined by seed and purpose, and torch's global generator shared among runs."""

from __future__ import annotations

import functools
import threading
import zlib
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import ParamSpec

import numpy as np
import torch
from torch import Tensor

from fedflat.gradients import gradients_enabled

P = ParamSpec("P")
Rounds = Generator[int, None, None]
"""A generator that runs an experiment and yields the number of each finished round."""
_GENERATOR_LOCK = threading.RLock()
_OUTER_STATES: dict[object, Tensor] = {}
"""For each active ``RngStream``, in order of activation, the state to restore when it ends."""


def generator(seed: int, purpose: str, round: int = 0, client: int = 0) -> np.random.Generator:
    """A numpy generator determined by the seed, a purpose such as ``batches``, the round and the client's number.

    >>> bool(generator(1, "batches", 2, 3).random() == generator(1, "batches", 2, 3).random())
    True
    """
    return np.random.default_rng(np.random.SeedSequence([seed, zlib.crc32(purpose.encode()), round, client]))


def seed_torch(seed: int, purpose: str, round: int = 0, client: int = 0) -> None:
    """Seed torch's global generator, which draws initial weights and dropout.

    The seed of the run, a purpose such as ``dropout``, the round and the client determine the draws; see ``generator``.
    """
    number = int(generator(seed, purpose, round, client).integers(2**62))
    # torch.manual_seed would spend half a millisecond recording a stack trace for a GPU that may never be used.
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(number)


@contextmanager
def exclusive_generator() -> Iterator[None]:
    """Let only this thread seed and use torch's global CPU generator, which runs in other threads share."""
    with _GENERATOR_LOCK:
        yield


class RngStream:
    """A separate stream of random numbers: a state of torch's global CPU generator, which is in place while active."""

    def __init__(self) -> None:
        self._state = torch.get_rng_state()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make torch draw from this stream; the global generator's state is restored afterwards."""
        key = object()
        with exclusive_generator():
            _OUTER_STATES[key] = torch.get_rng_state()
            torch.set_rng_state(self._state)
        try:
            yield
        finally:
            with exclusive_generator():
                self._state = torch.get_rng_state()
                later = list(_OUTER_STATES)[list(_OUTER_STATES).index(key) + 1 :]
                outer = _OUTER_STATES.pop(key)
                if later:  # streams of other threads began after this one, and end after it
                    _OUTER_STATES[later[0]] = outer
                else:
                    torch.set_rng_state(outer)


def isolated_from_caller(rounds: Callable[P, Rounds]) -> Callable[P, Rounds]:
    """Decorate a generator function so that its draws do not affect torch's CPU generator as the caller sees it.

    The GPU's generator is left alone, because captured graphs draw from it. Torch's grad mode is isolated, too: it is
    on while the generator runs, and the caller's between rounds.
    """

    @functools.wraps(rounds)
    def isolated(*args: P.args, **kwargs: P.kwargs) -> Rounds:
        """Run the decorated generator; while it computes, torch draws from a random stream of its own."""
        stream, running = RngStream(), rounds(*args, **kwargs)
        try:
            while True:
                with stream.active(), gradients_enabled():
                    finished_round = next(running, None)
                if finished_round is None:
                    return
                yield finished_round
        finally:  # the caller may stop early
            with stream.active(), torch.enable_grad():
                running.close()

    return isolated
