"""Randomness as a function of (seed, purpose, round, client), never of a stream that someone advanced."""

from __future__ import annotations

import zlib

import numpy as np
import torch


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
